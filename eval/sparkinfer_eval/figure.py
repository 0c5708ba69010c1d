"""One figure of eval/scheduling_figures.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure; `goal` None where it is only reported. `better` is `below` or `above`."""

    part: str
    name: str
    value: float
    unit: str
    goal: float | None = None
    better: str = "above"
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.better == "below" else self.value >= self.goal
