"""eval/spec_open_arrivals.py against a scripted server: as a cell, alone, and with every fault it must name."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import pytest
from fake_openai_server import Script, free_port, serving
from sparkinfer_eval import arrivals, arrivals_cli, gates, result_folder
from sparkinfer_eval.cells import Cell
from sparkinfer_eval.prompts import PromptSet
from sparkinfer_eval.records import Record, read_records, read_result
from sparkinfer_eval.result_folder import Target

from sparkinfer.errors import ConfigError, EnvironmentProblem

ROOT = Path(__file__).resolve().parents[2]
ALONE = ["--rate", "40", "--requests", "20", "--short-tokens", "2", "--long-tokens", "4", "9", "--prompt-tokens", "20"]


def target(model: Path, out: Path) -> Target:
    return Target("run", 1, 1, "sparkinfer", "0.1.0", "sha256:aa", "toy", model, out)


@pytest.fixture
def cell(small_cells: dict[str, Cell]) -> Cell:
    return small_cells["poisson-r1"]


@pytest.fixture
def prompts(small_prompts: dict[str, PromptSet]) -> PromptSet:
    return small_prompts["poisson-r1"]


def test_cell_becomes_a_result(cell: Cell, prompts: PromptSet, model: Path, tmp_path: Path) -> None:
    out, script = tmp_path / "r1", Script(cell.prompt_tokens)
    with serving(script) as url:
        result = arrivals.measure(url, "toy", cell, prompts, target(model, out), ["x"])
    assert result == read_result(out)
    records = read_records(out / "records.jsonl")
    measured = [record for record in records if record.phase == "profiling"]
    assert len(measured) == cell.requests
    assert {record.label for record in measured} == {"short", "long"}
    assert all(record.token_ns and len(record.token_ns) == record.output_tokens for record in records)
    assert {check["name"] for check in result.checks} >= {"arrival_rate", "start_delay_share", "prefix_cache_hits"}
    summary = result.tool_summary
    assert summary["classes"]["short"]["requests"] == round(cell.requests * 0.2)
    assert summary["arrival_rate"] == pytest.approx(cell.rate, rel=0.5)
    schedule = json.loads((out / "arrivals" / "schedule.json").read_text())
    planned = [row["timestamp"] for row in prompts.phase("profiling")]
    begin = schedule[0]["scheduled_ns"]
    assert [(row["scheduled_ns"] - begin) / 1e6 for row in schedule] == pytest.approx(planned, abs=0.01)
    assert all(-1e6 < row["start_ns"] - row["scheduled_ns"] < 1e9 for row in schedule)
    bodies = [body for body in script.seen if "seed" in body]
    assert len({body["seed"] for body in bodies}) == cell.requests
    assert all((b["temperature"], b["top_p"], b["top_k"]) == (0.7, 0.95, 20) for b in script.seen)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("status", r"all 22 requests failed: HTTP 503.*overloaded"),
        ("error_event", "all 22 requests failed: out of memory"),
        ("cut", "all 22 requests failed: the stream ended without usage"),
        ("short", "output_lengths: .* instead of"),
        ("stop", "finish_reasons: .*'stop'"),
        ("no_finish", "without finish reason"),
        ("other_tokenizer", "prompt_tokens: 22 prompts count differently"),
    ],
)
def test_faults_are_named_and_leave_no_result(
    fault: str, message: str, cell: Cell, prompts: PromptSet, model: Path, tmp_path: Path
) -> None:
    with serving(Script(cell.prompt_tokens, fault=fault)) as url:
        with pytest.raises(gates.InvalidRun, match=message):
            arrivals.measure(url, "toy", cell, prompts, target(model, tmp_path / "r1"), ["x"])
    assert [path.name for path in tmp_path.iterdir()] == ["r1.failed"]
    assert (tmp_path / "r1.failed" / "reason.txt").read_text()


def test_one_error_event_among_good_answers_is_seen(
    cell: Cell, prompts: PromptSet, model: Path, tmp_path: Path
) -> None:
    with serving(Script(cell.prompt_tokens, fault="error_event", faulty=3)) as url:
        with pytest.raises(gates.InvalidRun, match=r"errors: 3 requests failed: .*out of memory"):
            arrivals.measure(url, "toy", cell, prompts, target(model, tmp_path / "r1"), ["x"])


def test_all_requests_timing_out(cell: Cell, prompts: PromptSet, model: Path, tmp_path: Path) -> None:
    import asyncio

    rows = [row for row in prompts.rows if row["phase"] == "profiling"]
    with serving(Script(cell.prompt_tokens, fault="hang")) as url:
        sent = asyncio.run(arrivals.send_all(url, "toy", rows, cell.sampling, timeout_s=0.5))
    assert arrivals.all_failed([item.record for item in sent]) == "all 20 requests failed: timed out after 0.5 s"


def test_connection_refused_and_prefix_hits(cell: Cell, prompts: PromptSet, model: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="is the server up"):
        arrivals.measure(f"http://127.0.0.1:{free_port()}", "toy", cell, prompts, target(model, tmp_path / "a"), ["x"])
    with serving(Script(cell.prompt_tokens, hits_per_request=8)) as url:
        with pytest.raises(gates.InvalidRun, match="prefix_cache_hits"):
            arrivals.measure(url, "toy", cell, prompts, target(model, tmp_path / "b"), ["x"])


def record(index: int, start_s: float) -> Record:
    start = round(start_s * 1e9)
    return Record(f"r{index}", "profiling", "", 1, 1, start, start + 1, start + 2, "length")


def test_arrival_rate_gate() -> None:
    def at(rate: float) -> list[Record]:
        return [record(i, i / rate) for i in range(80)]

    assert arrivals.rate_gate(at(2.0), 2.0, 0.02).ok
    assert arrivals.rate_gate(at(1.97), 2.0, 0.02).ok
    late = arrivals.rate_gate(at(1.835), 2.0, 0.02)
    assert not late.ok
    assert "1.835/s planned 2.000/s" in late.reason
    assert not arrivals.rate_gate([record(0, 0.0)], 2.0, 0.02).ok


def test_alone_against_any_url(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals_cli, "RATE_LIMIT", 0.5)
    with serving(Script(30)) as url:
        assert arrivals_cli.main(ROOT, ["--url", url, *ALONE, "--json", str(tmp_path / "out.json")]) == 0
        printed = capsys.readouterr().out
        for word in ("tok/s (tokens over makespan)", "p90", "short", "long", "from 20 requests only"):
            assert word in printed
        assert json.loads((tmp_path / "out.json").read_text())["40"]["requests"] == 20
        assert arrivals_cli.main(ROOT, ["--url", url, "--out", str(tmp_path / "r1"), "--cell", "poisson-r1"]) == 2
    assert "--scale" in capsys.readouterr().err
    assert arrivals_cli.main(ROOT, ["--url", f"http://127.0.0.1:{free_port()}", *ALONE]) == 3
    assert "is the server up" in capsys.readouterr().err
    with serving(Script(30, fault="status")) as url:
        assert arrivals_cli.main(ROOT, ["--url", url, *ALONE]) == 1
    assert "error: all 22 requests failed: HTTP 503" in capsys.readouterr().err


def test_full_disk_and_finished_results(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r1"

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for number in (1, 2):
        with pytest.raises(EnvironmentProblem, match="No space left on device: free space"):
            with result_folder.staged(target(model, out)):
                full()
        assert len(list(tmp_path.glob("r1.failed*"))) == number
    with result_folder.staged(target(model, out)) as staging:
        (staging / "result.json").write_text("{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r1", "r1.failed", "r1.failed-2"]
    with pytest.raises(ConfigError, match="exists already"):
        with result_folder.staged(target(model, out)):
            raise AssertionError("not reached")
    with pytest.raises(ConfigError, match="engine-version is empty"):
        dataclasses.replace(target(model, out), engine_version="")


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf"])
def test_impossible_rates_are_refused(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert arrivals_cli.main(ROOT, ["--url", "http://127.0.0.1:9", "--served-name", "x", "--rate", rate]) == 2
    assert "a finite rate above 0" in capsys.readouterr().err
