"""Rows of correctness checks in the signed evaluation: units, and a refusal for each way to change one."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sparkinfer_containers import attest, checks, statements
from sparkinfer_containers.errors import SignatureProblem, UsageProblem
from sparkinfer_containers.trust import credentials
from sparkinfer_eval.check_program import AT_LEAST

from .report_parts import raw_run_class, render, texts

ROOT = Path(__file__).parents[2]
BUNDLE = "evaluation-source.sigstore.json"
COMMITTED = sorted(ROOT.glob("reports/*/report.json"))


def _filled(part: ast.expr) -> str:
    named = part.value.id if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name) else ""
    return {"kind": "state", "AT_LEAST": AT_LEAST}.get(named, "9")


def row_names() -> list[tuple[str, str]]:
    """(file, name) of every row that a check program writes: the constant parts of its first argument, `9` between."""
    found = []
    for path in sorted((ROOT / "eval" / "sparkinfer_eval").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called not in ("CheckRow", "at_least") or isinstance(node.args[0], ast.Name):
                continue
            first = node.args[0]
            parts = first.values if isinstance(first, ast.JoinedStr) else [first]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else _filled(part) for part in parts)
            found.append((path.name, f"{text} {AT_LEAST}" if called == "at_least" else text))
    return found


def test_every_row_of_every_check_program_has_a_unit() -> None:
    names = row_names()
    assert {file for file, _ in names} == {"pack_ckpt.py", "prefix_check.py", "mixed_conc.py", "cli.py"}
    assert len(names) > 25
    for file, name in names:
        # Of `at_least` the helper itself adds the ending to a name that its callers give.
        assert name == f"9 {AT_LEAST}" or checks.unit_of(name), f"{file}: {name}"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_checks_of_committed_reports_can_be_signed(path: Path) -> None:
    report = json.loads(path.read_text())
    made = checks.to_sign(report)
    assert sum(len(item["rows"]) for item in made) == sum(len(item["output"]["rows"]) for item in report["checks"])
    assert checks.differences(made, report) == []


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("ragged9[3] 17 tokens first token", "tokens"),
        ("edges[0] 64 tokens window linear layer 2", "ratio"),
        ("turns of a chat: logprobs", "nats"),
        ("99.0% of 512 logprob differences", "nats"),
        ("cold greedy: answers that part", "answers"),
        ("second turn: cached, of the first answer too (at least)", "tokens"),
        ("KL, mean (nats)", "nats"),
        ("top-1 agreement, ties counted", "share"),
        ("something else", None),
    ],
)
def test_unit_of_a_row(name: str, unit: str | None) -> None:
    assert checks.unit_of(name) == unit


def test_statement_holds_every_row_with_unit_and_verdict(signed: Path, raw_results: Path) -> None:
    predicate = attest.evaluation(signed, raw_results)["predicate"]
    assert predicate["schema"] == "sparkinfer/evaluation-source/v1.1"
    (item,) = predicate["checks"]
    assert (item["check"], item["ok"], item["missing"]) == ("pack_ckpt_check", True, False)
    (row,) = item["rows"]
    assert row == {"name": "largest state difference", "value": 1e-6, "unit": "ratio", "limit": 0.05, "ok": True}
    assert checks.raw_path(item["check"], item["model"]) in predicate["raw_records"]


def test_outcome_lists_the_checks(signed: Path, check: Any) -> None:
    code, outcome = check(signed)
    assert code == 0, texts(outcome)
    assert any("1 correctness checks with 1 rows (all passed) are as signed" in line for line in outcome["proved"])
    ((item,),) = outcome["checks"].values()
    assert item["rows"][0]["unit"] == "ratio"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("ok", False, "row 'largest state difference': ok was signed as True, report.json has False"),
        ("value", 0.02, "row 'largest state difference': value was signed as 1e-06, report.json has 0.02"),
        ("limit", 0.5, "limit was signed as 0.05"),
        ("name", "smallest state difference", "name was signed as 'largest state difference'"),
        ("unit", "nats", "unit was signed as 'ratio'"),
    ],
)
def test_flipped_check_row_of_the_report_is_refused(signed: Path, check: Any, key: str, value: Any, said: str) -> None:
    report = json.loads((signed / "report.json").read_text())
    report["checks"][0]["output"]["rows"][0][key] = value
    (signed / "report.json").write_text(json.dumps(report))
    code, outcome = check(signed)
    assert code == 1
    assert said in texts(outcome)


@pytest.mark.parametrize("change", ["drop the row", "drop the check", "verdict", "twice", "rows"])
def test_changed_checks_of_the_report_are_refused(signed: Path, check: Any, change: str) -> None:
    report = json.loads((signed / "report.json").read_text())
    said = {
        "drop the row": "1 rows were signed, report.json has 0",
        "drop the check": "is not in report.json",
        "verdict": "ok was signed as True, report.json has False",
        "twice": "given twice",
        "rows": "rows of pack_ckpt_check are not objects",
    }[change]
    if change == "drop the row":
        report["checks"][0]["output"]["rows"] = []
    elif change == "drop the check":
        report["checks"] = []
    elif change == "verdict":
        report["checks"][0]["ok"] = False
    elif change == "rows":
        report["checks"][0]["output"]["rows"] = [5]
    else:
        report["checks"] *= 2
    (signed / "report.json").write_text(json.dumps(report))
    code, outcome = check(signed)
    assert code == (4 if change == "rows" else 1)
    assert said in texts(outcome)


def resigned(rendered: Path, raw: Path, folder: Path, signer: Any, change: Callable[[Any], None]) -> Path:
    """The report with an evaluation that its own signer changed before signing."""
    shutil.copytree(rendered, folder)
    made = attest.evaluation(folder, raw)
    change(made["predicate"])
    (folder / "bundles").mkdir()
    (folder / "bundles" / BUNDLE).write_text(signer(made))
    return folder


def _set(key: str, value: Any) -> Callable[[Any], None]:
    return lambda predicate: predicate["checks"][0]["rows"][0].update({key: value})


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (_set("ok", False), 3, "is FAILED with 1e-06 ratio against a limit of 0.05"),
        (_set("value", 0.3), 3, "is passed with 0.3 ratio against a limit of 0.05"),
        (_set("value", 0.01), 1, "value was signed as 0.01"),
        (_set("unit", ""), 3, "has no unit"),
        (_set("unit", "answers"), 1, "unit was signed as 'answers'"),
        (_set("value", "small"), 3, "needs a number, a limit and a verdict"),
        (lambda predicate: predicate["checks"][0].update(ok=False), 3, "is FAILED, which its rows do not give"),
        (lambda predicate: predicate["checks"][0].update(ok=None), 3, "has rows but no verdict"),
        (lambda predicate: predicate["checks"][0].pop("model"), 3, "has no name or model"),
        (lambda predicate: predicate["checks"].append(5), 3, "has no name or model"),
        (lambda predicate: predicate.pop("checks"), 3, "field checks is missing"),
    ],
)
def test_flipped_check_row_of_the_statement_is_refused(
    rendered: Path, raw_results: Path, tmp_path: Path, check: Any, signer: Callable[..., str], change, code, said
) -> None:
    folder = resigned(rendered, raw_results, tmp_path / "report", signer, change)
    found, outcome = check(folder)
    assert found == code
    assert said in texts(outcome)


def test_row_that_only_counts_takes_the_verdict_of_another() -> None:
    """Of answers that part, any number keeps the limit; whether one differs is the row before's to say."""
    rows = [
        {"name": "cold greedy: answers that differ of 8", "unit": "answers", "value": 1, "limit": 0, "ok": False},
        {"name": "cold greedy: answers that part", "unit": "answers", "value": 2, "limit": 8, "ok": False},
    ]
    item = {"check": "mixed_conc_check", "model": "m", "ok": False, "missing": False, "rows": rows}
    checks.require_sound([item])
    assert "mixed_conc_check FAILED" in checks.summary([item])
    rows[0] |= {"value": 0}
    with pytest.raises(SignatureProblem, match="is FAILED with 0 answers"):
        checks.require_sound([item])


