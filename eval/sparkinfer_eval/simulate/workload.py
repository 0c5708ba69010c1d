"""What the simulated clients send: closed loops, planned arrivals, or a trace file."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkinfer.errors import ConfigError

from ..arrival_plan import plan_of
from ..cells import Cell
from ..records import Record

VOCABULARY = 1 << 17
MOST_TOKENS = 1 << 24
"""Of a prompt or an answer: beyond any context."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One request: lengths in tokens; `prefix` names a beginning of `prefix_tokens` tokens that others share."""

    prompt_tokens: int
    output_tokens: int
    at_s: float = 0.0
    prefix: str = ""
    prefix_tokens: int = 0
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order. `concurrency` 0: each at its `at_s`; otherwise that many in flight, one after the other."""

    name: str
    shapes: tuple[Shape, ...]
    concurrency: int = 0


def prompt_of(shape: Shape, number: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Token ids: the shared beginning by its name, then ids that no other request has."""
    shared: list[int] = []
    if shape.prefix:
        rng = random.Random(f"prefix/{shape.prefix}")
        shared = [rng.randrange(vocabulary) for _ in range(min(shape.prefix_tokens, shape.prompt_tokens))]
    rng = random.Random(f"request/{number}")
    return shared + [rng.randrange(vocabulary) for _ in range(shape.prompt_tokens - len(shared))]


def of_cell(cell: Cell, seed: str = "0") -> Workload:
    """The load of a benchmark cell."""
    temperature = float(cell.sampling.get("temperature", 0.0))
    if cell.kind == "closed":
        assert cell.output_tokens is not None
        assert cell.concurrency is not None
        shape = Shape(cell.prompt_tokens, cell.output_tokens, temperature=temperature)
        return Workload(cell.id, (shape,) * cell.requests, cell.concurrency)
    arrivals = plan_of(cell, seed)
    shapes = (Shape(cell.prompt_tokens, a.output_tokens, a.at_s, temperature=temperature) for a in arrivals)
    return Workload(cell.id, tuple(shapes))


def of_records(cell: Cell, records: Sequence[Record]) -> Workload:
    """The measured requests of a recorded cell: their lengths, and in an open loop their actual starts.

    Raises ConfigError when none was answered.
    """
    measured = sorted((r for r in records if r.phase == "profiling" and r.error is None), key=lambda r: r.start_ns)
    if not measured:
        raise ConfigError(f"cell {cell.id} has no answered request to replay")
    temperature = float(cell.sampling.get("temperature", 0.0))
    begin = measured[0].start_ns
    shapes = tuple(
        Shape(r.prompt_tokens or cell.prompt_tokens, r.output_tokens or 1, (r.start_ns - begin) / 1e9,
              temperature=temperature)
        for r in measured
    )  # fmt: skip
    return Workload(cell.id, shapes, cell.concurrency or 0)


def _fits(shape: Shape) -> bool:
    counts = (shape.prompt_tokens, shape.output_tokens)
    return (
        all(type(value) is int and 1 <= value <= MOST_TOKENS for value in counts)
        and type(shape.prefix_tokens) is int
        and shape.prefix_tokens >= 0
        and all(type(value) in (int, float) and 0 <= value < math.inf for value in (shape.at_s, shape.temperature))
        and isinstance(shape.prefix, str)
    )


def read_requests(path: Path, concurrency: int) -> Workload:
    """A JSONL trace: `prompt_tokens`, `output_tokens`, `at_s` (open loop), and optional `prefix`, `prefix_tokens`,
    `temperature`. Raises ConfigError naming the line."""
    if concurrency < 0:
        raise ConfigError(f"--concurrency {concurrency}: must be at least 1, or 0 for arrivals at `at_s`")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): name a JSONL trace, see docs/simulator.md") from error
    shapes = []
    for number, text in enumerate(lines, 1):
        try:
            shape = Shape(**json.loads(text))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: not a request ({error}); see docs/simulator.md") from error
        if not _fits(shape):
            raise ConfigError(
                f"{path}:{number}: lengths must be whole numbers from 1 to {MOST_TOKENS} tokens, at_s and temperature "
                "finite numbers of at least 0, prefix a text and prefix_tokens a whole number"
            )
        shapes.append(shape)
    if not shapes:
        raise ConfigError(f"{path} holds no request")
    return Workload(path.stem, tuple(shapes), concurrency)
