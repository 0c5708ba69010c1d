"""Acceptance inside vLLM: its counters, prompts and command line, against a stand-in for its server."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from sparkinfer_eval.accuracy.scores import read_scores
from sparkinfer_models import vllm_acceptance, vllm_checks
from sparkinfer_models.acceptance_table import difference
from sparkinfer_models.checkpoint import load_network
from sparkinfer_models.drafter import load_drafter
from sparkinfer_models.measured import portable
from sparkinfer_models.speculate import Speculator
from sparkinfer_models.vllm_acceptance import Counts, main, parse_counters, summarise

from sparkinfer.errors import ConfigError, EnvironmentProblem

ROOT = Path(__file__).resolve().parents[2]
DENSE = ROOT / "models" / "spark-tiny-dense"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The stand-in, started as the interpreter that has vLLM."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/training/fake_vllm.py "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Six prompts."""
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([[1, 2, 3]] * 6))
    return path


@pytest.fixture
def arguments(tmp_path: Path, python: Path, prompts: Path) -> list[str]:
    """Of a run against the stand-in."""
    options = {"target": DENSE, "drafter": f"{DENSE}-dflash2", "prompts": prompts, "python": python, "tokens": 9,
               "at-once": 2, "log": tmp_path / "log", "json": tmp_path / "out.json"}  # fmt: skip
    return ["run", *(str(item) for name, value in options.items() for item in (f"--{name}", value))]


