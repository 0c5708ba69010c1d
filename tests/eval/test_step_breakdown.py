"""Floors of a pass against figures worked out apart from this code, and how time is charged to passes."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest
from sparkinfer_eval.floor import WEIGHT_BYTES, Floor, Machine, Recipe, Work
from sparkinfer_eval.simulate.steps import Step
from sparkinfer_eval.step_breakdown import Window, breakdown, kind_of, main, work_of
from sparkinfer_models.real_shapes import shape_config

from sparkinfer.models.config import load_config

ROOT = Path(__file__).resolve().parents[2]
H200 = Machine(4.3e12, 794e12)


def floor_of(folder: Path, shape: str) -> Floor:
    (folder / "config.json").write_text(json.dumps(shape_config(shape, None)))
    return Floor(load_config(folder), Recipe(WEIGHT_BYTES["nvfp4"]), H200)


def decode(rows: int, context: int = 1200) -> Work:
    return Work(rows, rows, rows * context, rows * context, rows)


def prompt(tokens: int) -> Work:
    return Work(tokens, 1, 0, tokens * (tokens + 1) // 2, 1)


@pytest.mark.parametrize(("shape", "expected"), [("27b", (3.87, 4.14, 5.22, 6.66)), ("35b", (0.60, 1.08, 2.68, 4.26))])
def test_decode_floors_of_the_real_shapes(tmp_path: Path, shape: str, expected: tuple[float, ...]) -> None:
    """Milliseconds at 1, 4, 16 and 32 requests, worked out by hand from the shapes at 4.3 TB/s."""
    floor = floor_of(tmp_path, shape)
    for rows, milliseconds in zip((1, 4, 16, 32), expected, strict=True):
        assert floor.seconds(decode(rows)) * 1e3 == pytest.approx(milliseconds, rel=0.03)


@pytest.mark.parametrize(("shape", "expected"), [("27b", (65, 539)), ("35b", (7, 66))])
def test_prompt_floors_of_the_real_shapes(tmp_path: Path, shape: str, expected: tuple[float, float]) -> None:
    """Milliseconds of 1024 and 8192 tokens at 794 TFLOP/s, there with the work of a chunked scan, here without."""
    floor = floor_of(tmp_path, shape)
    for tokens, milliseconds in zip((1024, 8192), expected, strict=True):
        assert floor.seconds(prompt(tokens)) * 1e3 == pytest.approx(milliseconds, rel=0.13)


def test_a_line_of_the_trace_becomes_work() -> None:
    line = {"t": 0.0, "s": 0.1, "d": 2, "dc": 30, "n": 3, "p": [[16, 4, 100], [0, 3, -1]]}
    assert work_of(line) == Work(tokens=9, sequences=4, context=46, pairs=32 + 4 * 16 + 10 + 6, sampled=3)
    assert kind_of(line) == "mixed"
    assert kind_of({**line, "d": 0}) == "prompt"
    assert kind_of({"t": 0.0, "s": 0.1, "d": 2, "dc": 30, "n": 2}) == "decode"


def test_steps_launched_ahead_are_charged_once(tmp_path: Path) -> None:
    """The second begins while the first runs; the third comes after a pause; the fourth is another cell's."""
    line = {"d": 1, "dc": 10, "n": 1}
    steps = [Step(10.0, 1.0, line), Step(10.5, 1.5, line), Step(12.5, 0.5, line), Step(20.0, 1.0, line)]
    found = breakdown(Window("chat-c1", 9.5, 13.5, 3), steps, floor_of(tmp_path, "27b"))
    assert found.parts["decode"].steps == 3
    assert found.parts["decode"].busy_s == pytest.approx(2.5)
    assert found.idle_s == pytest.approx(0.5 + 0.5 + 0.5)
    assert found.floor_s == found.parts["decode"].floor_s > 0


@pytest.mark.parametrize("shape", ["27b", "35b"])
def test_program_on_the_recorded_run(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    report, trace = ROOT / "reports" / f"0.1.0-h200-{shape}", ROOT / "reports" / "gpu" / f"{shape}-nvfp4.steps.jsonl.xz"
    floor_of(tmp_path, shape)
    assert main([str(report), str(trace), "--config", str(tmp_path), "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out.splitlines()
    table = (ROOT / "reports" / "gpu" / "README.md").read_text()
    assert all(line in table for line in printed)
    for row in json.loads((tmp_path / "out.json").read_text()):
        spent = sum(part["busy_s"] for part in row["parts"].values()) + row["idle_s"]
        assert spent == pytest.approx(row["seconds"], rel=0.02)
    empty = tmp_path / "other.jsonl.gz"
    lines = lzma.decompress(trace.read_bytes()).decode().splitlines()
    moved = [json.loads(lines[0]) | {"epoch": 0.0}, json.loads(lines[1])]
    empty.write_bytes(gzip.compress("\n".join(json.dumps(line) for line in moved).encode()))
    assert main([str(report), str(empty), "--config", str(tmp_path)]) == 2
    assert main([str(report), str(trace), "--config", str(tmp_path), "--engine", "nobody"]) == 2
