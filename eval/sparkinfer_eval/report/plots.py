"""The report's plots, as PNG and as SVG that is byte-identical for the same data.

Each function takes the run's `Figures` and one model and returns a matplotlib figure, or None when the run holds
nothing for it. Engines keep one colour, one marker and one line style everywhere (Okabe-Ito colours).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from sparkinfer_eval.drawing import render
from sparkinfer_eval.report.figures import Figures
from sparkinfer_eval.report.text import cell_name, is_arrivals, number, shape_name, split_cell

COLOURS = {"sparkinfer": "#0072B2", "vllm": "#D55E00", "previous": "#7A7A7A"}
MARKERS = {"sparkinfer": "o", "vllm": "s", "previous": "^"}
LINES = {"sparkinfer": "-", "vllm": "--", "previous": ":"}
RC: Any = {
    "svg.hashsalt": "sparkinfer",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.grid": True,
    "grid.color": "#e3e6e8",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
}

Plot = Callable[[Figures, str], Canvas | None]


def _style(engine: str) -> dict[str, Any]:
    return {
        "color": COLOURS.get(engine, "#009E73"),
        "marker": MARKERS.get(engine, "D"),
        "linestyle": LINES.get(engine, "-."),
    }


def _grid(rows: int, columns: int, width: float, height: float) -> tuple[Canvas, Any]:
    """A canvas without a window, and its axes as an array [rows, columns]."""
    canvas = Canvas(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(canvas)
    return canvas, canvas.subplots(rows, columns, squeeze=False)


def _heading(canvas: Canvas, figures: Figures, model: str, title: str) -> None:
    """Title with the model and scale, and one legend for all panels, below it."""
    scale = "full size" if figures.run.info["scale"]["full"] else "scaled run"
    canvas.suptitle(f"{title}\n{figures.model_title(model)}, {scale}", fontsize=11, fontweight="bold")


def _legend(canvas: Canvas, figures: Figures, model: str, **extra: Any) -> None:
    shown = [e for e in figures.run.engines if figures.has_engine(e["name"], model)]
    handles = [Line2D([], [], markersize=5, label=e["label"], **_style(e["name"]), **extra) for e in shown]
    canvas.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _log_ticks(axes: Axes, always: float | None = None) -> None:
    """Plain numbers at 1-2-5 steps on a log x axis, at even steps where the range holds fewer than three of those.

    `always` is a value that gets a tick in any case, in the place of those too near to it.
    """
    low, high = axes.get_xlim()
    steps = [m * 10.0**e for e in range(-4, 8) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    if len(steps) < 3:
        steps = [t for t in MaxNLocator(4).tick_values(low, high) if low <= t <= high]
    if always is not None and low < always < high:
        steps = sorted({always, *(s for s in steps if abs(np.log(s / always)) > 0.12 * np.log(high / low))})
    axes.set_xticks(steps, [f"{step:,g}" for step in steps])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(NullLocator())


def _shapes(figures: Figures, model: str) -> dict[str, list[str]]:
    """Closed-loop cells with data for this model, by shape, in table order."""
    shapes: dict[str, list[str]] = {}
    for cell in figures.cells(model):
        if not is_arrivals(cell):
            shapes.setdefault(split_cell(cell)[0], []).append(cell)
    return shapes


def _ecdf(axes: Axes, values: list[float], engine: str) -> None:
    """Empirical distribution as steps, its p50 marked."""
    ordered = np.sort(np.asarray(values))
    share = np.arange(1, len(ordered) + 1) / len(ordered) * 100
    style = _style(engine)
    axes.step(
        np.concatenate([ordered[:1], ordered]), np.concatenate([[0], share]), where="post",
        color=style["color"], linestyle=style["linestyle"], linewidth=1.6,
    )  # fmt: skip
    axes.plot([np.median(ordered)], [50], linestyle="", marker=style["marker"], color=style["color"], markersize=5)


def _ecdf_grid(figures: Figures, model: str, metric: str, cells: list[list[str]], title: str, unit: str) -> Canvas:
    columns = max(len(row) for row in cells)
    canvas, axes = _grid(len(cells), columns, max(5.0, 2.7 * columns), 2.15 * len(cells) + 1.1)
    for panels, row in zip(axes, cells, strict=True):
        for panel in panels[len(row) :]:
            panel.set_axis_off()
        for panel, cell in zip(panels, row, strict=False):
            counts = []
            for engine in figures.run.engines:
                values = figures.values(engine["name"], model, cell, metric)
                if values:
                    _ecdf(panel, values, engine["name"])
                    counts.append(len(values))
            name = figures.arrival_name(cell) if is_arrivals(cell) else cell_name(cell)
            numbers = sorted(set(counts), reverse=True)
            panel.set_title(f"{name} (n = {' / '.join(map(str, numbers))})")
            panel.set_ylim(0, 102)
            panel.set_xlim(left=0)
            panel.xaxis.set_major_locator(MaxNLocator(5, min_n_ticks=3))
            panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        panels[0].set_ylabel("% of requests")
    for panel in axes[-1]:
        panel.set_xlabel(unit)
    _heading(canvas, figures, model, title)
    _legend(canvas, figures, model)
    return canvas


def ttft_distribution(figures: Figures, model: str) -> Canvas | None:
    """Distribution of the time to first token in every closed-loop cell."""
    rows = list(_shapes(figures, model).values())
    title = "Time to first token: share of requests that had it by then"
    return _ecdf_grid(figures, model, "ttft_ms", rows, title, "TTFT (ms)") if rows else None


def itl_distribution(figures: Figures, model: str) -> Canvas | None:
    """Distribution of the per-request inter-token latency in every closed-loop cell."""
    rows = list(_shapes(figures, model).values())
    title = "Inter-token latency (mean per request): share of requests at or below"
    return _ecdf_grid(figures, model, "itl_ms", rows, title, "ITL (ms)") if rows else None


def arrivals_latency(figures: Figures, model: str) -> Canvas | None:
    """Distribution of the request latency at each Poisson rate."""
    row = [cell for cell in figures.cells(model) if is_arrivals(cell)]
    title = "Poisson arrivals: share of requests finished by then"
    return _ecdf_grid(figures, model, "request_latency_ms", [row], title, "request latency (ms)") if row else None


def throughput_against_latency(figures: Figures, model: str) -> Canvas | None:
    """Output tok/s against TTFT p50 (above) and against interactivity, 1000 / ITL p50 (below), per shape."""
    shapes = _shapes(figures, model)
    if not shapes:
        return None
    canvas, axes = _grid(2, len(shapes), max(5.5, 3.5 * len(shapes)), 6.6)
    for column, (shape, cells) in enumerate(shapes.items()):
        for engine in figures.run.engines:
            _pareto(axes[0][column], axes[1][column], figures, engine["name"], model, cells)
        axes[0][column].set_title(f"{shape_name(shape)}: tokens against first token")
        axes[0][column].set_xlabel("TTFT p50 (ms), log scale")
        axes[0][column].set_xscale("log")
        axes[1][column].set_title(f"{shape_name(shape)}: tokens against interactivity")
        axes[1][column].set_xlabel("tokens/s per request (1000 / ITL p50)")
        for panel in (axes[0][column], axes[1][column]):
            panel.set_ylim(bottom=0)
            panel.margins(x=0.12, y=0.15)
        _log_ticks(axes[0][column])
        axes[1][column].set_xlim(left=0)
    for row in axes:
        row[0].set_ylabel("output tok/s")
    _heading(canvas, figures, model, "Throughput against latency; the small numbers are concurrent requests")
    _legend(canvas, figures, model)
    return canvas


def _pareto(above: Axes, below: Axes, figures: Figures, engine: str, model: str, cells: list[str]) -> None:
    points = []
    for cell in cells:
        rate = figures.value(engine, model, cell, "output_tok_s", "value")
        ttft = figures.value(engine, model, cell, "ttft_ms", "p50")
        itl = figures.value(engine, model, cell, "itl_ms", "p50")
        if rate is not None and ttft is not None and itl:
            points.append((split_cell(cell)[1], rate, ttft, 1000 / itl))
    if not points:
        return
    points.sort()
    level, rates, ttft, interactivity = np.array(points).T
    for panel, x in ((above, ttft), (below, interactivity)):
        panel.plot(x, rates, linewidth=1.4, markersize=5, **_style(engine))
        offset, side = ((5, 3), "left") if engine == "sparkinfer" else ((-5, 3), "right")
        for request_count, px, py in zip(level, x, rates, strict=True):
            panel.annotate(
                f"{request_count:g}", (px, py), xytext=offset, textcoords="offset points", fontsize=7.5, ha=side,
                color=_style(engine)["color"],
            )  # fmt: skip


def cells_side_by_side(figures: Figures, model: str) -> Canvas | None:
    """Output tok/s of every closed-loop cell, engines beside each other; dots are the single runs."""
    shapes = _shapes(figures, model)
    if not shapes:
        return None
    engines = [e for e in figures.run.engines if figures.has_engine(e["name"], model)]
    canvas, axes = _grid(1, len(shapes), max(5.5, 3.8 * len(shapes)), 4.0)
    width = 0.8 / len(engines)
    for panel, (shape, cells) in zip(axes[0], shapes.items(), strict=True):
        for index, engine in enumerate(engines):
            for place, cell in enumerate(cells):
                runs = figures.rates(engine["name"], model, cell, "output_tok_s")
                x = place + (index - (len(engines) - 1) / 2) * width
                if not runs:
                    panel.annotate("missing", (x, 0), xytext=(0, 3), textcoords="offset points", ha="center",
                                   fontsize=7, rotation=90)  # fmt: skip
                    continue
                colour = _style(engine["name"])["color"]
                height = figures.value(engine["name"], model, cell, "output_tok_s", "value") or 0.0
                panel.bar(x, height, width * 0.92, color=colour)
                if len(runs) > 1:
                    panel.plot([x] * len(runs), runs, ".", color="black", markersize=3.5)
                panel.annotate(
                    number(height), (x, height), xytext=(0, 2), textcoords="offset points", ha="center",
                    fontsize=7 if len(engines) < 3 else 6,
                )  # fmt: skip
        panel.set_xticks(range(len(cells)), [f"{split_cell(c)[1]:g}" for c in cells])
        panel.set_title(shape_name(shape))
        panel.set_xlabel("concurrent requests")
        panel.set_xlim(-0.5, len(cells) - 0.5)
        panel.grid(axis="x", visible=False)
        panel.margins(y=0.1)
    axes[0][0].set_ylabel("output tok/s")
    _heading(canvas, figures, model, "Output tokens per second in each cell")
    _legend(canvas, figures, model)
    return canvas


def ratios_to_baseline(figures: Figures, model: str) -> Canvas | None:
    """Output tok/s, TTFT p50 and ITL p50 of this engine divided by the baseline's, one dot per cell."""
    metrics = (("output_tok_s", "value", "output tok/s"), ("ttft_ms", "p50", "TTFT p50"), ("itl_ms", "p50", "ITL p50"))
    cells = [
        c
        for c in figures.cells(model)
        if not is_arrivals(c) and figures.ratio(model, c, "output_tok_s", "value") is not None
    ]
    if not cells:
        return None
    canvas, axes = _grid(1, len(metrics), 9.5, 0.33 * len(cells) + 1.9)
    for panel, (metric, stat, label) in zip(axes[0], metrics, strict=True):
        for place, cell in enumerate(cells):
            ratio = figures.ratio(model, cell, metric, stat)
            if ratio is not None:
                panel.plot([1, ratio], [place, place], color="#b8c4cc", linewidth=1.2)
                panel.plot([ratio], [place], "o", color=COLOURS["sparkinfer"], markersize=5.5)
                panel.annotate(
                    f"{ratio:.2f}", (ratio, place), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=7
                )
        panel.axvline(1, color=COLOURS["vllm"], linewidth=1.2)
        panel.set_xscale("log")
        panel.margins(x=0.2)
        panel.autoscale_view()
        _log_ticks(panel, always=1.0)
        panel.set_yticks(range(len(cells)), [cell_name(c) for c in cells] if metric == "output_tok_s" else [])
        panel.set_ylim(len(cells) - 0.4, -0.9)
        panel.set_xlabel(label + (" (right of 1: more)" if metric == "output_tok_s" else " (left of 1: less time)"))
    name = figures.run.engine("vllm")
    _heading(canvas, figures, model, f"This version divided by {name['label'] if name else 'the baseline'}")
    return canvas


PLOTS: dict[str, tuple[Plot, str]] = {
    "ttft": (ttft_distribution, "Time to first token, distribution in every closed-loop cell; the marker is the p50"),
    "throughput-latency": (
        throughput_against_latency,
        "Output tok/s against TTFT p50 and against interactivity",
    ),
    "cells": (cells_side_by_side, "Output tok/s in every closed-loop cell"),
    "itl": (itl_distribution, "Inter-token latency (mean per request), distribution in every closed-loop cell"),
    "arrivals": (arrivals_latency, "Request latency under Poisson arrivals, distribution"),
    "ratio": (ratios_to_baseline, "This version divided by the baseline, cell by cell (one value each, no interval)"),
}


def draw_all(figures: Figures) -> dict[str, tuple[bytes, str, str]]:
    """All plots of the run: stem of the file -> (PNG, SVG, caption), in page order."""
    drawn = {}
    with matplotlib.rc_context(RC):
        for model in figures.models():
            for kind, (plot, caption) in PLOTS.items():
                canvas = plot(figures, model)
                if canvas is not None:
                    name = f"{kind}-{model}"
                    png, svg = render(canvas, name)
                    drawn[name] = (png, svg, f"{figures.model_label(model)}: {caption}")
    return drawn
