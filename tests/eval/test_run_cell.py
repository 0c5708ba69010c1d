"""eval/run_cell.py with the real AIPerf against a scripted server: a sound run becomes a result, a faulty one never."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fake_openai_server import Script, free_port, serving
from sparkinfer_eval import metrics
from sparkinfer_eval.cells import Cell, cell_from_definition
from sparkinfer_eval.lease.process import namespace_prefix
from sparkinfer_eval.prompts import PromptSet
from sparkinfer_eval.records import read_records, read_result

ROOT = Path(__file__).resolve().parents[2]
AIPERF = ROOT / ".venvs" / "aiperf" / "bin" / "aiperf"


@pytest.fixture(autouse=True)
def cells_beside_prompts(cells_file: Path, small_prompts: dict[str, PromptSet]) -> None:
    shutil.copy(cells_file, small_prompts["chat-c4"].path.parent / "cells.yaml")


def command(url: str, model: Path, chosen: PromptSet, out: Path, **more: object) -> list[str]:
    options = {
        "url": url,
        "model": model,
        "model-name": "toy",
        "scale": "smoke",
        "cells": chosen.path.parent / "cells.yaml",
        "cell": "chat-c4",
        "prompts": chosen.path,
        "run": "0.1.0-smoke-00000000",
        "engine": "sparkinfer",
        "engine-version": "0.1.0",
        "engine-digest": "sha256:aa",
        "out": out,
        "seed": 3,
    }
    options |= {name.replace("_", "-"): value for name, value in more.items()}
    words = [sys.executable, str(ROOT / "eval" / "run_cell.py")]
    return words + [word for name, value in options.items() for word in (f"--{name}", str(value))]


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.aiperf
def test_sound_run_becomes_a_result(
    model: Path, small_cell: Cell, small_prompts: dict[str, PromptSet], tmp_path: Path
) -> None:
    script = Script(small_cell.prompt_tokens)
    prompts, out = small_prompts["chat-c4"], tmp_path / "chat-c4" / "r1"
    with serving(script) as url:
        done = run(command(url, model, prompts, out))
        assert done.returncode == 0, done.stderr
        assert script.resets == 1
        again = run(command(url, model, prompts, out))
    assert again.returncode == 2
    assert "exists already" in again.stderr
    assert [path.name for path in out.parent.iterdir()] == ["r1"]
    records, result = read_records(out / "records.jsonl"), read_result(out)
    assert len([r for r in records if r.phase == "profiling"]) == 12
    assert len(records) == 16
    assert {r.finish_reason for r in records} == {"length"}
    assert all(check["ok"] for check in result.checks)
    assert {check["name"] for check in result.checks} >= {"prefix_cache_hits", "summary_agreement", "start_delay_share"}
    assert cell_from_definition(result.cell_definition) == small_cell
    assert result.prompts_sha256 == prompts.sha256
    assert result.tool == {"name": "aiperf", "version": "0.13.0"}
    p50 = metrics.percentile(metrics.ttft_ms(records), 50)
    assert p50 == pytest.approx(result.tool_summary["time_to_first_token"]["p50"], rel=1e-6)
    assert str(tmp_path) not in (out / "command.txt").read_text()
    # The server saw what the cell says, nothing else.
    assert len(script.seen) == 16
    for body in script.seen:
        assert body["max_completion_tokens"] == small_cell.output_tokens
        assert body["ignore_eos"] is True
        assert body["temperature"] == 0.0
        assert body["stream"] is True
    sent = {body["messages"][0]["content"] for body in script.seen}
    assert sent == {row["text"] for row in prompts.rows}


@pytest.mark.aiperf
@pytest.mark.parametrize(
    ("fault", "gate"), [("short", "output_lengths"), ("error_event", "errors"), ("stop", "finish_reasons")]
)
def test_faulty_answers_are_no_result(
    fault: str, gate: str, model: Path, small_cell: Cell, small_prompts: dict[str, PromptSet], tmp_path: Path
) -> None:
    out = tmp_path / "chat-c4" / "r1"
    script = Script(small_cell.prompt_tokens, fault=fault, hits_per_request=small_cell.prompt_tokens // 4)
    with serving(script) as url:
        done = run(command(url, model, small_prompts["chat-c4"], out))
    assert done.returncode == 1
    assert f"{gate}: " in done.stderr
    assert done.stderr.startswith("error: ")
    assert "prefix_cache_hits: " in done.stderr
    assert [path.name for path in out.parent.iterdir()] == ["r1.failed"]
    assert gate in (out.parent / "r1.failed" / "reason.txt").read_text()
    assert (out.parent / "r1.failed" / "aiperf" / "profile_export.jsonl").is_file()


@pytest.mark.aiperf
def test_all_requests_timing_out_and_a_hung_run(
    model: Path, small_cell: Cell, small_prompts: dict[str, PromptSet], tmp_path: Path
) -> None:
    out = tmp_path / "r1"
    overrides = json.dumps({"timeout_s": 12, "request_timeout_s": 300})
    from sparkinfer_eval.cells import all_ids, load_cells, resolve_cells
    from sparkinfer_eval.prompts import ChatCounter, write_prompts

    document = load_cells(small_prompts["chat-c4"].path.parent / "cells.yaml")
    cell = resolve_cells(document, "smoke", json.loads(overrides))["chat-c4"]
    path = write_prompts(model, ChatCounter(model), cell, 0, 1, all_ids(document), tmp_path / "p")
    with serving(Script(small_cell.prompt_tokens, fault="hang")) as url:
        words = command(url, model, small_prompts["chat-c4"], out, overrides=overrides)
        mismatched = run(words)
        words[words.index("--prompts") + 1] = str(path)
        done = run(words)
    assert mismatched.returncode == 2
    assert "another definition" in mismatched.stderr
    assert done.returncode == 1
    assert "did not end within 12 s" in done.stderr
    assert (tmp_path / "r1.failed").is_dir()
    assert not out.exists()


def test_bad_input_is_named(model: Path, small_prompts: dict[str, PromptSet], tmp_path: Path) -> None:
    prompts, out = small_prompts["chat-c4"], tmp_path / "r1"
    down = f"http://127.0.0.1:{free_port()}"
    for change, code, message in (
        ({}, 3, "is the server up?"),
        ({"cell": "chat-c5"}, 2, "no cell chat-c5"),
        ({"scale": "huge"}, 2, "unknown scale"),
        ({"overrides": "{"}, 2, "not JSON"),
        ({"prompts": tmp_path / "none.jsonl"}, 2, "make_prompts.py"),
        ({"block": 2}, 2, "made for block 1"),
        ({"engine_digest": ""}, 2, "--engine-digest is empty"),
    ):
        done = run(command(down, model, prompts, out, **change))
        assert (done.returncode, message in done.stderr) == (code, True), (change, done.stderr)
        assert not out.exists()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A temporary folder with a short name: AIPerf puts sockets there, whose paths may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="si-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.mark.aiperf
def test_nothing_outlives_a_killed_run(
    model: Path, small_cell: Cell, small_prompts: dict[str, PromptSet], tmp_path: Path, scratch: Path
) -> None:
    with serving(Script(small_cell.prompt_tokens, fault="hang")) as url:
        # Without process namespaces a SIGKILL is the lease's to clean up after (its own tests do that).
        for number in (signal.SIGTERM, *((signal.SIGKILL,) if namespace_prefix() else ())):
            out = tmp_path / number.name / "r1"
            words = command(url, model, small_prompts["chat-c4"], out)
            child = subprocess.Popen(words, stderr=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(scratch)})
            family: list[psutil.Process] = []
            deadline = time.monotonic() + 60
            while len(family) < 3 and time.monotonic() < deadline:
                time.sleep(0.2)
                family = psutil.Process(child.pid).children(recursive=True)
            assert len(family) >= 3, "AIPerf did not start"
            os.kill(child.pid, number)
            child.wait(timeout=30)
            _, alive = psutil.wait_procs(family, timeout=20)
            assert not alive, f"after {number.name} these still run: {alive}"
            assert not out.exists()
    assert (tmp_path / "SIGTERM" / "r1.failed").is_dir()


def test_missing_executable(model: Path, small_cell: Cell, small_prompts: dict[str, PromptSet], tmp_path: Path) -> None:
    with serving(Script(small_cell.prompt_tokens)) as url:
        done = run(command(url, model, small_prompts["chat-c4"], tmp_path / "r1", aiperf=tmp_path / "none"))
    assert done.returncode == 3
    assert "make setup" in done.stderr