def test_older_statement_is_read_and_kept(
    rendered: Path, raw_results: Path, tmp_path: Path, check: Any, signer: Callable[..., str], state: Path
) -> None:
    """Reports that were signed before checks were part of it verify, and are not to be signed anew."""

    def older(predicate: dict[str, Any]) -> None:
        del predicate["checks"]
        predicate["schema"] = "sparkinfer/evaluation-source/v1"

    folder = resigned(rendered, raw_results, tmp_path / "report", signer, older)
    code, outcome = check(folder)
    assert code == 0, texts(outcome)
    assert any("version 1" in line for line in outcome["not_proved"])
    assert outcome["checks"] == {}
    before = (folder / "bundles" / BUNDLE).read_bytes()
    with credentials("private", state=state) as held:
        kept = attest.sign_report(folder, attest.evaluation(folder, raw_results), held)
    assert kept.read_bytes() == before


def test_unknown_version_is_refused(
    rendered: Path, raw_results: Path, tmp_path: Path, check: Any, signer: Callable[..., str]
) -> None:
    folder = resigned(
        rendered, raw_results, tmp_path / "report", signer,
        lambda predicate: predicate.update(schema="sparkinfer/evaluation-source/v2"),
    )  # fmt: skip
    code, outcome = check(folder)
    assert code == 3
    assert "has schema 'sparkinfer/evaluation-source/v2'" in texts(outcome)


