"""Where a run's time went: the steps of every cell (a server's own trace) against the floor of the card.

A cell's floor here is that of the passes that were run: it says what faster kernels could gain, not what another
schedule could.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkinfer.console import command_line
from sparkinfer.errors import ConfigError, SparkinferError
from sparkinfer.models.config import load_config
from sparkinfer.output import require_file, write_text
from sparkinfer_eval.floor import WEIGHT_BYTES, Floor, Machine, Recipe, Work
from sparkinfer_eval.simulate.steps import Step, read_trace

KINDS = ("decode", "prompt", "mixed")


@dataclass(frozen=True, slots=True)
class Window:
    """The measured part of a cell: seconds since 1970, and tokens that it gave."""

    cell: str
    begin_s: float
    end_s: float
    tokens: int


@dataclass(slots=True)
class Part:
    """Passes of one kind in a cell."""

    steps: int = 0
    busy_s: float = 0.0
    floor_s: float = 0.0


@dataclass(slots=True)
class Breakdown:
    """A cell's time by kind of pass, and the time in which no pass ran."""

    window: Window
    parts: dict[str, Part]
    idle_s: float

    @property
    def floor_s(self) -> float:
        """Of all its passes."""
        return sum(part.floor_s for part in self.parts.values())


def work_of(line: dict[str, Any]) -> Work:
    """What a line of the trace says of its pass."""
    prompts = line.get("p", [])
    decode, context = line["d"], line["dc"]
    tokens = decode + sum(length for _, length, _ in prompts)
    pairs = context + decode + sum(length * start + length * (length + 1) // 2 for start, length, _ in prompts)
    return Work(tokens, decode + len(prompts), context + sum(start for start, _, _ in prompts), pairs, line["n"])


def kind_of(line: dict[str, Any]) -> str:
    """`decode`, `prompt` or `mixed`."""
    return KINDS[0] if not line.get("p") else KINDS[2] if line["d"] else KINDS[1]


def breakdown(window: Window, steps: Iterable[Step], floor: Floor) -> Breakdown:
    """Charge every pass from the end of the one before it: a step launched ahead waits for it on the device."""
    parts = {kind: Part() for kind in KINDS}
    clock, idle = window.begin_s, 0.0
    for step in sorted(steps, key=lambda step: step.end_s):
        if not window.begin_s <= step.wall_s <= window.end_s:
            continue
        idle += max(0.0, step.wall_s - clock)
        part = parts[kind_of(step.line)]
        part.steps += 1
        part.busy_s += step.end_s - max(clock, step.wall_s)
        part.floor_s += floor.seconds(work_of(step.line))
        clock = step.end_s
    return Breakdown(window, parts, idle + max(0.0, window.end_s - clock))


def windows(report: Path, engine: str) -> list[Window]:
    """The measured parts of all cells of one engine. Raises ConfigError when the report has none."""
    from sparkinfer_eval import parquet  # needs pyarrow, which an engine's own environment lacks

    cells: dict[tuple[str, int, int], list[tuple[int, int, int]]] = {}
    for facts, record in parquet.records(parquet.read(report / "requests.parquet")):
        if facts["engine"] == engine and record.phase == "profiling":
            key = (facts["cell"], facts["block"], facts["rep"])
            cells.setdefault(key, []).append((record.start_ns, record.end_ns, record.output_tokens or 0))
    if not cells:
        raise ConfigError(f"{report} holds no request of engine {engine}: name one of its engines")
    return [
        Window(cell, min(r[0] for r in rows) / 1e9, max(r[1] for r in rows) / 1e9, sum(r[2] for r in rows))
        for (cell, _, _), rows in sorted(cells.items())
    ]


def markdown(found: Sequence[Breakdown]) -> list[str]:
    """One table row a cell."""
    lines = [
        "| cell | output tok/s | of the passes' floor | share | decode s / floor | prompt s / floor | mixed s / floor"
        " | no pass s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        window = one.window
        rate = window.tokens / (window.end_s - window.begin_s)
        parts = " | ".join(
            f"{part.busy_s:.2f} / {part.floor_s:.2f} ({part.steps})" if part.steps else ""
            for part in one.parts.values()
        )
        best = window.tokens / one.floor_s
        lines.append(f"| {window.cell} | {rate:.0f} | {best:.0f} | {rate / best:.2f} | {parts} | {one.idle_s:.2f} |")
    return lines


def as_json(one: Breakdown) -> dict[str, Any]:
    """A cell's figures as `--json` keeps them."""
    return {
        "cell": one.window.cell,
        "tokens": one.window.tokens,
        "seconds": one.window.end_s - one.window.begin_s,
        "idle_s": one.idle_s,
        "parts": {k: {"steps": p.steps, "busy_s": p.busy_s, "floor_s": p.floor_s} for k, p in one.parts.items()},
    }


PACKED = {".gz": gzip.decompress, ".xz": lzma.decompress}


def _steps(path: Path) -> list[Step]:
    unpack = PACKED.get(path.suffix)
    if unpack is None:
        return read_trace(path).steps
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / path.stem
        try:
            plain.write_bytes(unpack(path.read_bytes()))
        except (OSError, EOFError, lzma.LZMAError) as error:
            raise ConfigError(f"{path} cannot be unpacked: {error}") from error
        return read_trace(plain).steps


@command_line
def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 printed, 2 bad input."""
    parser = argparse.ArgumentParser(prog="step_breakdown.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path, help="reports/<run>")
    parser.add_argument("trace", type=Path, help="what the server wrote under SPARKINFER_STEP_TRACE, or its .gz or .xz")
    parser.add_argument("--config", type=Path, required=True, help="folder with the model's config.json")
    parser.add_argument("--engine", default="sparkinfer", help="engine of the report (default %(default)s)")
    parser.add_argument("--weights", choices=WEIGHT_BYTES, default="nvfp4", help="default %(default)s")
    for name, default in (("head", 2.0), ("kv", 2.0), ("state", 4.0)):
        parser.add_argument(f"--{name}-bytes", type=float, default=default, help="of an element (default %(default)s)")
    parser.add_argument("--bytes-s", type=float, default=4.3e12, help="copy rate of the card (default %(default)s)")
    parser.add_argument(
        "--operations-s", type=float, default=794e12, help="of its matrix products (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args(arguments)
    try:
        if options.json is not None:
            require_file(options.json, "--json")
        recipe = Recipe(WEIGHT_BYTES[options.weights], options.head_bytes, options.kv_bytes, options.state_bytes)
        floor = Floor(load_config(options.config), recipe, Machine(options.bytes_s, options.operations_s))
        steps = _steps(options.trace)
        found = [breakdown(window, steps, floor) for window in windows(options.report, options.engine)]
        found = [one for one in found if one.floor_s]
        if not found:
            raise ConfigError("the trace holds no step of these cells: name that run's own trace")
        print(*markdown(found), sep="\n")
        if options.json is not None:
            write_text(options.json, json.dumps([as_json(one) for one in found], indent=1) + "\n")
    except SparkinferError as error:
        print(f"step_breakdown.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0
