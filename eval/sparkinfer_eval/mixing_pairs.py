"""Mixed steps on against off: the CPU cells over HTTP, in pairs of runs on two servers started for that pair.

Runs of one pair follow each other at once, in alternating order; with `--rounds` a cell runs several times on both
servers of a pair, which is then the ratio of the medians of its runs. What is judged is the centre of the pairs'
ratios (`paired.centre`) by its whole interval: machines with neighbours are slow for a while, now and then. Throughput
counts as lost when all of the interval lies below 1, the time to the first token as lowered when all of it does.

With `--pairs` the pairs are kept in a file, each as soon as it is measured, and those that it has of the same engine,
model and machine count too.

With `--record` the requests and steps of the servers with mixing on are kept in the form of a run, so that
`eval/simulate.py --run` can be held against several repetitions of every cell.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import sparkinfer
from sparkinfer.errors import ConfigError
from sparkinfer.identity import engine_digest, model_digest

from . import gates, launch, metrics, server_probe
from .arrivals import TOOL_VERSION, measure
from .cells import Cell, all_ids, load_cells, resolve_cells
from .closed_loop import closed_loop
from .figure import Figure
from .paired import CONFIDENCE, PairsFile, Runs, centre
from .prompts import ChatCounter, cell_texts, prompt_rows, read_prompts, write_prompts
from .records import Record, write_records
from .report.machine import machine_facts
from .result_folder import Target

MIXING_CONCURRENCY = (4, 16, 32)
LOWER_TTFT_FROM = 16
"""Clients from which on the time to the first token is to be lower."""
OTHER_REPEATS = 2
"""Of cells that are only recorded: one client, and arrivals."""
ENGINE = "sparkinfer"


class Recording:
    """`folder` as a run with one block and as many repetitions as there are pairs. Raises FileExistsError."""

    def __init__(self, folder: Path, model: Path, counter: ChatCounter, document: dict[str, Any]) -> None:
        self.folder, self.model, self._counter, self._ids = folder, model, counter, all_ids(document)
        (folder / "servers").mkdir(parents=True)
        self._digests = engine_digest(), model_digest(model)

    def trace(self, rep: int) -> Path:
        """Where `eval/simulate.py` looks for the steps of a repetition."""
        return self.folder / "servers" / f"{ENGINE}-{self.model.name}-b1-r{rep}.steps.jsonl"

    def target(self, cell: Cell, rep: int) -> Target:
        """Identity and folder of one result."""
        out = self.folder / "b1" / ENGINE / self.model.name / cell.id / f"r{rep}"
        return Target(
            self.folder.name, 1, rep, ENGINE, sparkinfer.__version__, self._digests[0], self.model.name, self.model,
            out, self._digests[1],
        )  # fmt: skip

    def keep(self, cell: Cell, rep: int, records: list[Record]) -> None:
        """Write a closed loop's requests."""
        target = self.target(cell, rep)
        target.out.mkdir(parents=True)
        write_records(target.out / "records.jsonl", records)
        tool, now = {"name": "closed_loop", "version": TOOL_VERSION}, dt.datetime.now(dt.UTC)
        result = target.result(cell, prompts_sha256="", command=sys.argv, started_at=now, tool=tool)
        (target.out / "result.json").write_text(json.dumps(dataclasses.asdict(result)) + "\n", encoding="utf-8")

    def arrivals(self, cell: Cell, url: str, rep: int) -> None:
        """Measure an open-loop cell and keep it; every repetition sends the same. A machine too busy for it is told of
        on standard error."""
        prompts = write_prompts(self.model, self._counter, cell, 1, 1, self._ids, self.folder / "prompts")
        try:
            measure(url, self.model.name, cell, read_prompts(prompts), self.target(cell, rep), sys.argv)
        except gates.InvalidRun as error:
            print(f"not recorded: {error}", file=sys.stderr)


