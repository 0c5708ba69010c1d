"""A recorded run: its cells with the steps behind them, and the costs around the engine measured from both."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from sparkinfer.errors import ConfigError
from sparkinfer.scheduling.config import SchedulerConfig

from .. import metrics
from ..cells import Cell, cell_from_definition
from ..records import Record, read_records, read_result
from .cost import Costs, Host, fit, fit_linear, scatter
from .steps import Step, Trace, read_trace

FEWEST_LONE = 3
LATER_NS = 1 << 63
QUIET_S = 0.05
"""What an ended answer makes others do has passed after this time."""


@dataclass(frozen=True, slots=True)
class CellRun:
    """One measured cell. `records` are the measured requests that were answered, in the order of their start."""

    cell: Cell
    block: int
    rep: int
    records: list[Record]
    steps: list[Step]
    scheduler: SchedulerConfig
    """Of the server that was measured."""

    @property
    def label(self) -> str:
        """The cell's id, with block and repetition where they are not the first."""
        return self.cell.id + (f" b{self.block}r{self.rep}" if (self.block, self.rep) != (1, 1) else "")

    def figures(self) -> dict[tuple[str, str], float]:
        """(metric, stat) to value, as a report computes them."""
        return {(v.metric, v.stat): v.value for v in metrics.summarise(self.records)}


@dataclass(frozen=True, slots=True)
class Recorded:
    """All cells of one engine and model of a run, and the first trace of its servers."""

    run: str
    model: str
    cells: list[CellRun]
    trace: Trace
    engines: tuple[str, ...] = ()
    """Digests of the engine that was measured."""
    began: tuple[str, ...] = ()
    """UTC of the first and the last cell."""


def models_of(run: Path, engine: str) -> list[str]:
    """Models that the run has measured with an engine."""
    return sorted({folder.name for folder in run.glob(f"b*/{engine}/*") if folder.is_dir()})


def read_run(run: Path, engine: str = "sparkinfer", model: str | None = None) -> Recorded:
    """Read `results/<run>`. Raises ConfigError when cells or step traces are missing, or the model is not clear."""
    if not run.is_dir():
        raise ConfigError(f"--run {run} is not a folder: name a recorded run, results/<run>")
    models = models_of(run, engine)
    if model is None and len(models) != 1:
        raise ConfigError(f"{run} has measured {', '.join(models) or 'no model'} with {engine}: name one with --model")
    model = model or models[0]
    traces: dict[str, Trace] = {}
    cells, results = [], []
    for path in sorted(run.glob(f"b*/{engine}/{model}/*/r*/result.json")):
        result = read_result(path.parent)
        results.append(result)
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
        cells.append(CellRun(cell, result.block, result.rep, records, steps, traces[session].scheduler))
    if not cells:
        raise ConfigError(f"{run} has no result of {engine} with {model}")
    times = [result.started_at for result in results]
    engines = tuple(sorted({result.engine_digest for result in results}))
    return Recorded(run.name, model, cells, next(iter(traces.values())), engines, (min(times), max(times)))


def read_runs(runs: Sequence[Path], engine: str = "sparkinfer", model: str | None = None) -> Recorded:
    """Several runs as one: each cell then has the repetitions of all of them. Raises ConfigError as `read_run`, and
    when cells of one name are different loads."""
    found = [read_run(run, engine, model) for run in runs]
    cells = [one for recorded in found for one in recorded.cells]
    loads: dict[str, tuple[int | float | None, ...]] = {}
    for cell in (one.cell for one in cells):
        load = (cell.prompt_tokens, cell.output_tokens, cell.requests, cell.concurrency, cell.rate)
        if loads.setdefault(cell.id, load) != load:
            raise ConfigError(f"the runs measured two cells {cell.id} of different load: give runs of one scale")
    names, times = ", ".join(recorded.run for recorded in found), [time for one in found for time in one.began]
    engines = tuple(sorted({digest for recorded in found for digest in recorded.engines}))
    return Recorded(names, found[0].model, cells, found[0].trace, engines, (min(times), max(times)))


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


def _last_steps(one: CellRun) -> list[int] | None:
    """For each request the number of the step that gave its last token; None where the trace does not tell.

    A request whose prompt took one chunk gets its first token there, and one from every later step that decodes.
    """
    begun = arrivals(one.steps)
    if len(begun) != len(one.records):
        return None
    decoding = [number for number, step in enumerate(one.steps) if step.line["d"]]
    numbers = {id(step): number for number, step in enumerate(one.steps)}
    found = []
    for record, (_, step) in zip(one.records, begun, strict=True):
        if (record.prompt_tokens or 0) > max(length for _, length, _ in step.line["p"]):
            return None
        place = bisect.bisect_right(decoding, numbers[id(step)]) + (record.output_tokens or 1) - 2
        found.append(decoding[min(place, len(decoding) - 1)])
    return found


def _crowded(one: CellRun, host: Host) -> list[bool]:
    """Which steps began while the answers of an earlier step and the requests that follow them were dealt with."""
    last_steps = _last_steps(one) if one.cell.concurrency else None
    if last_steps is None:
        return [False] * len(one.steps)
    each = host.turn + host.occupied
    # A loop begins with new requests.
    until = one.records[0].start_ns / 1e9 + host.ingest + host.occupied * ((one.cell.concurrency or 1) - 1)
    counts = Counter(last_steps)
    found = []
    for number, step in enumerate(one.steps):
        found.append(step.wall_s < until)
        if number in counts:
            until = max(until, step.end_s + host.egress + host.think) + each * counts[number]
    return found


