"""The record of the three checks: what it keeps of a run, and that one that broke off is named and costs no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sparkinfer_eval import check_record
from sparkinfer_eval.check_program import AT_LEAST


def test_the_closest_row_is_one_that_must_stay_below_its_limit() -> None:
    rows = [
        {"name": "a", "value": 0.2, "limit": 1.0, "ok": True},
        {"name": "b", "value": 0.03, "limit": 0.05, "ok": True},
        {"name": f"steps {AT_LEAST}", "value": 90.0, "limit": 10.0, "ok": True},
        {"name": "answers that differ", "value": 0.0, "limit": 0.0, "ok": True},
    ]
    near = check_record.closest(rows)
    assert near is not None
    assert near["name"] == "b"
    assert check_record.closest(rows[2:]) is None


def test_a_check_is_run_and_recorded(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "record"
    code = check_record.main(
        [str(models / "dense"), "--checks", "pack_ckpt_check", "--dtypes", "float32", "--out", str(out)]
    )
    assert code == 0
    (run,) = json.loads((out / "checks.json").read_text(encoding="utf-8"))["runs"]
    assert run["exit"] == 0
    assert run["rows"] > 100
    assert 0 <= run["closest"]["value"] <= run["closest"]["limit"] == 1e-4
    assert "| pack_ckpt_check |" in (out / "checks.md").read_text(encoding="utf-8")


def test_a_check_that_breaks_off_is_recorded_and_the_others_run(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "record"
    checks = ["--checks", "pack_ckpt_check", "prefix_check", "--dtypes", "float32"]
    assert check_record.main([str(models / "dense"), *checks, "--device", "cuda:99", "--out", str(out)]) == 3
    runs = json.loads((out / "checks.json").read_text(encoding="utf-8"))["runs"]
    assert [(run["exit"], run["rows"], bool(run["error"])) for run in runs] == [(3, 0, True)] * 2
    assert runs[0]["error"] in (out / "checks.md").read_text(encoding="utf-8")
    assert "ended with 3" in capsys.readouterr().err


def test_a_record_of_another_engine_is_refused(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "record"
    arguments = [str(models / "dense"), "--checks", "pack_ckpt_check", "--dtypes", "float32", "--out", str(out)]
    monkeypatch.setattr(check_record, "engine_digest", lambda: "sha256:aa")
    assert check_record.main(arguments) == 3
    assert "not sha256:aa: was the source changed meanwhile?" in capsys.readouterr().err
    monkeypatch.setattr(check_record.sparkinfer, "__file__", str(tmp_path / "sparkinfer" / "__init__.py"))
    assert check_record.main(arguments) == 3
    assert "not this checkout's" in capsys.readouterr().err
    assert not out.exists()
