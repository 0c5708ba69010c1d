"""Whether two runs of the same request agree: tokens, and log-probabilities up to where they part.

Rounding may turn a near-tie, so in 16-bit arithmetic the first different token is no fault by itself: both runs had the
same tokens before it, hence their distributions there must agree within a tolerance, and a greedy choice may only
change between tokens that lie within twice that tolerance (each of the two may move by it). What follows the first
different token answers another text and is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Token = int | bytes
"""A token's id, or its text in bytes, where a server says no more."""
Top = Mapping[Token, float]
"""Token to natural-log probability: the best few of one position."""
LEAST_LOGPROB = math.log(0.01)
"""Tokens less likely than this in both runs are not compared: their logits lie where rounding is coarse, and nobody
samples them."""
BELOW_BEST = 1.0
"""But those within so many nats of the likeliest one are: random weights make no token likely."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A request's tokens, and where log-probabilities were asked for, the best few of each position."""

    tokens: Sequence[Token]
    tops: Sequence[Top] = field(default_factory=list)
    greedy: bool = True


@dataclass(frozen=True, slots=True)
class Agreement:
    """`parted`: index of the first different token, None where all are equal. `logprob`: largest difference over the
    positions up to and with it. `gap`: how far apart, in the first answer, the two tokens are that they parted at."""

    parted: int | None
    logprob: float
    gap: float


def compare(one: Answer, other: Answer) -> Agreement:
    """Compare two answers to the same request; different lengths part where the shorter one ends."""
    shared = min(len(one.tokens), len(other.tokens))
    parted = next((i for i in range(shared) if one.tokens[i] != other.tokens[i]), None)
    if parted is None and len(one.tokens) != len(other.tokens):
        parted = shared
    stop = shared if parted is None else parted + 1
    return Agreement(parted, max(differences(one, other, stop), default=0.0), _gap(one, other, parted))


def differences(one: Answer, other: Answer, stop: int | None = None) -> list[float]:
    """How far each log-probability moved that both answers report, at positions up to `stop` (default: to where the
    answers part)."""
    if stop is None:
        parted = compare(one, other).parted
        stop = len(one.tops) if parted is None else parted + 1
    return [
        abs(mine[token] - its[token])
        for mine, its in zip(one.tops[:stop], other.tops[:stop], strict=False)
        for least in [min(LEAST_LOGPROB, max([*mine.values(), *its.values()], default=0.0) - BELOW_BEST)]
        for token in mine.keys() & its.keys()
        if max(mine[token], its[token]) >= least
    ]


def _gap(one: Answer, other: Answer, parted: int | None) -> float:
    """Log-probability between the two tokens that the answers parted at; infinite where it is not known."""
    if parted is None:
        return 0.0
    if parted >= min(len(one.tops), len(one.tokens), len(other.tokens)):
        return float("inf")
    top = one.tops[parted]
    mine, its = top.get(one.tokens[parted]), top.get(other.tokens[parted])
    return float("inf") if mine is None or its is None else abs(mine - its)


def excused(found: Agreement, greedy: bool, tolerance: float, gap: float | None = None) -> bool:
    """Whether answers that part do so within rounding. A seeded choice follows its noise: only the distributions
    are judged. `tolerance` 0 excuses nothing; `gap` is how far apart a greedy choice may lie, twice the tolerance by
    default."""
    if found.parted is None:
        return True
    if tolerance <= 0 or found.logprob > tolerance:
        return False
    return found.gap <= (2 * tolerance if gap is None else gap) if greedy else True


def worst(pairs: Sequence[Agreement]) -> float:
    """The largest log-probability difference of several comparisons, 0 of none."""
    return max((pair.logprob for pair in pairs), default=0.0)