@pytest.mark.parametrize(("mode", "unit", "parts"), [("", "answer", 6), ("mute", "group", 3), ("late", "answer", 6)])
def test_a_run_reads_answers_and_counters(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    unit: str,
    parts: int,
) -> None:
    monkeypatch.setenv("FAKE_VLLM", mode)
    assert main(arguments) == 0
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["engine"] == "vLLM 0.30.0"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", document["date"])
    assert document["argv"][:4] == ["vllm_acceptance.py", "run", "--target", "spark-tiny-dense"]
    assert not [part for part in document["argv"] if "/" in part]
    assert document["machine"]["cpus_online"]
    for name, folder in (("target", DENSE), ("drafter", Path(f"{DENSE}-dflash2"))):
        assert document[f"{name}_sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert [row["temperature"] for row in document["rows"]] == [0.0, 0.7, 1.0]
    for row in document["rows"]:
        # Nine tokens are two verifications an answer; the warm-up's are not counted.
        assert (row["verifications"], row["mean"], row["drafted_per_step"]) == (12, 3.0, 7.0)
        assert row["per_position"] == [1, 1, 1, 0, 0, 0, 0]
        assert row["standard_error"] == 0
        assert row["unit"] == unit
        assert row["sums"] == [[36 // parts, 12 // parts]] * parts
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("dead", "no such drafter"),
        ("plain", "does this server speculate"),
        ("short", "answered with 8 tokens"),
        ("busy", "does something else use this server"),
    ],
)
def test_what_goes_wrong_is_said(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str, words: str
) -> None:
    monkeypatch.setenv("FAKE_VLLM", mode)
    monkeypatch.setattr(vllm_acceptance, "COUNTERS_S", 0.3)
    assert main(arguments) == 3
    assert words in capsys.readouterr().err


def test_bad_input(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--max-model-len", "10"]) == 2
    assert "too short" in capsys.readouterr().err
    (tmp_path / "prompts.json").write_text("[[1, 2.5]]")
    assert main(arguments) == 2
    assert "not a list of lists of token ids" in capsys.readouterr().err


def test_counters_of_several_engines_add_up() -> None:
    text = "".join(
        f'vllm:spec_decode_num_{name}_total{{engine="{engine}"}} {value}\n'
        for engine in (0, 1)
        for name, value in (("drafts", 2), ("draft_tokens", 14), ("accepted_tokens", 5))
    )
    assert parse_counters(text) == Counts(4, 28, 10, ())
    with pytest.raises(EnvironmentProblem, match="num_drafts_total"):
        parse_counters("vllm:spec_decode_num_draft_tokens_total 1\n")


def test_summary_is_the_ratio_with_its_error() -> None:
    row = summarise(0.0, 4, "group", [Counts(10, 70, 20, (10, 10)), Counts(30, 210, 90, (30, 30))])
    assert (row["mean"], row["tokens_per_step"], row["per_position"]) == (2.75, 3.75, [1.0, 1.0])
    # Residuals -7.5 and 7.5: sqrt(112.5 / 1 / 2) / 20.
    assert row["standard_error"] == pytest.approx(0.375)
    with pytest.raises(ConfigError, match="no draft was verified"):
        summarise(0.0, 1, "group", [Counts(0, 0, 0, ())])


def test_greedy_drafts_are_the_same_at_every_temperature() -> None:
    network = load_network(DENSE, torch.float32).requires_grad_(False)
    drafter = load_drafter(Path(f"{DENSE}-dflash2"), torch.float32).requires_grad_(False)
    speculator = Speculator(network, drafter, shared_noise=False, ignore_stop=True)
    prompt = list(range(40, 72))
    decoded = speculator.decode(prompt, 24, 1.0, seed=3)
    assert len(decoded.tokens) == 24
    # Rejected or accepted, the text is the target's own: drafting decides the speed only.
    assert decoded.tokens == Speculator(network, drafter, ignore_stop=True).decode(prompt, 24, 1.0, seed=3).tokens


def test_a_histogram_is_counted() -> None:
    assert Counts.of_histogram([2, 1, 0, 3]) == Counts(6, 18, 10, (4, 3, 3))


def row(temperature: float, sums: list[list[int]]) -> dict[str, object]:
    """As much of a row as is compared."""
    return {"temperature": temperature, "prompts": len(sums), "sums": sums, "standard_error": 0.1}


def test_what_prompts_contribute_to_both_cancels() -> None:
    sums = [[10, 10], [60, 10], [20, 10], [50, 10]]
    other = [[a + 1, b] for a, b in sums]
    paired = difference(0.0, row(0.0, sums), row(0.0, other))
    assert paired.paired
    assert paired.difference == pytest.approx(-0.1)
    assert paired.error == pytest.approx(0, abs=1e-12)
    assert not (alone := difference(0.0, row(0.0, sums), row(0.0, other[:2] * 4))).paired
    assert alone.error > 1


SAME = {"target": "T", "drafter": "D", "tokens": 9, "ignore_stop": True, "draft_sample_method": "greedy",
        "prompts_sha256": "0"}  # fmt: skip


def test_measurements_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums = [[10, 10], [60, 10], [20, 10], [50, 11]]
    rows = {"first": sums, "same": [[11, 10], [58, 10], [20, 10], [51, 11]], "worse": [[a - 8, b] for a, b in sums]}
    for name, values in rows.items():
        document = {**SAME, "engine": name, "rows": [row(0.7, values)]}
        (tmp_path / name).write_text(json.dumps(document))
    first, same, worse = (str(tmp_path / name) for name in rows)
    assert main(["compare", first, same]) == 0
    assert main(["compare", first, worse]) == 1
    assert "**no**" in capsys.readouterr().out
    (tmp_path / "same").write_text(json.dumps({**document, "tokens": 10}))
    assert main(["compare", first, same]) == 2
    assert "tokens is 9 in one and 10" in capsys.readouterr().err
    for name in SAME:
        (tmp_path / "same").write_text(json.dumps({**document, name: "another"}))
        assert main(["compare", first, same]) == 2
        assert f"{name} is " in capsys.readouterr().err
        (tmp_path / "same").write_text(json.dumps({key: value for key, value in document.items() if key != name}))
        assert main(["compare", first, same]) == 2
        assert f"does not say its {name}" in capsys.readouterr().err
    for name in ("target_sha256", "drafter_sha256"):
        # Said by one alone it is no reason; documents of before do not say it.
        (tmp_path / "first").write_text(json.dumps({**document, name: "1"}))
        (tmp_path / "same").write_text(json.dumps(document))
        assert main(["compare", first, same]) == 0
        (tmp_path / "same").write_text(json.dumps({**document, name: "2"}))
        assert main(["compare", first, same]) == 2
        assert "measured with other weights" in capsys.readouterr().err
    (tmp_path / "same").write_text("{}")
    assert main(["compare", first, same]) == 2


def test_command_lines_keep_names_and_lose_paths() -> None:
    given = ["/a/python", "x.py", "--json=/b/out.json", "--model", "models/m", '{"model": "/c/d", "n": 7}', "{x"]
    wanted = ["python", "x.py", "--json=out.json", "--model", "models/m", '{"model": "d", "n": 7}', "{x"]
    assert portable(given) == wanted


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_kept_references_can_be_compared(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ROOT / "reports" / "acceptance"
    files = [str(folder / f"{name}-reference-{dtype}.json") for dtype in ("bfloat16", "float32")]
    assert main(["compare", *files]) == 0
    assert capsys.readouterr().out.count("| yes |") == 3


def test_a_quantised_form_is_recorded(
    tmp_path: Path, python: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, out = ["--state", str(tmp_path / "state")], tmp_path / "out"
    only = ["--only", "dense-fp8"]
    stale = tmp_path / "state" / "checkpoints" / "spark-tiny-dense-fp8"
    stale.mkdir(parents=True)
    (stale / "other.txt").touch()
    assert vllm_checks.main(["start", *state, *only, "--python", str(python)]) == 2
    assert "run `prepare` first" in capsys.readouterr().err
    (stale / "config.json").write_text("{}")
    assert vllm_checks.main(["prepare", *state, *only]) == 0
    assert "is made anew" in capsys.readouterr().out
    assert not (stale / "other.txt").exists()
    made = (stale / "config.json").stat().st_mtime_ns
    assert vllm_checks.main(["prepare", *state, *only]) == 0
    assert (stale / "config.json").stat().st_mtime_ns == made
    assert vllm_checks.main(["start", *state, *only, "--python", str(python)]) == 0
    try:
        assert vllm_checks.main(["wait", *state, "30"]) == 0
        (server,) = vllm_checks.read_running(tmp_path / "state")
        measure = ["measure", *state, "--prompts", str(prompts), "--out", str(out)]
        assert vllm_checks.main(measure) == 0
        assert vllm_checks.main(measure) == 0
    finally:
        assert vllm_checks.main(["stop", *state]) == 0
    assert server.command[-2:] == ["--linear-backend", "marlin"]
    assert "dense-fp8: in " in capsys.readouterr().out
    task, scores = read_scores(out / "dense-fp8.scores")
    assert len(scores.windows) == len(task.windows)
    assert scores.engine["model"] == "spark-tiny-dense-fp8"
    assert scores.engine["machine"]["cpus_usable"] > 0


def test_records_name_no_path_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = vllm_checks.parser().parse_args(
        ["judge", "--state", str(tmp_path / "state"), "--out", str(tmp_path / "out")]
    )
    found = vllm_checks.comparisons(options, "moe-nvfp4")
    assert found == {
        "spark-tiny-moe-nvfp4-vllm-gpu.json": [
            *("checkpoints/spark-tiny-moe-nvfp4", "scores:../out/moe-nvfp4.scores"),
            *("--json", "../out/spark-tiny-moe-nvfp4-vllm-gpu.json"),
        ],
        "vllm-gpu-spark-tiny-moe-nvfp4-transformers.json": [
            *("scores:../out/moe-nvfp4.scores", "transformers:checkpoints/spark-tiny-moe-nvfp4,form=16bit,device=cpu"),
            *("--json", "../out/vllm-gpu-spark-tiny-moe-nvfp4-transformers.json"),
        ],
    }
    calls = []

    def run(command: list[str], cwd: Path, check: bool) -> subprocess.CompletedProcess[str]:
        calls.append((command[2:], cwd))
        return subprocess.CompletedProcess(command, len(calls) % 2)

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "moe-nvfp4.scores").touch()
    monkeypatch.setattr(vllm_checks.subprocess, "run", run)
    assert vllm_checks.judge(options) == 1
    assert calls == [(arguments, options.state) for arguments in found.values()]


def test_servers_with_a_drafter_do_not_find_the_compiler(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("plain", "cuda", "both")]
    for folder, programs in zip(folders, (["gcc"], ["nvcc"], ["nvcc", "cc"]), strict=True):
        folder.mkdir()
        for program in programs:
            (folder / program).touch(mode=0o755)
    plain, cuda, both = map(str, folders)
    assert vllm_checks.path_without("nvcc", os.pathsep.join((plain, cuda))) == plain
    with pytest.raises(EnvironmentProblem, match="same folder of PATH as nvcc"):
        vllm_checks.path_without("nvcc", os.pathsep.join((plain, both)))


def test_one_configuration_of_an_autotuned_kernel() -> None:
    code = """
from triton import Config
from triton.runtime.autotuner import Autotuner
configs = [Config({"B": b}, num_warps=w) for b in (16, 32) for w in (2, 4)]
print(len(Autotuner(lambda x, n, B: None, ["x", "n", "B"], configs, ["n"], None, None).configs))
"""
    for path, count in (("", "4"), (str(vllm_checks.ONE_CONFIG), "1")):
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
        )
        assert done.stdout.strip() == count, done.stderr


def test_kernels_run_in_triton_s_interpreter(tmp_path: Path) -> None:
    """A mask combined with a scalar, functions that kernels call, a GPU library's: as in DFlash2's walk."""
    (tmp_path / "kernel.py").write_text("""
import torch, triton, triton.language as tl
from triton.backends import backends
from triton.language.extra import libdevice

@triton.jit
def copy(x, y, state, n, B: tl.constexpr):
    valid = tl.load(state) >= 0
    offsets = tl.arange(0, B)
    tl.store(y + offsets, tl.load(x + offsets, mask=(offsets < n) & valid, other=7.0), mask=(offsets < n) & valid)

@triton.jit
def best(row, mask):
    return tl.max(tl.where(mask, row, float("-inf")), axis=0, return_indices=True)

@triton.jit
def walk(x, tokens, values, n, B: tl.constexpr):
    offsets = tl.program_id(0) * B + tl.arange(0, B)
    value, index = best(tl.load(x + offsets), tl.arange(0, B) < n)
    tl.store(tokens + tl.program_id(0), index)
    tl.store(values + tl.program_id(0), libdevice.log1p(value))

x, y = torch.arange(8.0), torch.zeros(8)
copy[(1,)](x, y, torch.tensor([3]), 5, B=8)
print(y.tolist(), backends["cpu"].driver.is_active())
for _ in range(2):
    tokens, values = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    walk[(2,)](x, tokens, values, 3, B=4)
    print(tokens.tolist(), (values.exp() - 1).round().tolist())
""")
    folder = Path(vllm_checks.__file__).parent / "interpreted"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "kernel.py")], capture_output=True, text=True, check=False, env=environment
    )
    copied, walked = "[0.0, 1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0] True", "[2, 2] [2.0, 6.0]"
    assert done.stdout.splitlines() == [copied, walked, walked], done.stderr


