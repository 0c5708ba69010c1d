"""Command line of eval/simulate.py."""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sparkinfer
from sparkinfer.arguments import path
from sparkinfer.console import command_line
from sparkinfer.errors import ConfigError, SparkinferError
from sparkinfer.output import require_file, require_folder, write_text
from sparkinfer.scheduling.config import SchedulerConfig

from ..cells import load_cells, resolve_cells
from ..report.machine import machine_facts, source_facts
from ..rows_json import rows_json
from . import compare
from .cost import Costs, Host, fit, load, save
from .measured import Recorded, fit_cells, fit_run, read_runs
from .replay import simulate
from .steps import read_trace
from .workload import Workload, of_cell, of_records, read_requests

COLUMNS = (
    ("output_tok_s", "value", "output tok/s"),
    ("requests_s", "value", "requests/s"),
    ("ttft_ms", "p50", "TTFT p50 ms"),
    ("ttft_ms", "p90", "TTFT p90 ms"),
    ("itl_ms", "p50", "ITL p50 ms"),
    ("itl_ms", "p90", "ITL p90 ms"),
    ("request_latency_ms", "p50", "latency p50 ms"),
)  # fmt: skip
REAL_ROUNDS = 11
"""Simulations of each policy that only time passes, where these are executed; those shown are one more."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="simulate.py", description="Replay load through the real scheduler, without a GPU."
    )
    costs = top.add_argument_group("costs, one of")
    costs.add_argument(
        "--run", type=path, nargs="+", metavar="FOLDER",
        help="recorded runs, results/<run>, each one more repetition of the cells: fit, predict, compare",
    )  # fmt: skip
    costs.add_argument("--steps", type=Path, nargs="+", metavar="FILE", help="step traces of a server")
    costs.add_argument("--costs", type=Path, metavar="FILE", help="a cost model that --save wrote")
    load_ = top.add_argument_group("load, unless --run's own")
    load_.add_argument("--cell", nargs="+", default=[], metavar="ID", help="cells of the cells file")
    load_.add_argument("--scale", default="cpu", help="scale of the cells file (default %(default)s)")
    load_.add_argument("--cells", type=Path, default=Path("config/cells.yaml"), help="default %(default)s")
    load_.add_argument("--requests", type=Path, metavar="FILE", help="JSONL trace, see docs/simulator.md")
    load_.add_argument("--concurrency", type=int, default=0, help="send the trace as a closed loop")
    top.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE[,...]", dest="policies",
        help="a policy: settings of the scheduler (mixed_chunk=0); once for each policy to compare",
    )  # fmt: skip
    top.add_argument(
        "--real", type=Path, metavar="MODEL",
        help="execute the passes with this model on the CPU, each timed by its least CPU time",
    )  # fmt: skip
    top.add_argument(
        "--fit-cells", nargs="+", metavar="PATTERN",
        help="fit on these cells of the run (default: predict each cell from all others)",
    )  # fmt: skip
    top.add_argument("--engine", default="sparkinfer", help="engine of the run (default %(default)s)")
    top.add_argument("--model", help="model of the run, where it has several")
    top.add_argument("--out", type=Path, metavar="FOLDER", help="write table, JSON and plot there")
    top.add_argument("--save", type=Path, metavar="FILE", help="write the fitted cost model there")
    return top


NOT_REPLAYED = ("drafter_loaded", "spec_load_limit", "draft_tokens", "max_in_flight")
"""Settings that a replay does not follow: it drafts nothing, and a step ends before the next one begins."""


def policy(text: str, base: SchedulerConfig) -> SchedulerConfig:
    """`name=value,...` laid over the settings. Raises ConfigError on an unknown name, a bad value, a contradiction.

    As at a server's start, `backlog_chunk` is off where `mixed_chunk` leaves it no room, unless it is named.
    """
    fields = {field.name: field for field in dataclasses.fields(SchedulerConfig) if field.name not in NOT_REPLAYED}
    changes: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if not equals or name not in fields:
            raise ConfigError(f"--set {item}: give NAME=VALUE with a setting of the scheduler: {', '.join(fields)}")
        kind = type(getattr(base, name))
        try:
            changes[name] = bool(int(value)) if kind is bool else kind(value)
        except ValueError:
            raise ConfigError(f"--set {item}: {value!r} is not a value of {name} ({kind.__name__})") from None
    if "mixed_chunk" in changes and not 0 < 2 * changes["mixed_chunk"] < base.backlog_chunk:
        changes.setdefault("backlog_chunk", 0)
    config = dataclasses.replace(base, **changes)
    config.validate()
    return config


def workloads(options: argparse.Namespace, recorded: Recorded | None) -> list[Workload]:
    """What to replay. Raises ConfigError when nothing is named."""
    found: list[Workload] = []
    if options.requests is not None:
        found.append(read_requests(options.requests, options.concurrency))
    if options.cell:
        cells = resolve_cells(load_cells(options.cells), options.scale)
        for name in options.cell:
            if name not in cells:
                raise ConfigError(f"scale {options.scale} has no cell {name}; it has {', '.join(cells)}")
            found.append(of_cell(cells[name]))
    if not found and recorded is not None:
        found = [of_records(one.cell, one.records) for one in recorded.cells]
    if not found:
        raise ConfigError("nothing to replay: give --run, --cell or --requests")
    return found


def costs_of(options: argparse.Namespace) -> tuple[Costs, Recorded | None, list[compare.Point]]:
    """The cost model, and where it comes from a run, the run and its predictions."""
    given = [name for name in ("run", "steps", "costs") if getattr(options, name) is not None]
    if len(given) != 1:
        raise ConfigError("give exactly one of --run, --steps and --costs: where the costs of a step come from")
    if options.costs is not None:
        return load(options.costs), None, []
    if options.steps is not None:
        traces = [read_trace(file) for file in options.steps]
        about = {**traces[0].about, "files": [file.name for file in options.steps]}
        return fit([trace.steps for trace in traces], Host(), traces[0].scheduler, about), None, []
    recorded = read_runs(options.run, options.engine, options.model)
    if options.fit_cells is None:
        return fit_cells(recorded, recorded.cells), recorded, compare.predict_each(recorded)
    costs, seen = fit_run(recorded, options.fit_cells)
    return costs, recorded, compare.predict(recorded, costs, seen)


def with_real_passes(model: Path, costs: Costs) -> Costs:
    """The costs with passes executed by a model. Raises SparkinferError when it cannot be loaded."""
    from .real import RealCosts, RealPasses

    passes = RealPasses(model, costs.scheduler, str(costs.about.get("dtype", "bfloat16")))
    return RealCosts.of(costs, passes)


def row(workload: Workload, config: SchedulerConfig, costs: Costs, real: bool) -> list[str]:
    """The figures of one load under one policy as text."""
    found, outcome = compare.simulated(workload, config, costs, real)
    figures = [f"{found[m, s]:.1f}" if (m, s) in found else "-" for m, s, _ in COLUMNS]
    return [*figures, str(outcome.stats.steps), f"{outcome.mean_decode_rows:.1f}", str(outcome.stats.preemptions)]


def policies_table(loads: Sequence[Workload], costs: Costs, policies: Sequence[str], real: bool = False) -> str:
    """Every load under every policy, side by side, as a markdown table."""
    names = [*(title for _, _, title in COLUMNS), "steps", "decode rows", "preemptions"]
    lines = ["| load | policy | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for workload in loads:
        # All policies first time their passes, in turn, so that none has the advantage of the times of those before it.
        for number in range(REAL_ROUNDS if real else 0):
            costs.next_round(first=number == 0)
            for text in policies:
                simulate(workload, policy(text, costs.scheduler), costs)
        for text in policies:
            figures = row(workload, policy(text, costs.scheduler), costs, real)
            lines.append(f"| {workload.name} | {text or 'as recorded'} | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def origin_of(arguments: Sequence[str]) -> dict[str, Any]:
    """When, where, by which source and command the simulation was made."""
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "eval/simulate.py", *arguments]),
        "cpu_model": machine_facts().get("cpu_model"),
        "cpus": os.cpu_count(),
        "source": source_facts(Path(__file__).resolve().parents[3]),
        "versions": {"sparkinfer": sparkinfer.__version__, "python": platform.python_version()},
    }


def described(origin: dict[str, Any]) -> str:
    """An origin as one line."""
    versions, source = origin["versions"], origin["source"]
    commit = f"commit {str(source['commit'])[:12]}{' with changes' if source['dirty'] else ''}"
    return (
        f"Simulated {origin['date']} on {origin['cpu_model'] or 'an unnamed CPU'}, {origin['cpus']} CPUs, by "
        f"sparkinfer {versions['sparkinfer']} ({commit}), Python {versions['python']}: `{origin['command']}`"
    )


def write_out(
    folder: Path,
    text: str,
    origin: dict[str, Any],
    costs: Costs,
    recorded: Recorded | None,
    points: list[compare.Point],
) -> None:
    """Table, JSON and plot. Raises EnvironmentProblem."""
    document = {
        "schema": "sparkinfer/simulation/v1",
        "origin": origin,
        "fitted_on": costs.about,
        "band": compare.BAND,
        "points": [{**dataclasses.asdict(p), "error": p.error, "inside": p.inside} for p in points],
    }
    for name, content in (("simulation.md", text), ("simulation.json", rows_json(document))):
        write_text(folder / name, content)
    if recorded is not None and points:
        seen = len({point.cell for point in points if point.fitted})
        how = f"cost model fitted on {seen} of the cells" if seen else "each cell from a cost model of the others"
        title = f"{recorded.run}\n{recorded.model}: simulated against measured, {how}"
        compare.plot(points, title, folder / "simulation")


@command_line
def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, 2 bad input, 3 environment."""
    options = parser().parse_args(arguments)
    try:
        if options.out is not None:
            require_folder(options.out, "--out")
        if options.save is not None:
            require_file(options.save, "--save", make_folder=True)
        begin = time.perf_counter()
        costs, recorded, points = costs_of(options)
        # Before anything is written: what is written may lie in the checkout.
        origin = origin_of(sys.argv[1:] if arguments is None else arguments)
        parts = [
            "# Simulation",
            "",
            described(origin),
            "",
            "Fitted on: " + json.dumps(costs.about),
            "",
            "```",
            costs.describe(),
            "```",
            "",
        ]
        if recorded is not None:
            parts += [compare.table(points), "", compare.verdict(points), ""]
            parts += ["Passes, predicted over measured: " + compare.pass_errors(costs, recorded), ""]
        if options.policies or options.cell or options.requests:
            loads = workloads(options, recorded)
            priced = with_real_passes(options.real, costs) if options.real is not None else costs
            parts += [policies_table(loads, priced, options.policies or [""], options.real is not None), ""]
        text = "\n".join(parts)
        print(text)
        print(f"simulated in {time.perf_counter() - begin:.1f} s")
        if options.save is not None:
            save(costs, options.save)
        if options.out is not None:
            write_out(options.out, text, origin, costs, recorded, points)
    except (SparkinferError, ValueError) as error:
        print(f"simulate.py: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, SparkinferError) else ConfigError.exit_code
    return 0
