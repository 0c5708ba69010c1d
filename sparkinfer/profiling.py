"""`sparkinfer profile MODEL`: where the time of a step goes: a trace, and a table of time by kernel.

The steps are those of `sparkinfer bench`: requests that decode at a given context, and prompts computed in one pass. On
a GPU the table counts what ran on the device; `busy` is the kernels' sum over the steps' wall time, so what is missing
to 1 is gaps between kernels and waits for the host. On a CPU it counts operators by their own time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

import sparkinfer
from sparkinfer.bench import add_load_options, check_options, open_for, parse_prompts
from sparkinfer.errors import ConfigError
from sparkinfer.output import require_folder, write_text

SCHEMA = "sparkinfer/profile/v1"
WARM_STEPS = 4


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel's (or operator's) part of a step."""

    name: str
    calls: float
    """Per step."""
    ms: float
    """Milliseconds per step."""
    share: float
    """Of all kernels' time."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of step."""

    step: str
    wall_ms: float
    """Of a step, the profiler's own cost included."""
    busy: float
    """Kernel time as a share of the wall time."""
    rows: list[KernelRow]


def _own_time(event: Any, gpu: bool) -> float:
    """Microseconds."""
    return float(event.self_device_time_total if gpu else event.self_cpu_time_total)


def profile_steps(name: str, run: Callable[[], object], steps: int, gpu: bool, trace: Path | None) -> Profile:
    """Profile `run`, which does `steps` steps."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities) as recorded:
        started = time.perf_counter()
        run()
        if gpu:
            torch.cuda.synchronize()
        wall = time.perf_counter() - started
    if trace is not None:
        recorded.export_chrome_trace(str(trace))
    events = recorded.key_averages()
    if gpu:
        events = [event for event in events if event.device_type == DeviceType.CUDA]
    total = sum(_own_time(event, gpu) for event in events)
    rows = [
        KernelRow(event.key, event.count / steps, _own_time(event, gpu) / 1e3 / steps, _own_time(event, gpu) / total)
        for event in events
        if _own_time(event, gpu) > 0
    ]
    rows.sort(key=lambda row: -row.ms)
    return Profile(name, wall * 1e3 / steps, total / 1e6 / wall, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparkinfer profile", description=__doc__.splitlines()[0] if __doc__ else None
    )
    add_load_options(parser)
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 32], metavar="N", help="requests that decode")
    parser.add_argument("--context", type=int, default=1200, help="their context length (default %(default)s)")
    parser.add_argument(
        "--prefill", type=parse_prompts, default=parse_prompts("1024"), metavar="N,KxN", help="prompts of a pass"
    )
    parser.add_argument("--steps", type=int, default=10, help="decode steps profiled (default %(default)s)")
    parser.add_argument("--rows", type=int, default=25, help="lines of each table (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default %(default)s)")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write a Chrome trace of each kind of step there")
    parser.add_argument("--json", type=Path, metavar="F", help="write the tables there too")
    return parser


def _print(found: Profile, most: int) -> None:
    print(f"\n{found.step}: {found.wall_ms:.3f} ms a step, busy {found.busy:.0%}")
    print(f"{'ms':>9} {'share':>6} {'calls':>7} {'us each':>8}  kernel")
    for row in found.rows[:most]:
        each = row.ms * 1e3 / row.calls
        print(f"{row.ms:9.4f} {row.share:6.1%} {row.calls:7.1f} {each:8.2f}  {row.name[:90]}")
    rest = found.rows[most:]
    if rest:
        print(f"{sum(row.ms for row in rest):9.4f} {sum(row.share for row in rest):6.1%}          {len(rest)} more")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. Prints the tables; returns 0. Raises SparkinferError for bad input."""
    options = _parser().parse_args(arguments)
    check_options(options, {"steps": 1, "context": 1, "rows": 0})
    if min(options.decode, default=1) < 1:
        raise ConfigError(f"--decode {min(options.decode)}: a step decodes at least one request")
    if options.trace is not None:
        require_folder(options.trace, "--trace")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    gpu = options.device != "cpu"
    if options.trace is not None:
        options.trace.mkdir(parents=True, exist_ok=True)
    decode_steps = options.steps + 2 * WARM_STEPS
    longest = max([length for _, length in options.prefill] + [options.context + decode_steps + 1])
    sequences = max([*options.decode, *(count for count, _ in options.prefill)])
    _, load = open_for(options, sequences, longest)

    def trace(name: str) -> Path | None:
        return None if options.trace is None else options.trace / f"{name}.json"

    found = []
    for count in options.decode:
        requests = load.requests(count, options.context)
        load.run(requests, decode=False)
        load.decode_steps(requests, WARM_STEPS)
        name, steps = f"decode-{count}", options.steps
        found.append(profile_steps(name, lambda r=requests, n=steps: load.decode_steps(r, n), steps, gpu, trace(name)))  # type: ignore[misc]
        _print(found[-1], options.rows)
    for count, length in options.prefill:
        load.run(load.requests(count, length), decode=False)
        requests, name = load.requests(count, length), f"prefill-{count}x{length}"
        found.append(profile_steps(name, lambda r=requests: load.run(r, decode=False), 1, gpu, trace(name)))  # type: ignore[misc]
        _print(found[-1], options.rows)
    if options.json is not None:
        document = {
            "schema": SCHEMA,
            "version": sparkinfer.__version__,
            "model": options.model.name,
            "device": torch.cuda.get_device_name() if gpu else "cpu",
            "torch": torch.__version__,
            "steps": [asdict(each) for each in found],
        }
        write_text(options.json, json.dumps(document, indent=1) + "\n")
    return 0