def test_raw_results_are_held_against_what_was_signed(
    signed: Path, raw_results: Path, tmp_path: Path, check: Any
) -> None:
    raw = Path(shutil.copytree(raw_results, tmp_path / "raw"))
    code, outcome = check(signed, "--raw", str(raw))
    assert code == 0, texts(outcome)
    assert any("are as signed, and the outputs of 1 checks are theirs" in line for line in outcome["proved"])
    path = next(raw.glob("checks/*.json"))
    output = json.loads(path.read_text())
    output["rows"][0]["ok"] = False
    path.write_text(json.dumps(output))
    code, outcome = check(signed, "--raw", str(raw))
    assert code == 1
    assert "row 'largest state difference' is not that of the raw results" in texts(outcome)
    assert f"checks/{path.name} in {raw} is not the raw result that was signed" in texts(outcome)
    path.unlink()
    next(raw.glob("b1/*/*/*/r1/records.jsonl")).write_text("")
    code, outcome = check(signed, "--raw", str(raw))
    assert code == 1
    assert f"checks/{path.name} is signed but missing" in texts(outcome)
    assert "records.jsonl in" in texts(outcome)
    assert check(signed, "--raw", str(tmp_path / "none"))[0] == 2


def test_report_of_other_check_outputs_is_not_signed(rendered: Path, raw_results: Path, tmp_path: Path) -> None:
    raw = Path(shutil.copytree(raw_results, tmp_path / "raw"))
    path = next(raw.glob("checks/*.json"))
    path.write_text(path.read_text().replace("0.05", "0.06"))
    with pytest.raises(UsageProblem, match=r"was not rendered from .*row 'largest state difference'"):
        attest.evaluation(rendered, raw)
    path.write_text("{")
    with pytest.raises(UsageProblem, match="cannot be read"):
        attest.evaluation(rendered, raw)


def test_failed_check_is_signed_as_failed_and_an_unknown_row_is_not(tmp_path: Path, state: Path, check: Any) -> None:
    run = raw_run_class()(tmp_path).write()
    run.write_check("spark-tiny-dense", ok=False)
    folder = render(run.folder, tmp_path / "report")
    with credentials("private", state=state) as held:
        attest.sign_report(folder, attest.evaluation(folder, run.folder), held)
    code, outcome = check(folder)
    assert code == 0, texts(outcome)
    assert any("pack_ckpt_check FAILED" in line for line in outcome["proved"])
    report = json.loads((folder / "report.json").read_text())
    report["checks"][0]["output"]["rows"][0]["name"] = "an unknown quantity"
    with pytest.raises(UsageProblem, match="row 'an unknown quantity', has no unit"):
        checks.to_sign(report)


def test_checks_of_an_image_are_listed_with_it(attested: Any, signer: Callable[..., str]) -> None:
    row = {"name": "x: state", "unit": "ratio", "value": 0.0, "limit": 0.05, "ok": True}
    item = {"check": "prefix_check", "model": "m", "ok": True, "missing": False, "rows": [row]}
    files = {"report.json": "1", "requests.parquet": "1"}
    predicate = {"run": "r", "schema": "sparkinfer/evaluation/v1.1", "not_the_shipped_image": False, "models": []}
    predicate |= {"prompts": [], "raw_records": {}, "cells": [], "decision_rules": [], "machine": {}, "baseline": {}}
    predicate |= {"git": {}, "files": files, "checks": [item]}
    bundle = signer(statements.statement("x", attested.image.digest, statements.EVALUATION, predicate))
    attest.attach(attested.layout, attested.image, bundle, statements.EVALUATION)
    code, outcome = attested.verify()
    assert code == 0, outcome
    assert outcome["checks"] == {"r": [item]}
    assert any("1 correctness checks with 1 rows (all passed)" in line for line in outcome["proved"])
