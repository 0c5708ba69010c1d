"""Mixed steps on against off: the CPU cells over HTTP, both servers up, pairs of runs in alternating order.

With `--record` the requests and steps of the server with mixing on are kept in the form of a run, so that
`eval/simulate.py --run` can be held against several repetitions of every cell.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
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
from .prompts import ChatCounter, cell_texts, prompt_rows, read_prompts, write_prompts
from .records import Record, write_records
from .result_folder import Target

MIXING_CONCURRENCY = (4, 16, 32)
LOST = 0.02
"""Throughput that mixing may seem to lose: an allowance for noise. The notes show the range of the pairs."""
ENGINE = "sparkinfer"


class Recording:
    """`folder` as a run with one block and as many repetitions as there are pairs. Raises ConfigError if it exists."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        (folder / "servers").mkdir(parents=True)
        self._digests = engine_digest(), model_digest(model)

    def trace(self, rep: int) -> Path:
        """Where `eval/simulate.py` looks for the steps of a repetition; all repetitions have the same server."""
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

    def arrivals(self, cell: Cell, url: str, counter: ChatCounter, document: dict[str, Any]) -> None:
        """Measure an open-loop cell and keep it. A machine too busy for it is told of on standard error."""
        prompts = write_prompts(self.model, counter, cell, 1, 1, all_ids(document), self.folder / "prompts")
        try:
            measure(url, self.model.name, cell, read_prompts(prompts), self.target(cell, 1), sys.argv)
        except gates.InvalidRun as error:
            print(f"not recorded: {error}", file=sys.stderr)

    def close(self, reps: int) -> None:
        """The one trace under the names of all repetitions."""
        for rep in range(2, reps + 1):
            os.link(self.trace(1), self.trace(rep))


def mixing(options: argparse.Namespace) -> Iterator[Figure]:
    """Every closed-loop CPU cell with several requests, mixing on against off; all cells where they are recorded."""
    document = load_cells(options.cells)
    cells = resolve_cells(document, options.scale)
    named = options.mixing_cells
    unknown = [name for name in named or [] if name not in cells or cells[name].concurrency not in MIXING_CONCURRENCY]
    if unknown:
        raise ConfigError(f"--mixing-cells {' '.join(unknown)}: no closed-loop cell of several clients has that name")
    pairs = [cell for cell in cells.values() if cell.concurrency in MIXING_CONCURRENCY and cell.id in (named or cells)]
    alone = [cell for cell in cells.values() if cell.concurrency == 1]
    counter = ChatCounter(options.model)
    recording = Recording(options.record, options.model) if options.record is not None else None
    longest = max(cell.longest for cell in cells.values()) + 32
    flags = ["--device", options.device, "--dtype", options.dtype, "--max-model-len", str(longest)]
    quiet = {"SPARKINFER_LOG_LEVEL": "warning"}
    on, off = dict(quiet), {**quiet, "SPARKINFER_MIXED_CHUNK": "0"}
    with ExitStack() as stack:
        if recording is not None:  # both servers bear the cost of the trace
            on["SPARKINFER_STEP_TRACE"] = str(recording.trace(1).absolute())
            unread = stack.enter_context(tempfile.TemporaryDirectory())
            off["SPARKINFER_STEP_TRACE"] = str(Path(unread, "off.steps.jsonl"))
        urls = {
            "on": stack.enter_context(launch.served(options.model, flags, on)),
            "off": stack.enter_context(launch.served(options.model, flags, off)),
        }
        wanted = pairs + (alone if recording is not None else [])
        for number, cell in enumerate(wanted):
            rows = prompt_rows(cell, *cell_texts(counter, cell, 1, 1, number, len(wanted)), 1, 1)
            yield from mixing_cell(cell, rows, urls, options, recording)
        if recording is not None:
            for cell in (cell for cell in cells.values() if cell.kind == "poisson"):
                recording.arrivals(cell, urls["on"], counter, document)
    if recording is not None:
        recording.close(options.repeats)


def mixing_cell(
    cell: Cell,
    rows: list[dict[str, Any]],
    urls: dict[str, str],
    options: argparse.Namespace,
    recording: Recording | None = None,
) -> list[Figure]:
    """One cell: pairs of runs in alternating order, ratios by pair. Of a cell with one client only "on" is run."""
    assert cell.concurrency is not None
    several = cell.concurrency > 1
    measured: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    for repeat in range(options.repeats):
        for name in ("on", "off") if repeat % 2 else ("off", "on"):
            if name == "off" and not several:
                continue
            server_probe.reset_prefix_cache(urls[name])
            part = [row for row in rows if row["phase"] == "profiling" or repeat == 0]
            records = closed_loop(urls[name], options.model.name, part, cell.concurrency)
            records = [record for record in records if record.phase == "profiling"]
            ttft = metrics.percentile(metrics.ttft_ms(records), 50)
            measured[name].append((metrics.output_tok_s(records), ttft))
            if recording is not None and name == "on":
                recording.keep(cell, repeat + 1, records)
    return _figures(cell, measured) if several else []


def _figures(cell: Cell, measured: dict[str, list[tuple[float, float]]]) -> list[Figure]:
    assert cell.concurrency is not None
    pairs = list(zip(measured["on"], measured["off"], strict=True))
    speed = [on[0] / off[0] for on, off in pairs]
    wait = [on[1] / off[1] for on, off in pairs]
    medians = {name: [statistics.median(v[i] for v in values) for i in (0, 1)] for name, values in measured.items()}
    note = (
        f"on {medians['on'][0]:.0f} tok/s, TTFT p50 {medians['on'][1]:.0f} ms; "
        f"off {medians['off'][0]:.0f} tok/s, {medians['off'][1]:.0f} ms; median of {len(pairs)} pairs, "
        f"ratios {min(speed):.3f}..{max(speed):.3f} and {min(wait):.3f}..{max(wait):.3f}"
    )
    few = cell.concurrency < 16
    return [
        Figure("mixing", f"{cell.id}: output tok/s, on / off", statistics.median(speed), "x", 1 - LOST, "above", note),
        Figure("mixing", f"{cell.id}: TTFT p50, on / off", statistics.median(wait), "x", None if few else 1.0, "below"),
    ]
