"""The tables of CHANGELOG.md, report.html and RELEASE_NOTE.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sparkinfer_eval.report.document import Table
from sparkinfer_eval.report.figures import Figures, enough_requests
from sparkinfer_eval.report.load import BASELINE, THIS
from sparkinfer_eval.report.text import (
    AT_ONCE,
    MARK,
    cell_name,
    is_arrivals,
    number,
    plural,
    seconds,
    shape_name,
    split_cell,
)

PREVIOUS = "previous"
PERCENTILES = ("p50", "p90", "p99")
ARROW = " → "
MOST_CHECK_ROWS = 12
"""A check with more rows is shortened in the tables; report.json has them all."""


def closed_cells(figures: Figures, model: str) -> list[str]:
    """All closed-loop cells that were asked for, with or without results."""
    return [c for c in figures.run.info["cells"] if not is_arrivals(c)]


def arrival_cells(figures: Figures) -> list[str]:
    """All open-loop cells that were asked for."""
    return [c for c in figures.run.info["cells"] if is_arrivals(c)]


def percentile(figures: Figures, engine: str, model: str, cell: str, metric: str, stat: str) -> str:
    """One percentile as text, marked when it has fewer requests than it needs."""
    value = figures.value(engine, model, cell, metric, stat)
    if value is None:
        return number(None)
    count = figures.count(engine, model, cell, metric)
    late = metric in ("ttft_ms", "itl_ms") and figures.at_once(engine, model, cell)
    return number(value) + ("" if enough_requests(stat, count) else MARK) + (AT_ONCE if late else "")


def percentiles(figures: Figures, engine: str, model: str, cell: str, metric: str) -> str:
    """`p50 / p90 / p99`, or `missing`."""
    if not figures.runs(engine, model, cell):
        return "missing"
    return " / ".join(percentile(figures, engine, model, cell, metric, stat) for stat in PERCENTILES)


def rate(figures: Figures, engine: str, model: str, cell: str) -> str:
    """Output tok/s as text, or `missing`."""
    if not figures.runs(engine, model, cell):
        return "missing"
    return number(figures.value(engine, model, cell, "output_tok_s", "value"))


def this_label(figures: Figures) -> str:
    """`0.0.9 → 0.1.0` with a previous engine, else `sparkinfer 0.1.0`."""
    ours = figures.run.engine(THIS)
    previous = figures.run.engine(PREVIOUS)
    assert ours is not None  # load_run refuses a run without it
    return f"{previous['version']}{ARROW}{ours['version']}" if previous else f"{ours['label']}"


def before_and_after(figures: Figures, text: Callable[[str], str]) -> str:
    """`previous → this` of one figure, or only this when the run has no previous engine."""
    this = text(THIS)
    return f"{text(PREVIOUS)}{ARROW}{this}" if figures.run.engine(PREVIOUS) else this


def level_name(cell: str) -> str:
    """`16 chats`, `1 long prompt`."""
    shape, level = split_cell(cell)
    return plural(level, shape_name(shape))


def other_engines(figures: Figures) -> list[dict]:
    """Engines that have a row of their own: all but this one and its predecessor."""
    return [e for e in figures.run.engines if e["name"] not in (THIS, PREVIOUS)]


def _rows(figures: Figures, name: str, columns: list[Callable[[str], str]]) -> list[list[str]]:
    """One row for this engine (from its predecessor, where measured) and one per other engine."""
    rows = [[f"{name}: {this_label(figures)}", *[before_and_after(figures, column) for column in columns]]]
    for engine in other_engines(figures):
        rows.append([f"{name}: {engine['label']}", *[column(engine["name"]) for column in columns]])
    return rows


def request_count(figures: Figures, engine: str, model: str, cell: str) -> str:
    """Error-free measured requests as text."""
    return f"{figures.requests(engine, model, cell):,}"


def ttft_table(figures: Figures, model: str, cells: list[str]) -> Table:
    """TTFT percentiles, output tok/s and requests per engine; two rows a cell: this (from previous), baseline."""
    table = Table(["", "TTFT p50 / p90 / p99 (ms)", "output tok/s", "requests"])
    for cell in cells:
        columns: list[Callable[[str], str]] = [
            partial(percentiles, figures, model=model, cell=cell, metric="ttft_ms"),
            partial(rate, figures, model=model, cell=cell),
            partial(request_count, figures, model=model, cell=cell),
        ]
        table.rows.extend(_rows(figures, level_name(cell), columns))
    return table


def _column_names(figures: Figures) -> list[str]:
    """Column heads: versions for our own engines, labels for the others."""
    return [e["version"] if e["name"] in (THIS, PREVIOUS) else e["label"] for e in figures.run.engines]


def throughput_table(figures: Figures, model: str) -> Table:
    """Output tok/s by cell: previous, this, baseline."""
    table = Table(["output tok/s", *_column_names(figures)])
    for cell in closed_cells(figures, model):
        table.rows.append([cell_name(cell), *[rate(figures, e["name"], model, cell) for e in figures.run.engines]])
    return table


def itl_table(figures: Figures, model: str) -> Table:
    """Per-token latency (mean per request) by cell."""
    table = Table(["ITL p50 / p90 / p99 (ms)", *_column_names(figures)])
    for cell in closed_cells(figures, model):
        columns = [percentiles(figures, e["name"], model, cell, "itl_ms") for e in figures.run.engines]
        table.rows.append([cell_name(cell), *columns])
    return table


def ratio_table(figures: Figures, model: str) -> Table | None:
    """This engine divided by the baseline, cell by cell; None without a baseline in the run."""
    baseline = figures.run.engine(BASELINE)
    if baseline is None:
        return None
    columns = (("output_tok_s", "value", "output tok/s"), ("ttft_ms", "p50", "TTFT p50"), ("itl_ms", "p50", "ITL p50"))
    table = Table([f"ratio to {baseline['label']}", *[label for _, _, label in columns]])
    for cell in closed_cells(figures, model):
        row = [cell_name(cell)]
        for metric, stat, _ in columns:
            value = figures.ratio(model, cell, metric, stat)
            row.append("missing" if value is None else f"{value:.3f}")
        table.rows.append(row)
    return table


def class_counts(figures: Figures, engine: str, model: str, cell: str) -> str:
    """Requests per class, `16 short, 64 long`."""
    counts: dict[str, int] = {}
    for m in figures.runs(engine, model, cell):
        for record in m.records:
            label = record.label or "unlabelled"
            counts[label] = counts.get(label, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: (item[0] != "short", item[0]))
    return ", ".join(f"{count} {label}" for label, count in ordered) or "missing"


def latency(figures: Figures, engine: str, model: str, cell: str, stat: str) -> str:
    """A statistic of the request latency in seconds, or `missing`."""
    value = figures.value(engine, model, cell, "request_latency_ms", stat)
    if value is None:
        return "missing"
    enough = enough_requests(stat, figures.count(engine, model, cell, "request_latency_ms"))
    return seconds(value) + ("" if enough else MARK)


def arrivals_table(figures: Figures, model: str) -> Table:
    """Poisson arrivals: tokens over makespan, mean and p90 request latency, requests per class."""
    table = Table(["", "tokens / makespan (tok/s)", "mean latency (s)", "p90 latency (s)", "requests by class"])
    for cell in arrival_cells(figures):
        columns: list[Callable[[str], str]] = [
            partial(rate, figures, model=model, cell=cell),
            partial(latency, figures, model=model, cell=cell, stat="mean"),
            partial(latency, figures, model=model, cell=cell, stat="p90"),
            partial(class_counts, figures, model=model, cell=cell),
        ]
        table.rows.extend(_rows(figures, figures.arrival_name(cell), columns))
    return table


def _check_value(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _verdict(ok: object) -> str:
    if isinstance(ok, bool):
        return "ok" if ok else "FAILED"
    return "not applicable"


def shown_rows(rows: list[dict]) -> list[dict]:
    """All rows of a short check; of a long one those that are not ok, else the one nearest to its limit."""
    if len(rows) <= MOST_CHECK_ROWS:
        return rows
    failed = [row for row in rows if row.get("ok") is not True]

    def share(row: dict) -> float:
        value, limit = row.get("value"), row.get("limit")
        return abs(value) / limit if isinstance(value, int | float) and isinstance(limit, int | float) and limit else 0

    return failed or [max(rows, key=share)]


def checks_table(figures: Figures) -> Table:
    """The rows of every check program on every model, with limits (`shown_rows`); missing outputs are rows too."""
    table = Table(["check", "model", "row", "value", "limit", "ok"])
    for output in figures.run.checks:
        label = figures.model_label(output.model)
        if output.data is None:
            table.rows.append([output.check, label, "no output", "–", "–", "missing"])
            continue
        if output.ok is None:
            reason = str(output.data.get("not_applicable") or "no reason given")
            table.rows.append([output.check, label, reason, "–", "–", "not applicable"])
            continue
        for row in shown_rows(output.data["rows"]):
            table.rows.append(
                [
                    output.check,
                    label,
                    str(row.get("name")),
                    _check_value(row.get("value")),
                    _check_value(row.get("limit")),
                    _verdict(row.get("ok")),
                ]
            )
        total = f"all rows ({len(output.data['rows'])})"
        table.rows.append([output.check, label, total, "–", "–", _verdict(output.ok)])
    return table