@pytest.mark.parametrize("shipped", [False, True])
def test_every_layer_s_keys_are_normed_with_its_own_weight(tmp_path: Path, shipped: bool) -> None:
    """vLLM's CPU norm reads a row of weights, the first, whatever the weight's shape: here as a stand-in for it."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "_custom_ops.py").write_text("""
def rms_norm(out, input, weight, epsilon):
    row = 1 if weight is None else weight.flatten()[: input.shape[-1]]
    out.copy_(input * (input.square().mean(-1, keepdim=True) + epsilon).rsqrt() * row)
""")
    (tmp_path / "use.py").write_text("""
import torch
from vllm import _custom_ops as ops

x = torch.full((2, 3, 1, 4), 5.0)
for weight in (torch.tensor([[1.0] * 4, [2.0] * 4]), torch.full((4,), 3.0), None):
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, 0.0)
    print(*(layer.unique().tolist() for layer in out))
""")
    folder = Path(vllm_checks.__file__).parent / "interpreted"
    environment = {**os.environ, "PYTHONPATH": str(folder)} | ({"VLLM_CPU_AS_SHIPPED": "1"} if shipped else {})
    done = subprocess.run(
        [sys.executable, str(tmp_path / "use.py")], capture_output=True, text=True, check=False, env=environment
    )
    second = "[1.0]" if shipped else "[2.0]"
    assert done.stdout.splitlines() == [f"[1.0] {second}", "[3.0] [3.0]", "[1.0] [1.0]"], done.stderr


def test_phases_of_several_servers(
    tmp_path: Path, python: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state, out = ["--state", str(tmp_path / "state")], tmp_path / "out"
    names = ["dense-dflash2", "moe-dflash2"]
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "nvcc").touch(mode=0o755)
    monkeypatch.setenv("PATH", os.pathsep.join((str(tmp_path / "cuda"), os.environ["PATH"])))
    # Both servers are ended at once: one after the other would never meet here.
    both, end_group = threading.Barrier(2), vllm_checks.end_group

    def end(leader: int) -> None:
        both.wait(20)
        end_group(leader)

    command = ["measure", *state, "--prompts", str(prompts), "--out", str(out)]
    assert vllm_checks.main(["wait", *state, "1"]) == 2
    assert vllm_checks.main(["start", *state, "--only", *names, "--python", str(python)]) == 0
    try:
        assert vllm_checks.main(["start", *state, "--only", *names, "--python", str(python)]) == 2
        assert vllm_checks.main(["wait", *state, "30"]) == 0
        assert vllm_checks.main([*command, "--temperatures", "0"]) == 0
        # A second call measures what is missing.
        assert vllm_checks.main([*command, "--temperatures", "0", "1"]) == 0
        servers = vllm_checks.read_running(tmp_path / "state")
        for server in servers:
            lines = Path(f"/proc/{server.pid}/environ").read_text().split("\0")
            (path,) = [line for line in lines if line.startswith("PATH=")]
            assert str(tmp_path / "cuda") not in path
        monkeypatch.setattr(vllm_checks, "end_group", end)
    finally:
        assert vllm_checks.main(["stop", *state]) == 0
    monkeypatch.setattr(vllm_checks, "end_group", end_group)
    assert not any(server.alive() for server in servers)
    for name in names:
        document = json.loads((out / f"{name}.json").read_text())
        assert [row["temperature"] for row in document["rows"]] == [0, 1]
        assert document["rows"][0]["mean"] == 3
        assert document["prompts_sha256"] == hashlib.sha256(prompts.read_bytes() + b"\n").hexdigest()
        assert document["draft_sample_method"] == "greedy"
        assert "/" not in document["command"]
    assert capsys.readouterr().out.count("dense-dflash2: {") == 2
    monkeypatch.setenv("FAKE_VLLM", "dead")
    assert vllm_checks.main(["start", *state, "--only", names[0], "--python", str(python)]) == 0
    assert vllm_checks.main(["wait", *state, "30"]) == 3
    assert "no such drafter" in capsys.readouterr().out
    assert vllm_checks.main([*command, "--temperatures", "0.7"]) == 3
    assert "is not up" in capsys.readouterr().err
    assert vllm_checks.main(["stop", *state]) == 0


def test_acceptance_is_measured_before_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["dense-fp8", "dense-dflash2", "moe-nvfp4", "moe-dflash2"]
    options = vllm_checks.parser().parse_args(
        ["measure", "--state", str(tmp_path), "--out", str(tmp_path), "--prompts", str(tmp_path / "p")]
    )
    vllm_checks.write_running(tmp_path, [vllm_checks.Running(name, 1, 0, 1, 0.0, []) for name in names])
    order: list[str] = []

    def acceptance(running: vllm_checks.Running, _: object) -> str:
        time.sleep(0.2)
        order.append(running.name)
        return running.name

    def scores(running: vllm_checks.Running, _: object) -> str:
        order.append(running.name)
        return running.name

    monkeypatch.setattr(vllm_checks.Server, "ready", lambda _: True)
    monkeypatch.setattr(vllm_checks, "_measure_acceptance", acceptance)
    monkeypatch.setattr(vllm_checks, "_measure_accuracy", scores)
    assert vllm_checks.measure(options) == 0
    assert {*order[:2]} == {"dense-dflash2", "moe-dflash2"}
    assert {*order[2:]} == {"dense-fp8", "moe-nvfp4"}
