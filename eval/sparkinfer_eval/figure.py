"""One figure of eval/scheduling_figures.py."""

from __future__ import annotations

from dataclasses import dataclass

REACHED, MISSED, UNDECIDED = "reached", "missed", "undecided"
EQUIVALENCE = 0.03
"""Relative difference that counts as none: the margin of the tests of equivalence of two engines."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure; `goal` None where it is only reported. `better` is `below` or `above`.

    `interval`: the ends between which the value lies, where it is known only so well.
    """

    part: str
    name: str
    value: float
    unit: str
    goal: float | None = None
    better: str = "above"
    note: str = ""
    interval: tuple[float, float] | None = None

    @property
    def verdict(self) -> str | None:
        """`reached`, `missed` or `undecided`; None without a goal.

        Missed when the whole interval misses the goal. Reached when all of it reaches the goal; a goal of a lower limit
        (not to lose) is reached by an interval that falls short of it by EQUIVALENCE at most. Undecided otherwise.
        """
        if self.goal is None:
            return None
        low, high = self.interval or (self.value, self.value)
        if self.better == "below":
            return REACHED if high <= self.goal else MISSED if low > self.goal else UNDECIDED
        allowed = self.goal * (1 - EQUIVALENCE) if self.interval is not None else self.goal
        return MISSED if high < self.goal else REACHED if low >= allowed else UNDECIDED
