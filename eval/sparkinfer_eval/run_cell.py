"""Command line of eval/run_cell.py, and the options it shares with eval/spec_open_arrivals.py."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from types import FrameType

from sparkinfer.console import command_line
from sparkinfer.errors import ConfigError, SparkinferError

from . import metrics
from .aiperf import Load, measure
from .cells import Cell, load_cells, resolve_cells
from .prompts import read_prompts
from .records import Record, read_records
from .result_folder import Target
from .server_probe import require_url


def add_target_options(parser: argparse.ArgumentParser, required: bool) -> None:
    """Options that say what is measured and where the result goes."""
    group = parser.add_argument_group("result folder")
    for name, text in (
        ("run", "run name"),
        ("engine", "engine id, as in results/<run>/b<block>/<engine>/"),
        ("engine-version", "version that the running server reports"),
        ("engine-digest", "identity digest of the engine"),
        ("model-name", "model id, as in the result path"),
    ):
        group.add_argument(f"--{name}", required=required, help=text)
    group.add_argument("--block", type=int, default=1)
    group.add_argument("--rep", type=int, default=1)
    group.add_argument("--out", type=Path, required=required, help="final result folder, .../r<rep>")


def add_cell_options(parser: argparse.ArgumentParser, root: Path, required: bool) -> None:
    """Options that name a cell and its prompts."""
    group = parser.add_argument_group("cell")
    group.add_argument("--cells", type=Path, default=root / "config" / "cells.yaml")
    group.add_argument("--scale", required=required, help="scale of the cells file (full, cpu, smoke)")
    group.add_argument("--overrides", default="{}", help="JSON object of changes to the scale")
    group.add_argument("--cell", required=required, help="cell id, e.g. chat-c4")
    group.add_argument("--prompts", type=Path, required=required, help="the cell's JSONL from eval/make_prompts.py")


def target_from(options: argparse.Namespace) -> Target:
    """The `Target` that the options describe."""
    return Target(
        run=options.run,
        block=options.block,
        rep=options.rep,
        engine=options.engine,
        engine_version=options.engine_version,
        engine_digest=options.engine_digest,
        model_name=options.model_name,
        model=options.model,
        out=options.out,
    )


def cell_from(options: argparse.Namespace) -> Cell:
    """The resolved cell that the options name. Raises ConfigError when the scale does not run it."""
    try:
        overrides = json.loads(options.overrides)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--overrides is not JSON: {error}") from error
    cells = resolve_cells(load_cells(options.cells), options.scale, overrides)
    if options.cell not in cells:
        raise ConfigError(f"scale {options.scale} has no cell {options.cell}; it has {', '.join(cells)}")
    return cells[options.cell]


def end_on_sigterm() -> None:
    """Let SIGTERM unwind the stack, so that the load generator is stopped and the evidence kept."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)


def print_figures(records: list[Record]) -> None:
    """The main figures of a result, one a line."""
    for value in metrics.summarise(records):
        mark = "" if value.supported else f"  (from {value.n} requests only)"
        print(f"{value.metric:>20s} {value.stat:>5s} {value.value:12.2f} {value.unit}{mark}")


@command_line
def main(root: Path, arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure one closed-loop cell with AIPerf.")
    parser.add_argument("--url", required=True, help="base URL of the running server")
    parser.add_argument("--served-name", help="model name the server answers to (default: --model-name)")
    parser.add_argument("--model", type=Path, required=True, help="model folder (tokenizer, digest)")
    parser.add_argument("--seed", type=int, default=0, help="seed handed to AIPerf")
    default = root / ".venvs" / "aiperf" / "bin" / "aiperf"
    parser.add_argument("--aiperf", type=Path, default=default, help="AIPerf executable")
    add_cell_options(parser, root, required=True)
    add_target_options(parser, required=True)
    options = parser.parse_args(arguments)
    end_on_sigterm()
    try:
        require_url(options.url)
        load = Load(
            url=options.url,
            served_name=options.served_name or options.model_name,
            model=options.model,
            cell=cell_from(options),
            prompts=read_prompts(options.prompts),
            seed=options.seed,
            executable=options.aiperf,
        )
        measure(load, target_from(options))
    except SparkinferError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print_figures(read_records(options.out / "records.jsonl"))
    return 0
