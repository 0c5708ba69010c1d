"""A record of every step, for the simulator: what the pass held and how long it took, one JSON line each.

The first line of a start is a header with the scheduler's settings; a file that exists is continued, so that the steps
of servers that follow one another stand in one file, each start behind its header. Times are seconds of the monotonic
clock; `epoch` in the header is what to add to get the wall clock.

A step's line: `t` start, `s` seconds of the pass (plan taken to tokens on the host), `d` decode rows, `dc` sum of their
positions, `p` prompt chunks as [start, length, microseconds since the request arrived (its first chunk) or -1],
`v` rows with drafts as [start, length], `r` restored snapshots, `c` snapshots written, `m` KV blocks moved, `n` rows
that sample, `g` how many of them not greedily, `l` how many with log-probabilities.
"""

from __future__ import annotations

import atexit
import dataclasses
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sparkinfer.errors import ConfigError
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.types import StepPlan, StepResult

if TYPE_CHECKING:
    from sparkinfer.engine.core import OverlapRunner, Runner

SCHEMA = "sparkinfer/step-trace/v1"
FLUSH_S = 1.0
BUFFER_BYTES = 1 << 16


def step_line(plan: StepPlan, begin_s: float, seconds: float) -> dict[str, Any]:
    """What the trace keeps of a step (see the module)."""
    decode, context = len(plan.decode), int(plan.decode.starts.sum())
    saved = sum(len(saves) for saves in plan.decode.checkpoints.values())
    restored = 0
    sampling = [request.sampling for request in plan.decode.requests]
    verify = [(row.start, row.length) for row in plan.verify]
    saved += sum(len(row.checkpoints) for row in plan.verify)
    sampling += [row.request.sampling for row in plan.verify]
    prompts: list[tuple[int, int, int]] = []
    for row in plan.prefill:
        saved += len(row.checkpoints)
        first = row.restore is not None or row.start == 0
        age = round((begin_s - row.request.arrival_s) * 1e6) if first and row.output_index == 0 else -1
        prompts.append((row.start, row.length, age))
        restored += row.restore is not None
        if row.samples:
            sampling.append(row.request.sampling)
    sampled = len(sampling)
    seeded = sum(params.temperature > 0 for params in sampling)
    logprobs = sum(params.logprobs is not None for params in sampling)
    line: dict[str, Any] = {"t": round(begin_s, 6), "s": round(seconds, 6), "d": decode, "dc": context, "n": sampled}
    extra = {"v": verify, "p": prompts, "r": restored, "c": saved, "m": len(plan.moves), "g": seeded, "l": logprobs}
    line.update({name: value for name, value in extra.items() if value})
    return line


class StepTrace:
    """The file. Raises ConfigError when it cannot be opened."""

    def __init__(self, path: Path, scheduler: SchedulerConfig, about: dict[str, Any]) -> None:
        try:
            self._file = path.open("ab", buffering=BUFFER_BYTES)
        except OSError as error:
            raise ConfigError(
                f"SPARKINFER_STEP_TRACE={path} cannot be written ({error.strerror}): name a file in a folder that "
                "exists, or leave the setting out"
            ) from error
        self._encoder = msgspec.json.Encoder()
        self._flushed_s = 0.0
        header = {
            "schema": SCHEMA,
            "epoch": time.time() - time.monotonic(),
            "scheduler": dataclasses.asdict(scheduler),
            **about,
        }
        self._file.write(self._encoder.encode(header) + b"\n")
        self._file.flush()
        atexit.register(self._file.close)

    def write(self, plan: StepPlan, begin_s: float, end_s: float) -> None:
        """Add a step; at most a second's lines stay in memory while steps go on."""
        self._file.write(self._encoder.encode(step_line(plan, begin_s, end_s - begin_s)) + b"\n")
        if end_s - self._flushed_s > FLUSH_S:
            self._flushed_s = end_s
            self._file.flush()

    def close(self) -> None:
        """Write what is buffered and close the file."""
        atexit.unregister(self._file.close)
        self._file.close()


class TracedRunner:
    """A runner whose steps are written down."""

    def __init__(self, runner: Runner, trace: StepTrace) -> None:
        self._runner, self._trace = runner, trace

    def execute(self, plan: StepPlan) -> StepResult:
        """As the runner's own."""
        begin = time.monotonic()
        result = self._runner.execute(plan)
        self._trace.write(plan, begin, time.monotonic())
        return result


class TracedOverlapRunner(TracedRunner):
    """The same for a runner with steps in flight. A step begins at its launch, or when the one before it ends."""

    def __init__(self, runner: OverlapRunner, trace: StepTrace) -> None:
        super().__init__(runner, trace)
        self._overlap = runner
        self._launched: deque[tuple[StepPlan, float]] = deque()
        self._ended_s = 0.0

    def launch(self, plan: StepPlan) -> None:
        """As the runner's own."""
        self._launched.append((plan, time.monotonic()))
        self._overlap.launch(plan)

    def collect(self) -> StepResult:
        """As the runner's own."""
        plan, launched = self._launched.popleft()
        result = self._overlap.collect()
        end = time.monotonic()
        self._trace.write(plan, max(launched, self._ended_s), end)
        self._ended_s = end
        return result


def traced(runner: OverlapRunner, trace: StepTrace, scheduler: SchedulerConfig) -> TracedRunner:
    """The runner with its steps written down, in the form that the scheduler's settings ask for."""
    if scheduler.max_in_flight > 1:
        return TracedOverlapRunner(runner, trace)
    return TracedRunner(runner, trace)
