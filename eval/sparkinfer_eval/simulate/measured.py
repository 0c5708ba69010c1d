"""A recorded run: its cells with the steps behind them, and the costs around the engine measured from both."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from sparkinfer.errors import ConfigError

from .. import metrics
from ..cells import Cell, cell_from_definition
from ..records import Record, read_records, read_result
from .cost import Costs, Host, fit
from .steps import Step, Trace, read_trace

FIT_CELLS = ("*-c1", "*-c32")
"""The least and the largest load; what lies between, and the open-loop cells, are then predicted."""


@dataclass(frozen=True, slots=True)
class CellRun:
    """One measured cell. `records` are the measured requests that were answered, in the order of their start."""

    cell: Cell
    block: int
    rep: int
    records: list[Record]
    steps: list[Step]

    @property
    def label(self) -> str:
        """The cell's id, with block and repetition where they are not the first."""
        return self.cell.id + (f" b{self.block}r{self.rep}" if (self.block, self.rep) != (1, 1) else "")

    def figures(self) -> dict[tuple[str, str], float]:
        """(metric, stat) to value, as a report computes them."""
        return {(v.metric, v.stat): v.value for v in metrics.summarise(self.records)}


@dataclass(frozen=True, slots=True)
class Recorded:
    """All cells of one engine and model of a run, and the settings of its scheduler."""

    run: str
    model: str
    cells: list[CellRun]
    trace: Trace


def models_of(run: Path, engine: str) -> list[str]:
    """Models that the run has measured with an engine."""
    return sorted({folder.name for folder in run.glob(f"b*/{engine}/*") if folder.is_dir()})


def read_run(run: Path, engine: str = "sparkinfer", model: str | None = None) -> Recorded:
    """Read `results/<run>`. Raises ConfigError when cells or step traces are missing, or the model is not clear."""
    models = models_of(run, engine)
    if model is None and len(models) != 1:
        raise ConfigError(f"{run} has measured {', '.join(models) or 'no model'} with {engine}: name one with --model")
    model = model or models[0]
    traces: dict[str, Trace] = {}
    cells = []
    for path in sorted(run.glob(f"b*/{engine}/{model}/*/r*/result.json")):
        result = read_result(path.parent)
        session = f"b{result.block}-r{result.rep}"
        if session not in traces:
            traces[session] = read_trace(run / "servers" / f"{engine}-{model}-{session}.steps.jsonl")
        records = metrics.measured(read_records(path.parent / "records.jsonl"))
        records.sort(key=lambda record: record.start_ns)
        begin, end = records[0].start_ns / 1e9, max(r.end_ns for r in records) / 1e9
        cell = cell_from_definition(result.cell_definition)
        steps = traces[session].between(begin, end)
        if not steps:
            raise ConfigError(f"{path.parent}: its server's trace holds no step of that time")
        cells.append(CellRun(cell, result.block, result.rep, records, steps))
    if not cells:
        raise ConfigError(f"{run} has no result of {engine} with {model}")
    return Recorded(run.name, model, cells, next(iter(traces.values())))


def chosen(cells: Sequence[CellRun], patterns: Sequence[str]) -> list[CellRun]:
    """The cells whose id matches one of the patterns (`*-c1`)."""
    return [one for one in cells if any(fnmatch(one.cell.id, pattern) for pattern in patterns)]


def arrivals(steps: Sequence[Step]) -> list[tuple[float, Step]]:
    """(arrival in the engine in wall seconds, step of the first chunk) of the requests begun, in order of arrival."""
    found = []
    for step in steps:
        for _, _, age in step.line.get("p", ()):
            if age >= 0:
                found.append((step.wall_s - age / 1e6, step))
    return sorted(found, key=lambda pair: pair[0])


def _think(one: CellRun) -> float | None:
    """Median seconds from an answer's end to the next request, by order; None when all went out at once."""
    concurrency = one.cell.concurrency or 0
    starts = [r.start_ns for r in one.records][concurrency:]
    ends = sorted(r.end_ns for r in one.records)
    waits = [(start - end) / 1e9 for start, end in zip(starts, ends, strict=False)]
    return max(0.0, statistics.median(waits)) if waits else None


def _issue(one: CellRun) -> float | None:
    """Seconds between the first requests of a closed loop."""
    concurrency = min(one.cell.concurrency or 0, len(one.records))
    if concurrency < 2:
        return None
    return (one.records[concurrency - 1].start_ns - one.records[0].start_ns) / 1e9 / (concurrency - 1)


def measure_host(cells: Sequence[CellRun]) -> Host:
    """The costs around the engine, from requests that were alone and from the loops' beginnings.

    Raises ConfigError without a cell of concurrency 1: only there is an arrival not hidden behind a step.
    """
    ingest, egress = [], []
    think: dict[int, list[float]] = {}
    for one in cells:
        concurrency = one.cell.concurrency or 0
        if concurrency and (seconds := _think(one)) is not None:
            think.setdefault(concurrency, []).append(seconds)
        begun = arrivals(one.steps)
        if concurrency != 1 or len(begun) != len(one.records):
            continue
        for record, (arrival, step) in zip(one.records, begun, strict=True):
            ingest.append(arrival - record.start_ns / 1e9)
            if record.first_token_ns is not None:
                egress.append(record.first_token_ns / 1e9 - step.end_s)
    if not ingest or not egress:
        raise ConfigError("the cells to fit from hold none of concurrency 1: add one, for the costs around the engine")
    issues = [seconds for one in cells if (seconds := _issue(one)) is not None]
    issue = statistics.median(issues) if issues else 0.0
    loads = sorted(think)
    alone = statistics.median(think[loads[0]]) if loads else 0.0
    most = statistics.median(think[loads[-1]]) if loads else 0.0
    slope = max(0.0, most - alone) / (loads[-1] - loads[0]) if len(loads) > 1 else 0.0
    return Host(
        ingest=max(0.0, statistics.median(ingest)),
        front=issue,
        egress=max(0.0, statistics.median(egress)),
        issue=issue,
        think=alone,
        think_per_request=slope,
    )


def fit_run(recorded: Recorded, patterns: Sequence[str] = FIT_CELLS) -> tuple[Costs, list[CellRun]]:
    """The cost model from the cells that match, and those cells. Raises ConfigError when there are too few."""
    cells = chosen(recorded.cells, patterns)
    if not cells:
        raise ConfigError(
            f"no cell matches {', '.join(patterns)}; the run has {', '.join(c.label for c in recorded.cells)}"
        )
    about = {**recorded.trace.about, "run": recorded.run, "model": recorded.model, "cells": [c.label for c in cells]}
    host = measure_host(cells)
    return fit([one.steps for one in cells], host, recorded.trace.scheduler, about), cells
