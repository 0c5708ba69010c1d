"""The plan of an open-loop cell: when each request arrives and how long its answer is, from a seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from sparkinfer.errors import ConfigError

from .cells import Cell

SHORT, LONG = "short", "long"


@dataclass(frozen=True)
class Arrival:
    """One planned request: `at_s` seconds after the start, `output_tokens`, class `label`, its own sampling seed."""

    at_s: float
    output_tokens: int
    label: str
    seed: int


def poisson_plan(
    requests: int, rate: float, short_share: float, short_tokens: int, long_tokens: tuple[int, int], seed: str
) -> list[Arrival]:
    """`requests` arrivals of a Poisson process of `rate` per second, the first at 0.

    Exactly round(`requests` x `short_share`) are short, in random places; the others' lengths are uniform over
    `long_tokens`. Gaps are scaled so that the last request arrives at (requests - 1) / rate: the plan's rate is the
    asked one, whatever the draw. Raises ConfigError on impossible numbers.
    """
    if requests < 2 or not 0 < rate < math.inf or not 0 <= short_share <= 1:
        raise ConfigError(
            f"arrivals need 2 requests or more, a finite rate above 0 and a share in 0..1, not {requests}, {rate}, "
            f"{short_share}"
        )
    if min(short_tokens, *long_tokens) < 1 or long_tokens[0] > long_tokens[1]:
        raise ConfigError(f"answer lengths {short_tokens} and {long_tokens} must be at least 1, the range in order")
    rng = random.Random(f"arrivals/{seed}")
    gaps = [rng.expovariate(rate) for _ in range(requests - 1)]
    stretch = (requests - 1) / rate / sum(gaps)
    short = round(requests * short_share)
    labels = [SHORT] * short + [LONG] * (requests - short)
    rng.shuffle(labels)
    plan, now = [], 0.0
    for gap, label in zip([0.0, *gaps], labels, strict=True):
        now += gap * stretch
        tokens = short_tokens if label == SHORT else rng.randint(*long_tokens)
        plan.append(Arrival(now, tokens, label, rng.getrandbits(31)))
    return plan


def plan_of(cell: Cell, seed: str) -> list[Arrival]:
    """The plan of an open-loop cell. Raises ConfigError when the cell is of another kind."""
    if cell.rate is None or cell.short_share is None or cell.short_tokens is None or cell.long_tokens is None:
        raise ConfigError(f"cell {cell.id} is no open-loop cell: it has no arrival rate")
    return poisson_plan(cell.requests, cell.rate, cell.short_share, cell.short_tokens, cell.long_tokens, seed)
