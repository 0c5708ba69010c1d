"""Rows of the correctness checks as an evaluation signs them: value, unit, limit, pass or fail.

Form: `checks` of docs/predicates/evaluation-v1.md. Values, limits and verdicts are those of the check programs; the
unit follows from a row's name, since their output has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkinfer_containers.errors import SignatureProblem, UsageProblem

UNITS = (
    (r"answers that (differ|part)\b", "answers"),
    (r"top-1 agreement", "share"),
    (r"top-1 differences beyond near-ties", "positions"),
    (r"\(nats\)|\blogprob(s|\s+differences?)$|^rounding, .*: largest difference$", "nats"),
    (r"\b(cached|tokens computed|tokens from the cache)\b.*\(at least\)$|\bfirst token$", "tokens"),
    (r"\b(state|window)( linear layer \d+)?$|\bstate difference$", "ratio"),
    (r"\bmixed steps\b", "steps"),
    (r": preemptions \(at least\)$", "preemptions"),
    (r": times \(at least\)$", "interruptions"),
    (r": books balance$", "faults"),
)
"""Unit by what a row's name holds, first match wins. `ratio`: a share of the largest value; `first token`: 1 where it
differs; `share`: of all positions."""
PART = re.compile(r": answers that part$")
"""Rows that only count: their verdict is that of the answers that differ, of which none may."""
_OF_OUTPUT = ("device", "dtype", "engine_digest", "model_digest")
_FIELDS = ("value", "limit", "ok")


def unit_of(name: str) -> str | None:
    """The unit of a row's value and limit, or None for a name that no check program gives."""
    return next((unit for pattern, unit in UNITS if re.search(pattern, name)), None)


def within(name: str, value: float, limit: float) -> bool:
    """Whether `value` keeps `limit`: a least value where the name says so, otherwise a largest one."""
    least = name.endswith("(at least)") or name.startswith("top-1 agreement")
    return value >= limit if least else value <= limit


def raw_path(check: str, model: str) -> str:
    """Where a run's raw results hold the output of a check."""
    return f"checks/{check}-{model}.json"


