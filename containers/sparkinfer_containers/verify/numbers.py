"""Re-derive every figure of a report from its request records, with no other input, and name each difference."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparkinfer_eval import parquet
from sparkinfer_eval.records import RawResult, Record
from sparkinfer_eval.report.document import Block, to_markdown
from sparkinfer_eval.report.figures import Figures
from sparkinfer_eval.report.load import CheckOutput, Measurement, Missing, RunData
from sparkinfer_eval.report.release_note import checks_sentence, measured
from sparkinfer_eval.report.report_json import build_report
from sparkinfer_eval.report.run_info import validate
from sparkinfer_eval.report.summary import checks_section, gates_section, headline_figure, model_sections
from sparkinfer_eval.report.text import split_cell

TOLERANCE = 1e-9
"""Relative; the derivation is the same code on the same integers, so anything larger is a changed number."""
TABLES = {
    "cells": ("model", "cell", "engine", "block", "rep", "metric", "stat"),
    "summary": ("model", "cell", "engine", "metric", "stat"),
    "ratios": ("model", "cell", "metric", "stat"),
}
"""The derived tables of report.json and the fields that name a row."""

RunKey = tuple[str, int, str, str, str, str, int]


def _measurements(path: Path, report: dict[str, Any]) -> list[Measurement]:
    grouped: dict[RunKey, list[Record]] = {}
    for columns, record in parquet.records(parquet.read(path)):
        grouped.setdefault(tuple(columns[name] for name in parquet.RESULT_COLUMNS), []).append(record)
    digests = {model["name"]: model["digest"] for model in report["models"]}
    definitions = report.get("cell_definitions", {})
    made = []
    for (run, block, engine, digest, model, cell, rep), records in grouped.items():
        result = RawResult(
            run=run, block=block, engine=engine, engine_version="", engine_digest=digest, model=model,
            model_digest=digests.get(model, ""), cell=cell, rep=rep, cell_digest="",
            cell_definition=definitions.get(cell, {}),
            prompts_sha256="", command=[], started_at=report["measured"]["started_at"], tool={},
        )  # fmt: skip
        profiling = [record for record in records if record.phase == "profiling"]
        warmup = [record for record in records if record.phase != "profiling"]
        made.append(Measurement(path.parent, result, profiling, warmup, ""))
    return made


def rebuild(folder: Path, report: dict[str, Any]) -> Figures:
    """The run as its request records tell it; names, labels and reasons are taken from `report`."""
    measurements = _measurements(folder / "requests.parquet", report)
    # Asked for and measured, or asked for and missing: tables have rows for both.
    named = list(dict.fromkeys(row["cell"] for row in [*report["cells"], *report["missing"]]))
    shapes = list(dict.fromkeys(split_cell(cell)[0] for cell in named))
    order = dict.fromkeys(sorted(named, key=lambda cell: (shapes.index(split_cell(cell)[0]), split_cell(cell)[1])))
    info = {
        **{name: report[name] for name in ("run", "version", "profile", "scale", "blocks", "reps", "engines")},
        **{name: report[name] for name in ("models", "machine", "source", "packages", "container")},
        "cells": [*order, *sorted({m.result.cell for m in measurements} - order.keys())],
    }
    position = {cell: index for index, cell in enumerate(info["cells"])}
    measurements.sort(
        key=lambda m: (m.result.model, position[m.result.cell], m.result.engine, m.result.block, m.result.rep)
    )
    checks = [CheckOutput(item["check"], item["model"], item["output"]) for item in report["checks"]]
    fields = [field.name for field in dataclasses.fields(Missing)]
    missing = [Missing(**{name: item[name] for name in fields}) for item in report["missing"]]
    return Figures(RunData(info, measurements, checks, missing, failures=[], servers=report.get("servers", [])))


def _same(published: object, derived: object) -> bool:
    if isinstance(published, bool) or isinstance(derived, bool):
        return published is derived
    if isinstance(published, int | float) and isinstance(derived, int | float):
        return math.isclose(published, derived, rel_tol=TOLERANCE, abs_tol=0.0)
    return published == derived


def _compare(name: str, published: list[dict[str, Any]], derived: list[dict[str, Any]]) -> list[str]:
    keys = TABLES[name]

    def index(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
        return {tuple(row[key] for key in keys): row for row in rows}

    ours, theirs, found = index(derived), index(published), []
    if len(theirs) != len(published):
        found.append(f"report.json {name}: the same row is given twice")
    for key in sorted(ours.keys() | theirs.keys(), key=str):
        label = f"report.json {name} [{', '.join(str(part) for part in key)}]"
        if key not in theirs:
            found.append(f"{label} is missing, the records give {ours[key]['value']!r}")
        elif key not in ours:
            found.append(f"{label} is published, but no record supports it")
        else:
            for field in sorted(ours[key].keys() | theirs[key].keys()):
                said, is_so = theirs[key].get(field), ours[key].get(field)
                if not _same(said, is_so):
                    found.append(f"{label}: {field} is published as {said!r}, the records give {is_so!r}")
    return found


def _lines(blocks: Sequence[Block]) -> list[str]:
    return [line for line in to_markdown(list(blocks)).splitlines() if line]


def _between(text: str, begin: str, end: str) -> list[str]:
    """Lines with text after the line `begin` and before the line `end`, or to the last one."""
    lines = text.splitlines()
    first = lines.index(begin) + 1 if begin in lines else 0
    last = lines.index(end, first) if end in lines[first:] else len(lines)
    return [line for line in lines[first:last] if line]


def _differing(name: str, published: list[str], derived: list[str]) -> list[str]:
    """Lines that only one of both has, and rows that stand elsewhere."""
    said, is_so = Counter(published), Counter(derived)
    found = [f"{name}: the records give the line {line}, which is not in it" for line in (is_so - said).elements()]
    found += [f"{name}: the records do not give its line {line}" for line in (said - is_so).elements()]
    if not found and published != derived:
        found.append(f"{name}: its lines stand in another order than the records give")
    return found


def _text_lines(name: str, text: str, figures: Figures) -> list[str]:
    """Lines with figures in CHANGELOG.md and RELEASE_NOTE.md that the records and checks do not give.

    Every line of the models' sections and of the checks is derived anew. Not derived are the head (machine, versions),
    the counts of validity gates and times of starts, which the records do not hold, and what the note says of changes.
    """
    if name == "CHANGELOG.md":
        sections = [block for model in figures.models() for block in model_sections(figures, model)]
        derived = _lines([*sections, *checks_section(figures)])
        return _differing(name, _between(text, derived[0], _lines(gates_section(figures))[0]), derived[1:])
    head, tools, *derived = _lines([*measured(figures), checks_sentence(figures)])
    del tools  # The load generators and the machine, as in the head of CHANGELOG.md.
    found = _differing(name, _between(text, head, "## What changed")[1:], derived)
    if f"In figures: {headline_figure(figures)}." not in text.splitlines():
        found.append(f"{name}: the headline figure should be: {headline_figure(figures)}")
    return found


def differences(folder: Path, report: dict[str, Any]) -> list[str]:
    """Every published number that the request records do not give, one line each; empty when all agree.

    Raises ConfigError or ValueError when the records cannot be read.
    """
    figures = rebuild(folder, report)
    derived = build_report(figures)
    found = [line for name in TABLES for line in _compare(name, report[name], derived[name])]
    for name in ("CHANGELOG.md", "RELEASE_NOTE.md"):
        try:
            found += _text_lines(name, (folder / name).read_text(encoding="utf-8"), figures)
        except StopIteration:
            raise ValueError("report.json lists no model or engine of a name that its rows or checks give") from None
    return found


def count(report: dict[str, Any]) -> int:
    """How many figures `differences` compared in report.json."""
    return sum(len(report[name]) for name in TABLES)


def load(folder: Path) -> dict[str, Any]:
    """report.json of a report folder. Raises ValueError or RecursionError when it is not JSON that can be read, and
    ConfigError when it does not fit its schema."""
    made: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    validate(made, "report-v1", "report.json")
    json.dumps(made, indent=1)  # nested deeper than that can be written
    return made
