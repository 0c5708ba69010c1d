"""report.json: all figures of a run as data (schema `sparkinfer/report/v1`)."""

from __future__ import annotations

from typing import Any

from sparkinfer.errors import ConfigError
from sparkinfer_eval import metrics
from sparkinfer_eval.report.figures import RATES, Figures, enough_requests
from sparkinfer_eval.report.run_info import validate
from sparkinfer_eval.report.summary import measured_span

REPORT_SCHEMA = "sparkinfer/report/v1"
RATIOS = (("output_tok_s", "value"), ("ttft_ms", "p50"), ("itl_ms", "p50"), ("request_latency_ms", "mean"))


def _cells(figures: Figures) -> list[dict[str, Any]]:
    """One row per run and statistic."""
    rows = []
    for m in figures.run.measurements:
        r = m.result
        try:
            values = metrics.summarise(m.records)
        except ValueError as error:
            where = f"{r.cell} of {r.model} with {r.engine}, block {r.block}, rep {r.rep}"
            raise ConfigError(f"{where}: {error}; measure it again") from error
        for v in values:
            rows.append(
                {
                    "model": r.model,
                    "cell": r.cell,
                    "engine": r.engine,
                    "block": r.block,
                    "rep": r.rep,
                    "metric": v.metric,
                    "stat": v.stat,
                    "value": v.value,
                    "unit": v.unit,
                    "n": v.n,
                }
            )
    return rows


def _summary(figures: Figures) -> list[dict[str, Any]]:
    """The figures of the tables: all runs of an engine in a cell together."""
    rows = []
    for model in figures.models():
        for cell in figures.cells(model):
            for engine in figures.run.engines:
                runs = figures.runs(engine["name"], model, cell)
                if not runs:
                    continue
                for metric, unit in metrics.UNITS.items():
                    for stat in ("value",) if metric in RATES else metrics.STATS:
                        value = figures.value(engine["name"], model, cell, metric, stat)
                        count = figures.count(engine["name"], model, cell, metric)
                        rows.append(
                            {
                                "model": model,
                                "cell": cell,
                                "engine": engine["name"],
                                "metric": metric,
                                "stat": stat,
                                "value": value,
                                "unit": unit,
                                "n": count,
                                "runs": len(runs),
                                "enough_requests": enough_requests(stat, count),
                            }
                        )
    return rows


def _ratios(figures: Figures) -> list[dict[str, Any]]:
    """This engine's figures divided by the baseline's."""
    return [
        {"model": model, "cell": cell, "metric": metric, "stat": stat, "value": value}
        for model in figures.models()
        for cell in figures.cells(model)
        for metric, stat in RATIOS
        if (value := figures.ratio(model, cell, metric, stat)) is not None
    ]


def build_report(figures: Figures) -> dict[str, Any]:
    """The whole of report.json, validated against its schema."""
    run = figures.run
    info = run.info
    started, ended = measured_span(run)
    report = {
        "schema": REPORT_SCHEMA,
        "run": info["run"],
        "version": info["version"],
        "profile": info["profile"],
        "scale": info["scale"],
        "blocks": info["blocks"],
        "reps": info["reps"],
        "measured": {"started_at": started, "ended_at": ended},
        "engines": run.engines,
        "models": info["models"],
        "machine": info["machine"],
        "source": info["source"],
        "packages": info["packages"],
        "container": info.get("container"),
        "servers": run.servers,
        "cell_definitions": {m.result.cell: m.result.cell_definition for m in run.measurements},
        "cells": _cells(figures),
        "summary": _summary(figures),
        "ratios": _ratios(figures),
        "checks": [
            {"check": c.check, "model": c.model, "ok": c.ok, "missing": c.data is None, "output": c.data}
            for c in run.checks
        ],
        "missing": [
            {"block": x.block, "engine": x.engine, "model": x.model, "cell": x.cell, "rep": x.rep, "reason": x.reason}
            for x in run.missing
        ],
        "failures": [
            {
                "block": f.block, "engine": f.engine, "model": f.model, "cell": f.cell, "rep": f.rep,
                "reason": f.reason, "at": f.at,
            }
            for f in run.failures
        ],
    }  # fmt: skip
    validate(report, "report-v1", "report.json")
    return report