def to_sign(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The checks of report.json with all their rows, as they are signed.

    Raises UsageProblem for a row that is malformed, contradicts itself or has no known unit.
    """
    made = [_item(entry) for entry in report["checks"]]
    try:
        require_sound(made)
    except SignatureProblem as problem:
        raise UsageProblem(f"report.json: {problem}") from problem
    return made


def _item(entry: Mapping[str, Any]) -> dict[str, Any]:
    output = entry["output"] or {}
    item = {name: entry[name] for name in ("check", "model", "ok", "missing")}
    item |= {name: output.get(name) for name in _OF_OUTPUT}
    if output.get("not_applicable"):
        item["not_applicable"] = output["not_applicable"]
    rows = output.get("rows") or []
    if not isinstance(rows, list) or any(not isinstance(row, dict) or not _text(row.get("name")) for row in rows):
        raise UsageProblem(f"report.json: the rows of {entry['check']} are not objects with a name")
    item["rows"] = [
        {"name": row["name"], "unit": row.get("unit") or unit_of(row["name"]), **{key: row.get(key) for key in _FIELDS}}
        for row in rows
    ]
    return item


def _text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_sound(checks: Sequence[Any]) -> None:
    """Raises SignatureProblem for a check that is malformed, or whose verdicts its own values contradict."""
    for item in checks:
        shown = f"check {item.get('check')!r} of {item.get('model')!r}" if isinstance(item, dict) else "a check"
        if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in ("check", "model")):
            raise SignatureProblem(f"evaluation predicate: {shown} has no name or model")
        rows, ok = item.get("rows"), item.get("ok")
        if not isinstance(rows, list) or not isinstance(item.get("missing"), bool) or ok not in (True, False, None):
            raise SignatureProblem(f"evaluation predicate: {shown} has no rows or no verdict")
        for row in rows:
            _require_sound_row(row, shown)
        if ok is not None and (item["missing"] or ok is not all(row["ok"] for row in rows)):
            raise SignatureProblem(f"evaluation predicate: {shown} is {_verdict(ok)}, which its rows do not give")
        if ok is None and rows:
            raise SignatureProblem(f"evaluation predicate: {shown} has rows but no verdict")


def _require_sound_row(row: Any, shown: str) -> None:
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise SignatureProblem(f"evaluation predicate: {shown} has a row without a name")
    named = f"evaluation predicate: {shown}, row {row['name']!r}"
    if not _text(row.get("unit")):
        raise SignatureProblem(f"{named}, has no unit")
    if not _number(row.get("value")) or not _number(row.get("limit")) or not isinstance(row.get("ok"), bool):
        raise SignatureProblem(f"{named}, needs a number, a limit and a verdict")
    kept = within(row["name"], row["value"], row["limit"])
    if row["ok"] is not kept and (row["ok"] or not PART.search(row["name"])):
        raise SignatureProblem(
            f"{named}, is {_verdict(row['ok'])} with {row['value']} {row['unit']} against a limit of {row['limit']}"
        )


def _verdict(ok: object) -> str:
    return "not applicable" if ok is None else "passed" if ok else "FAILED"


def summary(checks: Sequence[Mapping[str, Any]]) -> str:
    """How many checks and rows were signed, and which failed, are missing or do not apply."""
    rows = sum(len(item["rows"]) for item in checks)
    odd = [
        f"{item['check']} {'missing' if item['missing'] else _verdict(item['ok'])}" for item in checks if not item["ok"]
    ]
    said = "all passed" if checks and not odd else ", ".join(odd)
    return f"{len(checks)} correctness checks with {rows} rows" + (f" ({said})" if said else "")


def differences(signed: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> list[str]:
    """What the signed checks and those of report.json say differently, one line each."""
    published = [_item(entry) for entry in report["checks"]]
    ours = {(item["check"], item["model"]): item for item in signed}
    theirs = {(item["check"], item["model"]): item for item in published}
    found = []
    if len(ours) != len(signed) or len(theirs) != len(published):
        found.append("the same check is given twice")
    for key in sorted(ours.keys() | theirs.keys()):
        name = "signed check " + "/".join(key)
        if key not in ours or key not in theirs:
            found.append(f"{name} is not in {'report.json' if key in ours else 'the signed evaluation'}")
            continue
        found += _differing_items(name, ours[key], theirs[key])
    return found


def _differing_items(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    found = [
        f"{name}: {key} was signed as {ours.get(key)!r}, report.json has {theirs.get(key)!r}"
        for key in sorted((ours.keys() | theirs.keys()) - {"rows"})
        if not same(ours.get(key), theirs.get(key))
    ]
    if len(ours["rows"]) != len(theirs["rows"]):
        found.append(f"{name}: {len(ours['rows'])} rows were signed, report.json has {len(theirs['rows'])}")
    for mine, its in zip(ours["rows"], theirs["rows"], strict=False):
        found += [
            f"{name} row {mine['name']!r}: {key} was signed as {mine.get(key)!r}, report.json has {its.get(key)!r}"
            for key in sorted(mine.keys() | its.keys())
            if not same(mine.get(key), its.get(key))
        ]
    return found


def same(one: object, other: object) -> bool:
    """Equal as JSON: 1, 1.0 and true are three values."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _rows(output: object) -> list[dict[str, Any]]:
    rows = output.get("rows") if isinstance(output, dict) else None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def differences_from_raw(raw: Path, report: Mapping[str, Any]) -> list[str]:
    """Checks whose output in report.json is not what the run's raw results hold, one line each."""
    found = []
    for entry in report["checks"]:
        path = raw / raw_path(entry["check"], entry["model"])
        try:
            output = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except (OSError, ValueError) as error:
            found.append(f"{path.name} in the raw results cannot be read: {error}")
            continue
        if same(output, entry["output"]):
            continue
        theirs = {str(row.get("name")): row for row in _rows(output)}
        changed = [row.get("name") for row in _rows(entry["output"]) if not same(row, theirs.get(str(row.get("name"))))]
        what = f"row {changed[0]!r}" if changed else "the output"
        found.append(f"report.json checks [{entry['check']}, {entry['model']}]: {what} is not that of the raw results")
    return found