def mixing(options: argparse.Namespace) -> Iterator[Figure]:
    """Every closed-loop CPU cell with several requests, mixing on against off; all cells where they are recorded.

    Raises ConfigError for unknown cells, and what `launch.served` raises.
    """
    document = load_cells(options.cells)
    cells = resolve_cells(document, options.scale)
    named = options.mixing_cells
    unknown = [name for name in named or [] if name not in cells or cells[name].concurrency not in MIXING_CONCURRENCY]
    if unknown:
        raise ConfigError(f"--mixing-cells {' '.join(unknown)}: no closed-loop cell of several clients has that name")
    pairs = [cell for cell in cells.values() if cell.concurrency in MIXING_CONCURRENCY and cell.id in (named or cells)]
    alone = [cell for cell in cells.values() if cell.concurrency == 1]
    counter = ChatCounter(options.model)
    recording = Recording(options.record, options.model, counter, document) if options.record is not None else None
    wanted = pairs + (alone if recording is not None else [])
    rows = {
        cell.id: prompt_rows(cell, *cell_texts(counter, cell, 1, 1, number, len(wanted)), 1, 1)
        for number, cell in enumerate(wanted)
    }
    longest = max(cell.longest for cell in cells.values()) + 32
    kept = PairsFile(options.pairs, identity(options))
    begun = len(kept)  # a series that goes on alternates as one that was never broken off
    for repeat in range(options.repeats):
        turned = (begun + repeat) % 2 == 1
        trace = recording.trace(repeat + 1) if recording is not None else None
        with fresh_servers(options, longest, trace, turned) as urls:
            taken_now: dict[str, dict[str, tuple[float, float]]] = {}
            for number, cell in enumerate(pairs):
                runs: Runs = {"on": [], "off": []}
                for turn in range(options.rounds):
                    on_first = (turned + number + turn) % 2 == 1
                    taken = turns(cell, rows[cell.id], urls, options.model.name, on_first)
                    for name, records in taken.items():
                        ttft = metrics.percentile(metrics.ttft_ms(records), 50)
                        runs[name].append((metrics.output_tok_s(records), ttft))
                    if recording is not None and turn == 0:
                        recording.keep(cell, repeat + 1, taken["on"])
                taken_now[cell.id] = {name: middle(values) for name, values in runs.items()}
            kept.add(dt.datetime.now(dt.UTC).isoformat(timespec="seconds"), taken_now)
            if recording is not None and repeat < OTHER_REPEATS:
                for cell in alone:
                    only = turns(cell, rows[cell.id], {"on": urls["on"]}, options.model.name, False)
                    recording.keep(cell, repeat + 1, only["on"])
                for cell in (cell for cell in cells.values() if cell.kind == "poisson"):
                    recording.arrivals(cell, urls["on"], repeat + 1)
        print(f"pairs {repeat + 1} of {options.repeats} measured", file=sys.stderr, flush=True)
    bare = [cell.id for cell in pairs if not kept.of(cell.id)["on"]]
    if bare:
        raise ConfigError(f"{options.pairs} holds no pair of {', '.join(bare)} by this engine here: measure some first")
    for cell in pairs:
        yield from figures_of(cell, kept.of(cell.id), options.rounds)


def identity(options: argparse.Namespace) -> dict[str, Any]:
    """What pairs must share to be judged together."""
    machine = machine_facts()
    return {
        "engine_digest": engine_digest(),
        "model_digest": model_digest(options.model),
        "machine": f"{machine['cpu_model']}, {machine['cpus_usable']} CPUs",
        "device": options.device,
        "dtype": options.dtype,
        "scale": options.scale,
        "rounds": options.rounds,
    }


@contextmanager
def fresh_servers(
    options: argparse.Namespace, longest: int, trace: Path | None, on_first: bool
) -> Iterator[dict[str, str]]:
    """Both servers, started anew for each pair: two processes with the same settings differ for as long as they live,
    by where their memory happened to lie, and one start of each would compare that."""
    flags = ["--device", options.device, "--dtype", options.dtype, "--max-model-len", str(longest)]
    settings = {
        "on": {"SPARKINFER_LOG_LEVEL": "warning"},
        "off": {"SPARKINFER_LOG_LEVEL": "warning", "SPARKINFER_MIXED_CHUNK": "0"},
    }
    with ExitStack() as stack:
        if trace is not None:  # both servers bear its cost
            unread = stack.enter_context(tempfile.TemporaryDirectory())
            settings["on"]["SPARKINFER_STEP_TRACE"] = str(trace.absolute())
            settings["off"]["SPARKINFER_STEP_TRACE"] = str(Path(unread, "off.steps.jsonl"))
        names = ("on", "off") if on_first else ("off", "on")
        yield {name: stack.enter_context(launch.served(options.model, flags, settings[name])) for name in names}


def turns(
    cell: Cell, rows: list[dict[str, Any]], urls: dict[str, str], model: str, on_first: bool
) -> dict[str, list[Record]]:
    """One run of a cell on each server, one after the other: its measured requests by the server's name.

    They begin together, when the warm-up requests have ended.
    """
    assert cell.concurrency is not None
    phases = [[row for row in rows if (row["phase"] == "profiling") is measured] for measured in (False, True)]
    found = {}
    for name in sorted(urls, key=lambda name: (name == "on") is not on_first):
        server_probe.reset_prefix_cache(urls[name])
        for part in filter(None, phases):
            found[name] = closed_loop(urls[name], model, part, cell.concurrency)
    return found


def middle(runs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The median of each figure over the runs of a cell on one server."""
    rates, ttfts = zip(*runs, strict=True)
    return statistics.median(rates), statistics.median(ttfts)


def figures_of(cell: Cell, measured: Runs, rounds: int = 1) -> list[Figure]:
    """Centres of the ratios by pair, with their intervals."""
    assert cell.concurrency is not None
    pairs = list(zip(measured["on"], measured["off"], strict=True))
    medians = {name: [statistics.median(v[i] for v in values) for i in (0, 1)] for name, values in measured.items()}
    found = []
    for i, (what, unit, better) in enumerate((("output tok/s", "tok/s", "above"), ("TTFT p50", "ms", "below"))):
        ratios = [on[i] / off[i] for on, off in pairs]
        value, low, high = centre(ratios)
        each = f" of {rounds} runs each" if rounds > 1 else ""
        note = (
            f"Hodges-Lehmann estimate of {len(pairs)} pairs{each}, {CONFIDENCE:.0%} interval {low:.3f}..{high:.3f}, "
            f"pairs {min(ratios):.3f}..{max(ratios):.3f}; on {medians['on'][i]:.0f}, off {medians['off'][i]:.0f} {unit}"
        )
        goal = 1.0 if better == "above" or cell.concurrency >= LOWER_TTFT_FROM else None
        found.append(Figure("mixing", f"{cell.id}: {what}, on / off", value, "x", goal, better, note, (low, high)))
    return found
