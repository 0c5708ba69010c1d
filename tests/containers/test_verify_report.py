"""`sparkinfer-verify reports/<run>`: every number derived anew, every change named, with the right exit code."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sparkinfer_containers import attest, statements
from sparkinfer_containers.trust import credentials
from sparkinfer_containers.verify import cli as verify_cli
from sparkinfer_containers.verify.cli import main
from sparkinfer_eval import parquet

from .report_parts import IMAGE, raw_run_class, render, texts


def test_untouched_report_verifies(signed: Path, check: Any) -> None:
    code, outcome = check(signed)
    assert code == 0, texts(outcome)
    assert outcome["level"] == "integrity only"
    assert any(re.search(r"all \d+ figures", line) for line in outcome["proved"])
    assert any("not the shipped image" in line for line in outcome["proved"])
    assert check(signed, "--require-public")[0] == 5


def test_statement_holds_what_the_predicate_documents(signed: Path, raw_results: Path) -> None:
    made = attest.evaluation(signed, raw_results)
    assert made["predicateType"] == statements.EVALUATION_SOURCE
    predicate = made["predicate"]
    statements.check_evaluation(predicate, source=True)
    assert predicate["decision_rules"] == []
    assert {item["cell"] for item in predicate["prompts"]} == {"chat-c1", "chat-c16", "long_answer-c4", "poisson-r1"}
    assert any(name.endswith("records.jsonl") for name in predicate["raw_records"])
    assert all(cell["unit"] for cell in predicate["cells"])
    assert predicate["baseline"]["vllm"]["command"]
    assert not any(name.startswith("bundles/") for name in predicate["files"])


@pytest.mark.parametrize("table", ["cells", "summary", "ratios"])
def test_changed_number_in_report_json_is_named(signed: Path, check: Any, table: str) -> None:
    report = json.loads((signed / "report.json").read_text())
    row = report[table][3]
    row["value"] *= 1.000001
    (signed / "report.json").write_text(json.dumps(report))
    code, outcome = check(signed)
    assert code == 1
    assert f"report.json {table} [" in texts(outcome)
    assert row["cell"] in texts(outcome)
    assert repr(row["value"]) in texts(outcome)


@pytest.mark.parametrize("field", ["n", "unit"])
def test_changed_field_beside_a_number_is_named(signed: Path, check: Any, field: str) -> None:
    report = json.loads((signed / "report.json").read_text())
    report["cells"][0][field] = 7 if field == "n" else "tok/min"
    (signed / "report.json").write_text(json.dumps(report))
    code, outcome = check(signed)
    assert code == 1
    assert f": {field} is published as" in texts(outcome)


@pytest.mark.parametrize("change", ["drop", "add", "double"])
def test_dropped_or_invented_row_is_named(signed: Path, check: Any, change: str) -> None:
    report = json.loads((signed / "report.json").read_text())
    if change == "drop":
        report["cells"].pop(0)
    else:
        report["cells"].append({**report["cells"][0], **({"rep": 9} if change == "add" else {})})
    (signed / "report.json").write_text(json.dumps(report))
    code, outcome = check(signed)
    assert code == 1
    said = {"drop": "is missing", "add": "no record supports it", "double": "given twice"}[change]
    assert said in texts(outcome)


@pytest.mark.parametrize("name", ["CHANGELOG.md", "RELEASE_NOTE.md"])
def test_changed_table_cell_in_the_text_is_named(signed: Path, check: Any, name: str) -> None:
    path = signed / name
    lines = path.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if re.match(r"\| .*\d\d", line) and "chat" in line.lower())
    lines[at] = re.sub(r"\d(?=\D*$)", lambda found: str((int(found[0]) + 1) % 10), lines[at], count=1)
    path.write_text("".join(lines))
    code, outcome = check(signed)
    assert code == 1
    assert f"{name}:" in texts(outcome)


def _add_row(text: str) -> str:
    row = next(line for line in text.splitlines() if line.startswith("| 1 chat"))
    return text.replace(row, f"{row}\n{row.replace('sparkinfer', 'other')}", 1)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("CHANGELOG.md", _add_row, "do not give its line | 1 chat: other"),
        ("CHANGELOG.md", lambda text: re.sub(r"(?m)^Chat: \d+", "Chat: 9", text, count=1), "Chat: 9"),
        ("CHANGELOG.md", lambda text: re.sub(r"(?m)^(\| pack_ckpt_check .*?)\d", r"\g<1>x", text), "pack_ckpt_check"),
        ("RELEASE_NOTE.md", _add_row, "do not give its line | 1 chat: other"),
        (
            "RELEASE_NOTE.md",
            lambda text: re.sub(r"(Per-token latency .*?: \S+ \S+ )\d", r"\g<1>9", text, count=1),
            "Per-token latency",
        ),
        ("RELEASE_NOTE.md", lambda text: text.replace(": passed", ": FAILED", 1), "FAILED"),
        ("RELEASE_NOTE.md", lambda text: re.sub(r"(In figures: .*)\d\.", r"\g<1>x.", text, count=1), "headline"),
    ],
)
def test_changed_line_of_the_text_is_named(rendered: Path, tmp_path: Path, check: Any, name, change, said) -> None:
    folder = Path(shutil.copytree(rendered, tmp_path / "report"))
    text = (folder / name).read_text()
    assert change(text) != text
    (folder / name).write_text(change(text))
    code, outcome = check(folder)
    assert code == 1
    assert f"{name}: " in texts(outcome)
    assert said in texts(outcome)


def test_flipped_byte_in_the_raw_records(signed: Path, check: Any) -> None:
    path = signed / "requests.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    code, outcome = check(signed)
    assert code == 4
    assert "requests.parquet is not the file that was signed" in texts(outcome)


def edit_first_record(folder: Path) -> None:
    import pyarrow.parquet as pq

    table = parquet.read(folder / "requests.parquet")
    rows = table.to_pylist()
    rows[-1]["end_ns"] += 1_000_000_000
    pq.write_table(table.from_pylist(rows, schema=parquet.SCHEMA), folder / "requests.parquet")


def test_edited_record_of_an_unsigned_report_changes_its_numbers(rendered: Path, tmp_path: Path, check: Any) -> None:
    folder = Path(shutil.copytree(rendered, tmp_path / "report"))
    edit_first_record(folder)
    code, outcome = check(folder)
    assert code == 1
    assert "request_latency_ms" in texts(outcome)


def test_report_rendered_anew_from_edited_records(signed: Path, raw_results: Path, tmp_path: Path, check: Any) -> None:
    """Everything consistent with itself, but not what was signed."""
    raw = Path(shutil.copytree(raw_results, tmp_path / "raw" / raw_results.name))
    path = next(raw.glob("b1/sparkinfer/*/chat-c1/r1/records.jsonl"))
    path.write_text(path.read_text().replace('"output_tokens":32', '"output_tokens":33'))
    forged = render(raw, tmp_path / "forged")
    shutil.copytree(signed / "bundles", forged / "bundles")
    code, outcome = check(forged)
    assert code in (1, 4)
    assert "requests.parquet is not the file that was signed" in texts(outcome)


def test_unsigned_report(rendered: Path, check: Any) -> None:
    code, outcome = check(rendered)
    assert code == 4
    assert "not signed" in texts(outcome)


@pytest.mark.parametrize("name", ["report.json", "requests.parquet", "CHANGELOG.md", "commands.txt"])
def test_missing_file(signed: Path, check: Any, name: str) -> None:
    (signed / name).unlink()
    if name == "report.json":
        assert main([str(signed)]) == 2
    else:
        code, outcome = check(signed)
        assert code == 4
        assert name in texts(outcome)


def test_changed_or_missing_other_file(signed: Path, check: Any) -> None:
    (signed / "commands.txt").write_text("make release --faster\n")
    next((signed / "plots").iterdir()).unlink()
    code, outcome = check(signed)
    assert code == 4
    assert "commands.txt is not the file that was signed" in texts(outcome)
    assert "is signed but missing" in texts(outcome)


def test_added_file_is_said_to_be_unsigned(signed: Path, check: Any) -> None:
    (signed / "note.txt").write_text("x")
    code, outcome = check(signed)
    assert code == 0
    assert any("note.txt" in line for line in outcome["not_proved"])


def test_flipped_signature_of_a_report(signed: Path, check: Any) -> None:
    path = signed / "bundles" / "evaluation-source.sigstore.json"
    bundle = json.loads(path.read_text())
    sig = bundle["dsseEnvelope"]["signatures"][0]["sig"]
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = ("M" if sig[20] != "M" else "N").join((sig[:20], sig[21:]))
    path.write_text(json.dumps(bundle))
    assert check(signed)[0] == 3


def test_bundle_of_one_gigabyte_in_a_report(signed: Path, check: Any) -> None:
    with (signed / "bundles" / "a.sigstore.json").open("wb") as handle:
        handle.truncate(1 << 30)
    code, outcome = check(signed)
    assert code == 3
    assert "refused unread" in texts(outcome)


def test_interrupted(signed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify_cli, "_check", interrupt)
    assert main([str(signed)]) == 130
    out, err = capsys.readouterr()
    assert not out
    assert err == "sparkinfer-verify: interrupted: nothing is proved\n"


def test_evaluation_that_contradicts_the_first(
    signed: Path, raw_results: Path, check: Any, signer: Callable[..., str]
) -> None:
    made = attest.evaluation(signed, raw_results)
    made["predicate"]["cells"][0]["value"] *= 2
    (signed / "bundles" / "second.sigstore.json").write_text(signer(made))
    code, outcome = check(signed)
    assert code == 3
    assert "contradict" in texts(outcome)


def test_signed_figures_must_be_the_published_ones(
    rendered: Path, raw_results: Path, tmp_path: Path, check: Any, signer: Callable[..., str]
) -> None:
    folder = Path(shutil.copytree(rendered, tmp_path / "report"))
    made = attest.evaluation(folder, raw_results)
    made["predicate"]["cells"][0]["value"] *= 2
    (folder / "bundles").mkdir()
    (folder / "bundles" / "evaluation-source.sigstore.json").write_text(signer(made))
    code, outcome = check(folder)
    assert code == 1
    assert "signed figure" in texts(outcome)


@pytest.mark.parametrize(
    "field", ["files", "cells", "raw_records", "machine", "decision_rules", "not_the_shipped_image"]
)
def test_evaluation_without_a_required_field(
    rendered: Path, tmp_path: Path, check: Any, signer: Callable[..., str], field: str
) -> None:
    folder = Path(shutil.copytree(rendered, tmp_path / "report"))
    made = attest.evaluation(folder)
    del made["predicate"][field]
    (folder / "bundles").mkdir()
    (folder / "bundles" / "evaluation-source.sigstore.json").write_text(signer(made))
    assert check(folder)[0] == 3


def test_a_report_is_signed_once(signed: Path, raw_results: Path, state: Path) -> None:
    from sparkinfer_containers.errors import UsageProblem

    made = attest.evaluation(signed, raw_results)
    bundle = signed / "bundles" / "evaluation-source.sigstore.json"
    before = bundle.read_bytes()
    with credentials("private", state=state) as held:
        assert attest.sign_report(signed, made, held) == bundle
        assert bundle.read_bytes() == before, "the same statement keeps its bundle"
        made["predicate"]["scale"] = {"statement": "other", "full": True}
        with pytest.raises(UsageProblem, match="signed once"):
            attest.sign_report(signed, made, held)
    assert bundle.read_bytes() == before


@pytest.mark.parametrize("value", [None, 5, True, "x", [], {}, [1, 2], [[]]])
def test_every_changed_field_of_report_json_is_survived(rendered: Path, tmp_path: Path, check: Any, value: Any) -> None:
    folder = Path(shutil.copytree(rendered, tmp_path / "report"))
    report = json.loads((rendered / "report.json").read_text())
    places: list[tuple[Any, ...]] = [(name,) for name in report]
    places += [(name, key) for name in report if isinstance(report[name], dict) for key in report[name]]
    places += [(name, 0, key) for name in ("engines", "models", "checks", "servers") for key in report[name][0]]
    places += [(name, 0) for name in ("cells", "summary", "ratios", "engines", "models")]
    for place in places:
        broken = json.loads(json.dumps(report))
        parent = broken
        for key in place[:-1]:
            parent = parent[key]
        parent[place[-1]] = value
        (folder / "report.json").write_text(json.dumps(broken))
        assert check(folder)[0] in (1, 4), place


def test_report_json_that_cannot_be_read(rendered: Path, tmp_path: Path, check: Any) -> None:
    folder = Path(shutil.copytree(rendered, tmp_path / "report"))
    text = (folder / "report.json").read_text()
    deep = "[" * 5000 + "]" * 5000
    for broken in ("[]", "5", deep, text.replace('"machine": {', f'"machine": {{"x": {deep},', 1)):
        (folder / "report.json").write_text(broken)
        code, outcome = check(folder)
        assert code == 4
        assert "report.json" in texts(outcome)
    report = json.loads(text)
    for name in ("run", "cells"):
        (folder / "report.json").write_text(json.dumps({key: report[key] for key in report if key != name}))
        assert check(folder)[0] == 4


def test_figures_of_the_image_are_attached_to_the_image(tmp_path: Path, attested: Any, state: Path, check: Any) -> None:
    """A run that measured the image: its evaluation is about the image's digest and verifies with it."""
    container = {"reference": "example.invalid/toy:1", "digest": attested.image.digest, "measured": True}
    run = raw_run_class()(tmp_path, container=container)
    info = run.info
    for engine in info["engines"]:
        if engine["name"] == "sparkinfer":
            engine["digest"] = attested.image.digest
    run.write()
    (run.folder / "run.json").write_text(json.dumps(info))
    for path in run.folder.glob("b*/sparkinfer/*/*/r*/result.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "engine_digest": attested.image.digest}))
    folder = render(run.folder, tmp_path / "report")
    made = attest.evaluation(folder, run.folder)
    assert made["predicateType"] == statements.EVALUATION
    with credentials("private", state=state) as held:
        bundle = attest.sign_report(folder, made, held)
    attest.exchange(attested.layout, attested.image, folder, bundle)
    names = {path.name for path in (folder / "bundles").iterdir()}
    assert names == {f"{name}.sigstore.json" for name in ("evaluation", "provenance", "sbom")}
    code, outcome = check(folder)
    assert code == 0, texts(outcome)
    code, outcome = attested.verify()
    assert code == 0
    assert any("evaluation of this image" in line for line in outcome["proved"])
    assert outcome["evaluations"] == [run.info["run"]]
    # From the image to the number.
    assert outcome["figures"] == {run.info["run"]: json.loads((folder / "report.json").read_text())["cells"]}


def test_evaluation_of_a_run_that_was_rendered_anew_takes_the_place_of_the_first(
    tmp_path: Path, attested: Any, state: Path, signer: Any
) -> None:
    """Before anything is published: two evaluations of one run with different content would contradict each other."""
    predicate = {"run": "r", "schema": "sparkinfer/evaluation/v1", "not_the_shipped_image": False, "models": []}
    predicate |= {"prompts": [], "raw_records": {}, "cells": [], "decision_rules": [], "machine": {}, "baseline": {}}
    predicate["git"] = {}
    for number in ("1", "2"):
        files = {"report.json": number, "requests.parquet": number}
        made = statements.statement("x", attested.image.digest, statements.EVALUATION, {**predicate, "files": files})
        folder = tmp_path / number
        (folder / "bundles").mkdir(parents=True)
        bundle = folder / "bundles" / "evaluation.sigstore.json"
        bundle.write_text(signer(made))
        attest.exchange(attested.layout, attested.image, folder, bundle)
    code, outcome = attested.verify()
    assert code == 0, outcome
    assert outcome["evaluations"] == ["r"]


def test_figures_from_source_beside_an_image_are_disclaimed(tmp_path: Path, state: Path, check: Any) -> None:
    container = {"reference": "example.invalid/toy:1", "digest": IMAGE, "measured": False}
    run = raw_run_class()(tmp_path, container=container).write()
    folder = render(run.folder, tmp_path / "report")
    with credentials("private", state=state) as held:
        attest.sign_report(folder, attest.evaluation(folder, run.folder), held)
    code, outcome = check(folder)
    assert code == 0, texts(outcome)
    assert any("not the shipped image" in line for line in outcome["proved"])
    text = (folder / "CHANGELOG.md").read_text()
    (folder / "CHANGELOG.md").write_text(text.replace("not the shipped image", "as shipped"))
    code, outcome = check(folder)
    assert code == 1
    assert "does not say" in texts(outcome)


def test_report_with_missing_cells_verifies(tmp_path: Path, state: Path, check: Any) -> None:
    """Rows that say `missing` follow from the records too."""
    skip = {("sparkinfer", "chat-c16"), ("vllm", "chat-c16"), ("sparkinfer", "chat-c1"), ("vllm", "long_answer-c4")}
    run = raw_run_class()(tmp_path, skip=skip).write()
    folder = render(run.folder, tmp_path / "report")
    with credentials("private", state=state) as held:
        attest.sign_report(folder, attest.evaluation(folder, run.folder), held)
    code, outcome = check(folder)
    assert code == 0, texts(outcome)


def test_records_can_be_read_back_unchanged(rendered: Path) -> None:
    pairs = parquet.records(parquet.read(rendered / "requests.parquet"))
    assert all(dataclasses.is_dataclass(record) for _, record in pairs)
