"""Step traces as the engine writes them (`SPARKINFER_STEP_TRACE`), read back, and the features of a step."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparkinfer.engine.step_trace import SCHEMA, step_line
from sparkinfer.errors import ConfigError
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.types import StepPlan

PASS_FEATURES = (
    "pass", "decode rows", "first decode rows", "decode context (1k tokens)", "prompts",
    "prompt tokens", "prompt attention (1k pairs)",
    "prompt chunks", "longest prompt's chunks", "prompt pass", "restores", "checkpoints", "KV moves",
    "seeded rows", "logprob rows", "after a pause",
)  # fmt: skip
FIRST_ROWS = 8
"""Decode rows up to here may cost more each than those that join them."""
PAUSE_S = 0.02
"""A pass after that long without one finds caches cold and a CPU at rest."""
CHUNK = 32
"""Tokens that the CPU scan of linear attention takes at once; a shorter rest costs as much."""
HOST_FEATURES = ("step", "tokens", "prompts begun")


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a trace. `wall_s` is when the pass began (seconds since 1970), `seconds` how long it took.

    `line` has `rested` where nothing ran just before.
    """

    wall_s: float
    seconds: float
    line: dict[str, Any]

    @property
    def end_s(self) -> float:
        """When its tokens were on the host."""
        return self.wall_s + self.seconds


@dataclass(frozen=True, slots=True)
class Trace:
    """The steps of one or more starts of a server, in order, and the settings of its scheduler."""

    scheduler: SchedulerConfig
    about: dict[str, Any]
    steps: list[Step]

    def between(self, begin_s: float, end_s: float) -> list[Step]:
        """The steps that began in a stretch of wall-clock time."""
        return [step for step in self.steps if begin_s <= step.wall_s < end_s]


def _check(line: dict[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError for a step that features cannot be made of."""
    counts = [line["d"], line["dc"], line["n"]]
    for start, length, age in line.get("p", ()):
        counts += start, length, age
    if any(type(number) is not int for number in counts):
        raise ValueError("d, dc and n are whole numbers, p holds three for each chunk")
    if not math.isfinite(line["t"]) or not 0 <= line["s"] < math.inf:
        raise ValueError("t and s are seconds")


def read_trace(path: Path) -> Trace:
    """Read a trace file. Raises ConfigError: missing, malformed, or starts with different scheduler settings."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}): name a file that a server wrote under SPARKINFER_STEP_TRACE"
        ) from error
    scheduler: SchedulerConfig | None = None
    about: dict[str, Any] = {}
    steps: list[Step] = []
    epoch = 0.0
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            if "schema" in line:
                if line["schema"] != SCHEMA:
                    raise ConfigError(f"{path}:{number}: schema is {line['schema']!r}, expected {SCHEMA!r}")
                found = SchedulerConfig(**line["scheduler"])
                if scheduler is not None and found != scheduler:
                    raise ConfigError(f"{path}:{number}: the server was started again with other scheduler settings")
                scheduler, epoch = found, line["epoch"]
                about = {k: v for k, v in line.items() if k not in ("schema", "epoch", "scheduler")}
            else:
                wall = line["t"] + epoch
                _check(line)
                if not steps or wall - steps[-1].end_s >= PAUSE_S:
                    line["rested"] = 1
                steps.append(Step(wall, line["s"], line))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number == len(lines):
                break  # The last line of a server that was killed may be cut.
            raise ConfigError(f"{path}:{number}: not a line of a step trace ({error})") from error
    if scheduler is None or not steps:
        raise ConfigError(f"{path} holds no steps: was the server used?")
    return Trace(scheduler, about, steps)


def pass_features(line: dict[str, Any]) -> list[float]:
    """What the time of a pass depends on, in the order of PASS_FEATURES.

    A prompt's attention takes, for each of its tokens, as many pairs as there are tokens before it.
    """
    prompts = line.get("p", ())
    pairs = sum(start * length + length * length / 2 for start, length, _ in prompts)
    chunks = [-(-length // CHUNK) for _, length, _ in prompts]
    return [
        1.0,
        line["d"],
        min(line["d"], FIRST_ROWS),
        line["dc"] / 1e3,
        len(prompts),
        sum(length for _, length, _ in prompts),
        pairs / 1e3,
        sum(chunks),
        # Scans of different prompts run side by side, the chunks of one follow one another.
        max(chunks, default=0),
        float(bool(prompts)),
        line.get("r", 0),
        line.get("c", 0),
        line.get("m", 0),
        line.get("g", 0),
        line.get("l", 0),
        line.get("rested", 0),
    ]


def host_features(line: dict[str, Any]) -> list[float]:
    """What the time between a pass and the next one depends on, in the order of HOST_FEATURES."""
    return [1.0, line["n"], sum(age >= 0 for _, _, age in line.get("p", ()))]


def plan_line(plan: StepPlan) -> dict[str, Any]:
    """The line that the engine would write for a plan."""
    return step_line(plan, 0.0, 0.0)


def matrix(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Feature rows as float64 [steps, features]."""
    return np.asarray(rows, dtype=np.float64)
