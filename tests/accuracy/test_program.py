"""`eval/accuracy.py` end to end: agreement, planted faults, servers of several manners, bad input."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from sparkinfer_eval import launch
from sparkinfer_eval.accuracy import records_table
from sparkinfer_eval.accuracy.cli import main
from sparkinfer_eval.accuracy.held_out import FOLDER, make_task, read_held_out
from sparkinfer_eval.accuracy.local import TOP, most_alternatives
from sparkinfer_eval.accuracy.started import chosen_tag
from sparkinfer_eval.plan.identity import tag_source_digest

from sparkinfer.cli import main as sparkinfer_main
from sparkinfer.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FEW = ["--limit", "2", "--context", "160", "--answer-tokens", "8"]


def run(*arguments: object) -> int:
    return main([*map(str, arguments), *FEW])


def test_agrees_with_transformers_in_float32(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    code = run(f"{model},dtype=float32", f"transformers:{model},dtype=float32", "--json", out)
    printed = capsys.readouterr().out
    assert code == 0, printed
    document = json.loads(out.read_text())
    assert (document["schema"], document["check"], document["ok"]) == ("sparkinfer/check/v1", "accuracy", True)
    assert document["figures"]["top1"] > 0.999
    assert document["figures"]["kl"] < 1e-6
    assert document["figures"]["answers_equal"] == document["figures"]["answers"] == 4
    assert {row["name"] for row in document["rows"]} >= {
        "top-1 agreement, exact ties aside",
        "KL, mean (nats)",
        "loss difference (nats)",
    }
    assert document["engines"]["b"]["kind"] == "transformers"
    assert document["settings"] == {"context": 160, "answer_tokens": 8, "limit": 2}
    assert document["machine"]
    assert str(out) in document["command"]


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [("float32", [], 0.99), ("bfloat16", [], 0.98), ("float32", ["--top1-plain", 0.5], 0.5)],
)
def test_ties_are_no_excuse_against_a_reference_without_them(
    model: Path, tmp_path: Path, dtype: str, given: list[object], expected: float
) -> None:
    out = tmp_path / "a.json"
    run(f"{model},dtype=bfloat16", f"transformers:{model},dtype={dtype}", "--json", out, *given)
    limits = {row["name"]: row["limit"] for row in json.loads(out.read_text())["rows"]}
    assert limits["top-1 agreement, ties counted"] == expected
    assert limits["top-1 agreement, exact ties aside"] == 0.99


def test_a_fault_that_perplexity_hardly_shows_is_found(model: Path, nearly: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    assert run(f"{nearly},dtype=float32", f"transformers:{model},dtype=float32", "--json", out) == 1
    document = json.loads(out.read_text())
    ok = {row["name"]: row["ok"] for row in document["rows"]}
    assert (ok["top-1 agreement, exact ties aside"], ok["loss difference (nats)"]) == (False, True)
    assert run(f"{nearly},dtype=float32", f"transformers:{model},dtype=float32", "--kl", 9, "--top1", 0,
               "--top1-plain", 0, "--loss", 9) == 0  # fmt: skip


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with launch.served(model, ["--dtype", "float32", "--max-model-len", "256"], {}) as address:
        yield address


@pytest.mark.parametrize("method", ["auto", "next"])
def test_a_server_says_what_the_engine_says(url: str, model: Path, tmp_path: Path, method: str) -> None:
    out = tmp_path / "a.json"
    assert run(url, f"{model},dtype=float32", "--method", method, "--json", out) == 0
    document = json.loads(out.read_text())
    assert document["engines"]["a"]["method"].startswith("prompt_logprobs" if method == "auto" else "next token")
    assert document["figures"]["differing"] == 0
    assert document["figures"]["kl"] < 1e-6
    assert (document["figures"]["loss_a"] is None) == (method == "next")
    assert document["engine_digest"] == document["engines"]["a"]["engine_digest"]


def test_recorded_scores_compare_later(
    url: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, out = tmp_path / "a.xz", tmp_path / "a.json"
    assert run(url, "--record", record, "--tokenizer", model) == 0
    assert run(f"scores:{record}", f"{model},dtype=float32", "--json", out) == 0
    assert json.loads(out.read_text())["figures"]["differing"] == 0
    # What was recorded counts, not what this call was given.
    assert main([f"scores:{record}", f"scores:{record}", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["settings"] == {"context": 160, "answer_tokens": 8, "limit": 2}
    other = tmp_path / "b.xz"
    assert main([url, "--record", str(other), "--tokenizer", str(model), "--limit", "1", "--answer-tokens", "8"]) == 0
    assert run(f"scores:{record}", f"scores:{other}") == 2
    assert "recorded for other token ids" in capsys.readouterr().err


def test_bad_input(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        ([tmp_path, model], "no config.json"),
        ([f"vlm:{model}", model], "'vlm' is not known"),
        ([f"{model},dtyp=float32", model], "option 'dtyp=float32'"),
        ([model], "give ENGINE_B"),
        ([model, model, "--json", tmp_path / "no" / "f"], "its folder does not exist"),
        ([f"scores:{tmp_path / 'none'}", model], "does not exist"),
    ):
        assert run(*arguments) == 2, arguments
        assert words in capsys.readouterr().err
    assert run("http://127.0.0.1:9", model) == 3
    assert "is it up?" in capsys.readouterr().err


def test_a_checkpoint_that_transformers_does_not_know_is_not_applicable(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**json.loads((model / "config.json").read_text()), "model_type": "nobody_knows"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(f"transformers:{tmp_path}", f"{model},dtype=float32", "--tokenizer", model) == 4
    assert "does not load" in capsys.readouterr().err


@contextmanager
def replying(answers: dict[str, tuple[int, Any]]) -> Iterator[str]:
    """A server that gives fixed answers by path."""

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, value = answers.get(self.path, (404, {"error": "none"}))
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = reply

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


LISTED = (200, {"data": [{"id": "m"}]})
BY_TEXT = {"choices": [{"logprobs": {"tokens": ["a"], "top_logprobs": [{"a": -1.0}]}}]}


@pytest.mark.parametrize(
    ("answers", "more", "code", "words"),
    [
        ({"/v1/models": (200, {"data": []})}, [], 2, "lists no model"),
        ({"/v1/models": LISTED}, ["--model-a", "other"], 2, "has no model 'other'"),
        ({"/v1/models": LISTED, "/v1/completions": (500, {})}, [], 3, "answered 500"),
        (
            {"/v1/models": LISTED, "/v1/completions": (200, {"choices": [{}]})},
            ["--method", "prompt"],
            2,
            "--method next",
        ),
        ({"/v1/models": LISTED, "/v1/completions": (200, BY_TEXT)}, [], 3, "names tokens by text"),
        ({"/v1/models": LISTED, "/v1/completions": (200, {"choices": [{"text": "x"}]})}, [], 3, "without log-prob"),
    ],
)
def test_servers_that_cannot_be_used(
    model: Path, capsys: pytest.CaptureFixture[str], answers: dict[str, Any], more: list[str], code: int, words: str
) -> None:
    with replying(answers) as url:
        assert run(url, "--record", model.parent / "r.xz", "--tokenizer", model, *more) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("value", [math.nan, None])
def test_an_engine_that_says_nan_fails_the_check(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float | None
) -> None:
    said = {"tokens": ["token_id:5"], "top_logprobs": [{"token_id:5": value, "token_id:6": -1.0}]}
    out = tmp_path / "out"
    with replying({"/v1/models": LISTED, "/v1/completions": (200, {"choices": [{"logprobs": said}]})}) as url:
        for more in (["--record", out, "--tokenizer", model], [f"{model},dtype=float32", "--json", out]):
            assert run(url, *more) == 1
            printed = capsys.readouterr().err
            assert f"accuracy: {url} gives a log-probability of nan at position 16 of " in printed
            assert not out.exists()


def test_held_out_set_is_what_its_digest_says(tmp_path: Path, model: Path) -> None:
    entries, digest = read_held_out()
    assert len(digest) == 64
    assert [e.kind for e in entries].count("text") == 26
    assert [e.kind for e in entries].count("chat") == 12
    for name in ("held_out.jsonl.xz", "SHA256SUMS"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    sums = (tmp_path / "SHA256SUMS").read_text()
    (tmp_path / "SHA256SUMS").write_text(sums.replace(digest, "0" * 64))
    with pytest.raises(ConfigError, match="restore it from git"):
        read_held_out(tmp_path)
    task = make_task(model, 128, 16, 3)
    assert all(len(ids) <= 128 for ids in task.windows.values())
    assert all(len(ids) <= 112 for ids in task.prompts.values())
    with pytest.raises(ConfigError, match="too short"):
        make_task(model, 20, 16)


def test_table_over_records(model: Path, nearly: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    assert records_table.main([str(folder)]) == 2
    for name, engine in (("same", model), ("other", nearly)):
        run(f"{engine},dtype=float32", f"{model},dtype=float32", "--json", folder / f"{name}.json")
    assert records_table.main([str(folder)]) == 0
    text = (folder / "README.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| sparkinfer")]
    assert len(rows) == 2
    assert "**no**: top-1 agreement" in rows[0]
    assert "| 160, 2, 8 |" in rows[1]
    assert "| 1.0000 | 1.0000 | 0.00e+00 |" in rows[1]
    assert rows[1].endswith("| yes |")
    assert f"`eval/accuracy.py {model},dtype=float32" in text
    (folder / "x.json").write_text('{"check": "prefix_check"}')
    assert records_table.main([str(folder)]) == 2
    assert "x.json was not written by accuracy.py" in capsys.readouterr().err


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an earlier release comes out of git's history")
def test_an_earlier_release_is_started_from_git(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    release = f"release:{model},tag=HEAD,dtype=float32"
    assert run(f"{model},dtype=float32", release, "--json", out) == 0, capsys.readouterr().out
    document = json.loads(out.read_text())
    there = document["engines"]["b"]
    assert (there["release"], there["dtype"]) == ("HEAD", "float32")
    assert there["engine_digest"] == tag_source_digest(ROOT, "HEAD")
    assert document["figures"]["positions"] > 100
    assert run(f"release:{model},tag=no-such-tag", model) == 2
    assert "tag no-such-tag is no release of this engine" in capsys.readouterr().err
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "pyproject.toml").write_text('version = "0.1.0"\n')
    with pytest.raises(ConfigError, match="there is no release before this version"):
        chosen_tag(None, tmp_path)


def test_a_quantised_checkpoint_against_its_16bit_form(model: Path, tmp_path: Path) -> None:
    out, folder = tmp_path / "a.json", tmp_path / "nvfp4"
    assert sparkinfer_main(["quantize", str(model), str(folder), "--format", "nvfp4"]) == 0
    assert run(f"{folder},dtype=float32", f"transformers:{folder},form=16bit,dtype=float32", "--json", out) == 0
    document = json.loads(out.read_text())
    assert document["engines"]["b"]["model"] == "nvfp4-16bit"
    assert document["figures"]["kl"] < 1e-6
    # The format is not without effect, and the 16-bit form is that of the quantised weights.
    assert run(f"{folder},dtype=float32", f"{model},dtype=float32", "--json", out) in (0, 1)
    assert json.loads(out.read_text())["figures"]["kl"] > 1e-6
    assert run(f"{folder},form=8bit", model) == 2


def test_settings_of_the_engine_are_part_of_its_name(model, tmp_path, capsys):
    out = tmp_path / "chunks.json"
    chunked = f"{model},dtype=float32,prefill_chunk=64"
    assert run(chunked, f"{model},dtype=float32", "--limit", 1, "--answer-tokens", 0, "--json", out) == 0
    document = json.loads(out.read_text())
    assert document["engines"]["a"]["settings"] == "prefill_chunk=64"
    assert "settings" not in document["engines"]["b"]
    for wrong, text in (
        (f"{model},prefill_chunk=x", "not a whole number"),
        (f"{model},state_dtype=fp8", "float32, bfloat16"),
        (f"{model},state_dtype=bfloat16", "for a GPU"),
        (f"{model},max_queue=3", "is not one of"),
    ):
        assert run(wrong, model, "--json", out) == 2
        assert text in capsys.readouterr().err


def test_no_more_alternatives_are_asked_for_than_the_device_reports():
    from sparkinfer_kernels.sampler.gpu import MAX_TOP

    assert most_alternatives("cpu") == TOP > MAX_TOP
    assert most_alternatives("cuda") == most_alternatives("cuda:1") == MAX_TOP
