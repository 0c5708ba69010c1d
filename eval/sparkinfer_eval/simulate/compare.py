"""Predictions against measurements: figures, table, plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

from sparkinfer.output import write_bytes, write_text
from sparkinfer.scheduling.config import SchedulerConfig

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .. import metrics
from ..drawing import render
from .cost import Costs, error_of
from .measured import CellRun, Recorded, fit_cells
from .replay import Outcome, simulate
from .workload import Workload, of_records

BAND = 0.15
SEEDS = 9
"""Simulations of a load; a prediction is their median."""
SHOWN = (("output_tok_s", "value"), ("ttft_ms", "p50"), ("itl_ms", "p50"))
JUDGED = SHOWN[:2]
TITLES = {"output_tok_s": "output tok/s", "ttft_ms": "TTFT p50 (ms)", "itl_ms": "ITL p50 (ms)"}


@dataclass(frozen=True, slots=True)
class Point:
    """One figure of one cell, measured and predicted."""

    cell: str
    metric: str
    stat: str
    measured: float
    predicted: float
    fitted: bool
    """Whether the cost model has seen this cell."""

    @property
    def error(self) -> float:
        """Relative: 0.1 is predicted 10 % too high."""
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        """Within the band."""
        return abs(self.error) <= BAND


def simulated(
    workload: Workload, config: SchedulerConfig, costs: Costs, real: bool = False
) -> tuple[dict[tuple[str, str], float], Outcome]:
    """Medians of the figures of SEEDS simulations by (metric, stat), and the last one's outcome.

    With `real` passes times do not scatter: one simulation is enough.
    """
    outcomes = [simulate(workload, config, costs, None if real else seed) for seed in range(1 if real else SEEDS)]
    values: dict[tuple[str, str], list[float]] = {}
    for outcome in outcomes:
        for v in metrics.summarise(outcome.records):
            values.setdefault((v.metric, v.stat), []).append(v.value)
    return {name: statistics.median(some) for name, some in values.items()}, outcomes[-1]


def _points(runs: Sequence[CellRun], costs: Costs, fitted: bool) -> list[Point]:
    """One cell, whose measurement is the median of its runs. All of these offered the same load."""
    measured = [one.figures() for one in runs]
    found, _ = simulated(of_records(runs[0].cell, runs[0].records), runs[0].scheduler, costs)
    return [
        Point(runs[0].cell.id, *name, statistics.median(figures[name] for figures in measured), found[name], fitted)
        for name in SHOWN
        if name in found and all(name in figures for figures in measured)
    ]


def _by_cell(recorded: Recorded) -> dict[str, list[CellRun]]:
    cells: dict[str, list[CellRun]] = {}
    for one in recorded.cells:
        cells.setdefault(one.cell.id, []).append(one)
    return cells


def predict(recorded: Recorded, costs: Costs, seen: Sequence[CellRun]) -> list[Point]:
    """Simulate every cell of the run with the settings that it ran with."""
    return [
        point
        for runs in _by_cell(recorded).values()
        for point in _points(runs, costs, any(one in seen for one in runs))
    ]


def predict_each(recorded: Recorded) -> list[Point]:
    """The same, each cell with costs fitted on all other cells: no prediction has seen what it is compared with."""
    points = []
    for name, runs in _by_cell(recorded).items():
        costs = fit_cells(recorded, [one for one in recorded.cells if one.cell.id != name])
        points += _points(runs, costs, False)
    return points


def table(points: Sequence[Point]) -> str:
    """A markdown table, one line a cell."""
    lines = [
        "| cell | " + " | ".join(f"{TITLES[m]} measured | predicted | error" for m, _ in SHOWN) + " | cost model |"
    ]
    lines.append("|---" * (3 * len(SHOWN) + 2) + "|")
    for cell in dict.fromkeys(point.cell for point in points):
        mine = {point.metric: point for point in points if point.cell == cell}
        texts = []
        for metric, _ in SHOWN:
            point = mine.get(metric)
            if point is None:
                texts += ["-", "-", "-"]
                continue
            mark = "" if point.inside or (metric, point.stat) not in JUDGED else " (outside)"
            texts += [f"{point.measured:.1f}", f"{point.predicted:.1f}", f"{point.error:+.1%}{mark}"]
        seen = "fitted on it" if next(iter(mine.values())).fitted else "not seen"
        lines.append(f"| {cell} | " + " | ".join(texts) + f" | {seen} |")
    return "\n".join(lines)


def verdict(points: Sequence[Point]) -> str:
    """How many of the judged figures lie within the band, seen and unseen cells apart."""
    lines = []
    for metric, stat in JUDGED:
        for fitted, name in ((True, "cells the model was fitted on"), (False, "cells it has not seen")):
            mine = [p for p in points if (p.metric, p.stat) == (metric, stat) and p.fitted is fitted]
            if mine:
                worst = max(mine, key=lambda p: abs(p.error))
                inside = sum(p.inside for p in mine)
                lines.append(
                    f"{TITLES[metric]}: {inside} of {len(mine)} {name} within {BAND:.0%}; "
                    f"largest error {worst.error:+.1%} ({worst.cell})"
                )
    return "\n".join(lines)


def pass_errors(costs: Costs, recorded: Recorded) -> str:
    """How well the passes themselves are predicted, by cell: sums over the cell's steps."""
    cells = _by_cell(recorded).items()
    errors = {name: error_of(costs, [step for one in runs for step in one.steps]) for name, runs in cells}
    return ", ".join(f"{name} {error:+.1%}" for name, error in errors.items())


def plot(points: Sequence[Point], title: str, stem: Path) -> None:
    """Predicted over measured, logarithmic, with the band, as STEM.png and STEM.svg, each by rename."""
    figure, axes = plt.subplots(1, len(JUDGED), figsize=(11, 5.2))
    for axis, (metric, stat) in zip(axes, JUDGED, strict=True):
        mine = [p for p in points if (p.metric, p.stat) == (metric, stat)]
        values = [v for p in mine for v in (p.measured, p.predicted)]
        low, high = min(values) / 1.5, max(values) * 1.5
        axis.fill_between([low, high], [low * (1 - BAND), high * (1 - BAND)], [low * (1 + BAND), high * (1 + BAND)],
                          color="0.88", label=f"within {BAND:.0%}")  # fmt: skip
        axis.plot([low, high], [low, high], color="0.4", linewidth=1)
        for fitted, marker, label in ((True, "o", "fitted on"), (False, "^", "not seen")):
            some = [p for p in mine if p.fitted is fitted]
            if not some:
                continue
            axis.scatter([p.measured for p in some], [p.predicted for p in some], marker=marker, label=label, zorder=3)
        for point in mine:
            axis.annotate(point.cell, (point.measured, point.predicted), fontsize=6, xytext=(4, -6),
                          textcoords="offset points")  # fmt: skip
        axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        axis.set(xlabel=f"measured {TITLES[metric]}", ylabel=f"predicted {TITLES[metric]}")
        axis.legend(fontsize=8, loc="upper left")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    png, svg = render(figure, stem.name)
    plt.close(figure)
    write_bytes(stem.with_suffix(".png"), png)
    write_text(stem.with_suffix(".svg"), svg)
