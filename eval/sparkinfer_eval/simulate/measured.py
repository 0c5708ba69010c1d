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
from .cost import Costs, Host, fit, fit_linear
from .steps import Step, Trace, read_trace

FEWEST_LONE = 3
LATER_NS = 1 << 63
TOGETHER_S = 0.001
"""Answers that end within this time end with the same step."""
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


def _turns(one: CellRun) -> tuple[list[float], list[float]]:
    """From an answer's end to the next request of a closed loop, by order, in seconds: where the answer ended alone,
    and, where answers ended together, from one of their next requests to the following one."""
    concurrency = one.cell.concurrency or 0
    starts = [r.start_ns / 1e9 for r in one.records][concurrency:]
    ends = sorted(r.end_ns / 1e9 for r in one.records)
    think, spacing = [], []
    for number, (start, end) in enumerate(zip(starts, ends, strict=False)):
        gap = end - ends[number - 1] if number else TOGETHER_S * 10
        if gap > TOGETHER_S * 5:
            think.append(start - end)
        elif gap < TOGETHER_S:
            spacing.append(start - starts[number - 1])
    return think, spacing


def _issue(one: CellRun) -> float | None:
    """Seconds between the first requests of a closed loop."""
    concurrency = min(one.cell.concurrency or 0, len(one.records))
    if concurrency < 2:
        return None
    return (one.records[concurrency - 1].start_ns - one.records[0].start_ns) / 1e9 / (concurrency - 1)


def lone_requests(one: CellRun) -> list[tuple[Record, float, Step]]:
    """(record, arrival in the engine, step of its first chunk) of the requests that had server and engine to themselves
    from their start to their first token.

    A busy engine reads its messages between two steps, so that an arrival there says nothing of the way to it. Whether
    it was busy the records say: a pause between two steps may as well be one in which the engine waited for a CPU.
    Records and arrivals are matched by order.
    """
    begun = arrivals(one.steps)
    if len(begun) != len(one.records):
        return []
    found = []
    others_end = 0
    starts = [*(record.start_ns for record in one.records[1:]), LATER_NS]
    for record, following, (arrival, step) in zip(one.records, starts, begun, strict=True):
        first = record.first_token_ns
        if first is not None and others_end <= record.start_ns and following >= first:
            found.append((record, arrival, step))
        others_end = max(others_end, record.end_ns)
    return found


def _ingest(lone: Sequence[tuple[Record, float, Step]]) -> tuple[float, float]:
    """Seconds from a request's start to its arrival in the engine: a constant, and per prompt token.

    From the medians of requests of like length, so that one slow start counts for one.
    """
    by_length: dict[int, list[tuple[int, float]]] = {}
    for record, arrival, _ in lone:
        tokens = record.prompt_tokens or 0
        by_length.setdefault(tokens.bit_length(), []).append((tokens, arrival - record.start_ns / 1e9))
    rows = [[1.0, statistics.fmean(tokens for tokens, _ in some)] for some in by_length.values()]
    seconds = [max(0.0, statistics.median(time for _, time in some)) for some in by_length.values()]
    if len(rows) < 2:
        return seconds[0], 0.0
    constant, per_token = fit_linear(rows, seconds)
    return constant, per_token


def measure_host(cells: Sequence[CellRun]) -> Host:
    """The costs around the engine, from requests that had it to themselves and from the loops' beginnings.

    Raises ConfigError when hardly any did: a cell of concurrency 1, or one of few arrivals, has them.
    """
    lone: list[tuple[Record, float, Step]] = []
    think: list[float] = []
    spacing: list[float] = []
    for one in cells:
        if one.cell.concurrency:
            alone, together = _turns(one)
            think += alone
            spacing += together
        lone += lone_requests(one)
    egress = [
        record.first_token_ns / 1e9 - step.end_s
        for record, _, step in lone
        if record.first_token_ns is not None and step.line["n"] and len(step.line["p"]) == 1
    ]
    if len(lone) < FEWEST_LONE or not egress:
        raise ConfigError(
            "hardly any request of the cells to fit from had the engine to itself: add a cell of concurrency 1, for "
            "the costs around the engine"
        )
    ingest, ingest_token = _ingest(lone)
    issues = [seconds for one in cells if (seconds := _issue(one)) is not None]
    issue = statistics.median(issues) if issues else 0.0
    return Host(
        ingest=ingest,
        ingest_token=ingest_token,
        front=issue,
        egress=max(0.0, statistics.median(egress)),
        issue=issue,
        think=max(0.0, statistics.median(think)) if think else 0.0,
        spacing=max(0.0, statistics.median(spacing)) if spacing else 0.0,
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
