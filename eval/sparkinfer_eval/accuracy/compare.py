"""From two engines' scores to figures.

KL(A || B) per position is taken over the tokens whose probability both report; all others are one lump, so that both
sides sum to 1. By the data-processing inequality this is at most the KL over the whole vocabulary, and equal to it as
the lump's probability goes to 0; `mass` is the share of A's probability outside the lump.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from sparkinfer.errors import ConfigError
from sparkinfer_eval.agreement import Answer, Top, compare

from .held_out import Task
from .scores import GreedyAnswer, Position, Scores

LEAST = 1e-12
"""Probabilities that rounding has made zero or negative are taken as this."""


TOP1_OF_EXACT = 0.99
"""Least top-1 agreement with ties counted, against a reference in float32."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds of the gate. KL, loss and gap in nats; `beyond` and `parted` are shares of positions and answers.

    `top1` judges the agreement with exact ties of 16-bit logits left aside, `top1_plain` with ties as differences: two
    right engines differ at those, so that this limit is what keeps the first one from hiding anything in them
    (docs/accuracy.md has the figures behind both).

    A single gap says little on a MoE model: where rounding turns a near-tie of the router, another expert answers.
    """

    top1: float = 0.99
    top1_plain: float = 0.98
    """`TOP1_OF_EXACT` against a reference that computes in float32, which has no ties of its own."""
    kl: float = 0.002
    loss: float = 0.01
    gap: float = 0.5
    beyond: float = 0.001
    parted: float = 0.1


def limits_for(reference: Mapping[str, object], limits: Limits | None = None) -> Limits:
    """The limits that hold against a reference (facts of its engine) where --top1-plain is not given."""
    limits = limits or Limits()
    return replace(limits, top1_plain=TOP1_OF_EXACT) if reference.get("dtype") == "float32" else limits


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures of a comparison.

    `differing` counts positions where the likeliest tokens differ, less `ties`, where the two are equally likely to one
    of the engines: 16-bit logits often are, and which of them comes first says nothing. `top1` leaves ties out of the
    differences, `top1_plain` counts them. `gap` is the largest distance,
    in B, between its own likeliest token and A's at the differing ones: rounding turns near-ties only. `loss_*` are
    mean negative log-likelihoods in nats, None where an engine did not report the probability of every token.
    """

    positions: int
    top1: float
    top1_plain: float
    differing: int
    ties: int
    gap: float
    near_ties: int
    kl: float
    kl_p99: float
    kl_max: float
    mass: float
    loss_a: float | None
    loss_b: float | None
    answers: int
    answers_equal: int
    parted_at: float | None
    answers_beyond: int
    answer_gap: float

    @property
    def beyond(self) -> float:
        """Share of positions whose top-1 difference is no near-tie."""
        return (self.differing - self.near_ties) / self.positions

    @property
    def parted(self) -> float:
        """Share of greedy answers that part at something else than a near-tie."""
        return self.answers_beyond / max(1, self.answers)

    @property
    def loss_difference(self) -> float | None:
        """|loss of A - loss of B|: the log of the perplexities' ratio."""
        return None if self.loss_a is None or self.loss_b is None else abs(self.loss_a - self.loss_b)


def divergence(a: Position, b: Position) -> tuple[float, float]:
    """(KL in nats, A's probability of the tokens that both report)."""
    total, mass_a, mass_b = 0.0, 0.0, 0.0
    for token, value in a.top.items():
        other = b.top.get(token)
        if other is not None:
            p = math.exp(value)
            total += p * (value - other)
            mass_a += p
            mass_b += math.exp(other)
    rest_a, rest_b = max(1.0 - mass_a, LEAST), max(1.0 - mass_b, LEAST)
    return max(total + rest_a * (math.log(rest_a) - math.log(rest_b)), 0.0), mass_a


def best(position: Position) -> int:
    """The likeliest token."""
    return max(position.top, key=lambda token: position.top[token])


def gap(a: Position, b: Position) -> float:
    """How far A's choice lies below B's own in B; where B does not list it, below the least that B lists."""
    own = b.top[best(b)]
    return own - b.top.get(best(a), min(b.top.values()))


def _pairs(a: Scores, b: Scores) -> list[tuple[Position, Position]]:
    """The positions that both engines scored, in order."""
    pairs = []
    for name, rows in a.windows.items():
        others = {row.position: row for row in b.windows.get(name, [])}
        pairs += [(row, others[row.position]) for row in rows if row.position in others]
    return pairs


def _loss(rows: Sequence[Position]) -> float | None:
    values = [row.target for row in rows]
    known = [value for value in values if value is not None]
    return -statistics.fmean(known) if len(known) == len(values) else None


def _answer(answer: GreedyAnswer) -> Answer:
    return Answer(answer.tokens, cast("list[Top]", answer.tops))


def figures(a: Scores, b: Scores, task: Task, near_tie: float) -> Figures:
    """Compare two engines' scores of one task. `near_tie`: a top-1 difference within it, in nats, counts as one.

    Raises ConfigError when they share no position.
    """
    pairs = _pairs(a, b)
    if not pairs:
        raise ConfigError("the two engines share no scored position: were both given the same task?")
    unlike = [(gap(x, y), gap(y, x)) for x, y in pairs if best(x) != best(y)]
    differing = [there for there, here in unlike if there > 0 and here > 0]
    divergences = [divergence(x, y) for x, y in pairs]
    kls = sorted(kl for kl, _ in divergences)
    found = [compare(_answer(a.answers[n]), _answer(b.answers[n])) for n in task.prompts if n in a.answers]
    parted = [f.parted for f in found if f.parted is not None]
    return Figures(
        positions=len(pairs),
        top1=1 - len(differing) / len(pairs),
        top1_plain=1 - len(unlike) / len(pairs),
        differing=len(differing),
        ties=len(unlike) - len(differing),
        gap=max(differing, default=0.0),
        near_ties=sum(value <= near_tie for value in differing),
        kl=statistics.fmean(kls),
        kl_p99=kls[min(len(kls) - 1, math.ceil(0.99 * len(kls)) - 1)],
        kl_max=kls[-1],
        mass=statistics.fmean(mass for _, mass in divergences),
        loss_a=_loss([x for x, _ in pairs]),
        loss_b=_loss([y for _, y in pairs]),
        answers=len(found),
        answers_equal=sum(f.parted is None for f in found),
        parted_at=statistics.median(parted) if parted else None,
        answers_beyond=sum(f.gap > near_tie for f in found),
        answer_gap=max((f.gap for f in found), default=0.0),
    )
