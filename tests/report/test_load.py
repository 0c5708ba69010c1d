"""Raw results that do not fit are refused with the file and the remedy named."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from sparkinfer_eval.report.failures import read_failures, record_failure
from sparkinfer_eval.report.load import load_run

from sparkinfer.errors import ConfigError


def edit_json(path: Path, **changes: object) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "other/v1"}, "schema is 'other/v1'"),
        ({"unknown_field": 1}, "unknown_field"),
        ({"cell": "chat-c4"}, "does not belong to this run"),
        ({"run": "another"}, "does not belong to this run"),
        ({"block": 2}, "does not belong to this run"),
        ({"engine_digest": "sha256:" + "0" * 64}, "engine_digest"),
        ({"model_digest": "sha256:" + "0" * 64}, "model_digest"),
        ({"prompts_sha256": "other"}, "prompts_sha256 of"),
        ({"cell_digest": "other"}, "cell_digest of"),
    ],
)
def test_result_that_does_not_belong(raw_run, changes, message):
    raw = raw_run()
    edit_json(raw.place("vllm", "chat-c1") / "result.json", **changes)
    with pytest.raises(ConfigError, match=message):
        load_run(raw.folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no profiling request"),
        ("{", r"records.jsonl:1: not a request record"),
        ('{"request_id": "a"}', r"records.jsonl:1: not a request record"),
    ],
)
def test_corrupt_records(raw_run, text, message):
    raw = raw_run()
    (raw.place("sparkinfer", "chat-c1") / "records.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_run(raw.folder)


def test_records_that_cannot_be_timed(raw_run):
    raw = raw_run()
    raw.edit_records("sparkinfer", "chat-c1", lambda r: dataclasses.replace(r, error="timed out"))
    with pytest.raises(ConfigError, match="no error-free record"):
        load_run(raw.folder)


def test_missing_records_file(raw_run):
    raw = raw_run()
    (raw.place("sparkinfer", "chat-c1") / "records.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"records\.jsonl does not exist"):
        load_run(raw.folder)


def test_folder_without_result_is_no_result(raw_run):
    raw = raw_run()
    (raw.place("sparkinfer", "chat-c1") / "result.json").unlink()
    assert [(m.engine, m.cell) for m in load_run(raw.folder).missing] == [("sparkinfer", "chat-c1")]


def test_evidence_of_a_failed_attempt_is_no_result(raw_run):
    raw = raw_run()
    place = raw.place("sparkinfer", "chat-c1")
    shutil.copytree(place, place.with_name("r1.failed"))
    assert len(load_run(raw.folder).measurements) == 8


def test_results_of_a_cell_that_was_not_asked_for(raw_run):
    raw = raw_run()
    edit_json(raw.folder / "run.json", cells=["chat-c1", "chat-c16", "poisson-r1"])
    with pytest.raises(ConfigError, match="does not list: long_answer-c4"):
        load_run(raw.folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "other"}, "must have that name"),
        ({"blocks": 0}, "blocks"),
        ({"surprise": 1}, "surprise"),
        ({"engines": []}, "engines"),
    ],
)
def test_bad_run_json(raw_run, changes, message):
    raw = raw_run()
    edit_json(raw.folder / "run.json", **changes)
    with pytest.raises(ConfigError, match=message):
        load_run(raw.folder)


def test_absent_run_folder_and_run_json(raw_run, tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_run(tmp_path / "results" / "none")
    raw = raw_run()
    (raw.folder / "run.json").unlink()
    with pytest.raises(ConfigError, match=r"write it with eval/run_info\.py"):
        load_run(raw.folder)


def test_run_without_results(raw_run):
    raw = raw_run(skip={(e, c) for e in ("sparkinfer", "vllm")
                        for c in ("chat-c1", "chat-c16", "long_answer-c4", "poisson-r1")})  # fmt: skip
    with pytest.raises(ConfigError, match="no finished result"):
        load_run(raw.folder)


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "not a check output"), ('{"ok": 1}', "rows")])
def test_corrupt_check_output(raw_run, text, message):
    raw = raw_run()
    (raw.folder / "checks" / "pack_ckpt_check-spark-tiny-dense.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_run(raw.folder)


def test_corrupt_server_facts(raw_run):
    raw = raw_run()
    (raw.folder / "servers" / "vllm-b1-r1.json").write_text('{"engine": "vllm"}')
    with pytest.raises(ConfigError, match="no record of a server"):
        load_run(raw.folder)


def test_check_of_another_model(raw_run):
    raw = raw_run()
    edit_json(raw.folder / "checks" / "pack_ckpt_check-spark-tiny-dense.json", model_digest="sha256:" + "1" * 64)
    with pytest.raises(ConfigError, match="checked model"):
        load_run(raw.folder)


def test_failure_ledger_round_trip_and_corruption(tmp_path):
    place = {"block": 1, "engine": "vllm", "model": "m", "cell": "chat-c1", "rep": 1}
    path = record_failure(tmp_path, **place, reason="no port")
    record_failure(tmp_path, **place, reason="no memory")
    assert [f.reason for f in read_failures(tmp_path)] == ["no port", "no memory"]
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not a failure record"):
        read_failures(tmp_path)
