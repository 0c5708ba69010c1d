"""Re-derive every figure of a report from its request records, with no other input, and name each difference."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from sparkinfer_eval import parquet
from sparkinfer_eval.records import RawResult, Record
from sparkinfer_eval.report.document import to_markdown
from sparkinfer_eval.report.figures import Figures
from sparkinfer_eval.report.load import CheckOutput, Measurement, Missing, RunData
from sparkinfer_eval.report.report_json import build_report
from sparkinfer_eval.report.run_info import validate
from sparkinfer_eval.report.summary import headline_figure, model_sections

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
    order = {row["cell"]: None for row in [*report["cells"], *report["missing"]]}
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


def _text_lines(name: str, text: str, figures: Figures) -> list[str]:
    """Lines with figures in CHANGELOG.md and RELEASE_NOTE.md that the records do not give."""
    sections = "\n".join(to_markdown(model_sections(figures, model)) for model in figures.models())
    derived = {line for line in sections.splitlines() if line.startswith("|")}
    if name == "CHANGELOG.md":
        present = set(text.splitlines())
        return [f"{name}: the records give the row {line}, which is not in it" for line in sorted(derived - present)]
    start, _, _ = text.partition("## What changed")
    rows = {line for line in start.splitlines() if line.startswith("|")}
    found = [f"{name}: the records do not give its row {line}" for line in sorted(rows - derived)]
    if headline_figure(figures) not in text:
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
        found += _text_lines(name, (folder / name).read_text(encoding="utf-8"), figures)
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