def _turns(one: CellRun) -> list[tuple[int, list[float]]]:
    """For the answers of a closed loop that ended with one step: how many, and when their next requests left, in
    seconds after that step. Only steps that follow none of the same kind closely, whose turns would be in the way."""
    last_steps = _last_steps(one)
    if last_steps is None:
        return []
    counts = Counter(last_steps)
    starts = [record.start_ns / 1e9 for record in one.records][one.cell.concurrency or 0 :]
    found, before = [], -QUIET_S
    for number in sorted(counts):
        end, count = one.steps[number].end_s, counts[number]
        mine, starts = starts[:count], starts[count:]
        if len(mine) == count and end - before >= QUIET_S:
            found.append((count, [start - end for start in mine]))
        before = end
    return found


def _issue(one: CellRun) -> float | None:
    """Seconds between the first requests of a closed loop."""
    concurrency = min(one.cell.concurrency or 0, len(one.records))
    if concurrency < 2:
        return None
    return (one.records[concurrency - 1].start_ns - one.records[0].start_ns) / 1e9 / (concurrency - 1)


def _ingest_each(cells: Sequence[CellRun], ingest: float, ingest_token: float) -> float | None:
    """Seconds by which each of the requests that begin a closed loop delays the next one; None without such loops.

    The engine reads arrivals between two passes, so that the last one of a loop's first requests is read some time
    after it came: a loop gives an upper bound, a loose one where a pass ran meanwhile. The tightest tenth is taken.
    """
    bounds = []
    for one in cells:
        together = min(one.cell.concurrency or 0, len(one.records))
        begun = arrivals(one.steps)
        if together < 2 or len(begun) != len(one.records):
            continue
        first, tokens = one.records[0].start_ns / 1e9, one.records[0].prompt_tokens or 0
        bounds.append((begun[together - 1][0] - first - ingest - ingest_token * tokens) / (together - 1))
    return max(0.0, sorted(bounds)[len(bounds) // 10]) if bounds else None


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
    """Typical seconds from a request's start to its arrival in the engine: a constant, and per prompt token.

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


def _from(middle: float, values: Sequence[float]) -> list[float]:
    """The scatter of values around their middle."""
    return scatter([value - middle for value in values])


def measure_host(cells: Sequence[CellRun]) -> Host:
    """The costs around the engine, from requests that had it to themselves and from the loops' beginnings.

    Raises ConfigError when hardly any did: a cell of concurrency 1, or one of few arrivals, has them.
    """
    lone: list[tuple[Record, float, Step]] = []
    turns: list[tuple[int, list[float]]] = []
    for one in cells:
        if one.cell.concurrency:
            turns += _turns(one)
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
    each = _ingest_each(cells, ingest, ingest_token)
    issues = [seconds for one in cells if (seconds := _issue(one)) is not None]
    issue = statistics.median(issues) if issues else 0.0
    arrived = [at - record.start_ns / 1e9 - ingest_token * (record.prompt_tokens or 0) for record, at, _ in lone]
    spacing = [later - sooner for _, starts in turns for sooner, later in itertools.pairwise(starts)]
    # From the tokens at the client to the last of the next requests, less the time from the first of them to it.
    taken = [(n, starts[-1] - _middle(egress) - _middle(spacing) * (n - 1)) for n, starts in turns]
    think, turn = _turn_costs(taken)
    waits = [seconds - turn * count - think for count, seconds in taken]
    middle = {"egress": _middle(egress), "spacing": _middle(spacing)}
    return Host(
        ingest=ingest,
        ingest_token=ingest_token,
        issue=issue,
        ingest_each=None if each is None else min(each, ingest),
        turn=turn,
        think=think,
        **middle,
        scatter={
            "ingest": _from(ingest, arrived),
            "egress": _from(middle["egress"], egress),
            "think": scatter(waits),
            "spacing": _from(middle["spacing"], spacing),
        },
    )


def _turn_costs(taken: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """From (answers that ended with a step, seconds until their turns were done): a constant, and for each answer."""
    if not taken:
        return 0.0, 0.0
    if len({count for count, _ in taken}) == 1:
        return 0.0, max(0.0, statistics.median(seconds / count for count, seconds in taken))
    constant, each = fit_linear([[1.0, count] for count, _ in taken], [max(0.0, seconds) for _, seconds in taken])
    return constant, each


def _middle(seconds: Sequence[float]) -> float:
    return max(0.0, statistics.median(seconds)) if seconds else 0.0


def fit_cells(recorded: Recorded, cells: Sequence[CellRun]) -> Costs:
    """The cost model from some cells of a run. Raises ConfigError when there are too few.

    Closed loops and planned arrivals come from different clients; where one kind is missing, the other one's costs
    stand in.
    """
    names = list(dict.fromkeys(one.cell.id for one in cells))
    about = {**recorded.trace.about, "run": recorded.run, "model": recorded.model, "cells": names,
             "engine_digest": ", ".join(recorded.engines), "measured": " to ".join(recorded.began)}  # fmt: skip
    closed = [one for one in cells if one.cell.concurrency]
    planned = [one for one in cells if not one.cell.concurrency]
    host = measure_host(closed or planned)
    open_host = measure_host(planned) if planned and closed else None
    crowded = [flag for one in cells for flag in _crowded(one, host)]
    apart = [bool(closed) and not one.cell.concurrency for one in cells]
    return fit([one.steps for one in cells], host, recorded.trace.scheduler, about, open_host, crowded, apart)


def fit_run(recorded: Recorded, patterns: Sequence[str]) -> tuple[Costs, list[CellRun]]:
    """The cost model from the cells that match, and those cells. Raises ConfigError when there are too few."""
    cells = chosen(recorded.cells, patterns)
    if not cells:
        raise ConfigError(
            f"no cell matches {', '.join(patterns)}; the run has {', '.join(c.label for c in recorded.cells)}"
        )
    return fit_cells(recorded, cells), cells
