"""One figure of eval/scheduling_figures.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure; `goal` None where it is only reported. `better` is `below` or `above`.

    `judged`: what is held against the goal where that is not the value itself, such as the end of its interval.
    """

    part: str
    name: str
    value: float
    unit: str
    goal: float | None = None
    better: str = "above"
    note: str = ""
    judged: float | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.goal is None:
            return None
        judged = self.value if self.judged is None else self.judged
        return judged <= self.goal if self.better == "below" else judged >= self.goal
