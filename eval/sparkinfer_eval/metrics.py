"""Every number that a report shows, computed from `Record`s, in one place.

Definitions are AIPerf's, so that its own summary can be held against ours: times run from the request's start to the
first and to the last piece of content, the duration of a run from its first start to its last content, and the
inter-token latency is one mean per request. Only error-free records of the `profiling` phase count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .records import Record

STATS = ("mean", "p50", "p90", "p99")
UNITS = {
    "output_tok_s": "tok/s",
    "ttft_ms": "ms",
    "itl_ms": "ms",
    "request_latency_ms": "ms",
    "requests_s": "requests/s",
}
NS_PER_MS = 1e6
NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class Value:
    """One figure: `stat` is `value` for a rate, else one of STATS; `n` requests stand behind it."""

    metric: str
    stat: str
    value: float
    unit: str
    n: int
    supported: bool
    """Whether `n` is enough for this percentile (`percentile_supported`); always true for means and rates."""


def measured(records: Iterable[Record]) -> list[Record]:
    """The records that count: phase `profiling`, no error."""
    return [record for record in records if record.phase == "profiling" and record.error is None]


def ttft_ms(records: Iterable[Record]) -> list[float]:
    """Time to first token in ms, one value per record that produced content."""
    return [(r.first_token_ns - r.start_ns) / NS_PER_MS for r in measured(records) if r.first_token_ns is not None]


def request_latency_ms(records: Iterable[Record]) -> list[float]:
    """Time from start to last content in ms, one value per record."""
    return [(record.end_ns - record.start_ns) / NS_PER_MS for record in measured(records)]


def itl_ms(records: Iterable[Record]) -> list[float]:
    """Mean time between tokens of each request in ms: (end - first token) / (output tokens - 1), from 2 tokens on."""
    values = []
    for record in measured(records):
        if record.first_token_ns is not None and record.output_tokens is not None and record.output_tokens > 1:
            values.append((record.end_ns - record.first_token_ns) / (record.output_tokens - 1) / NS_PER_MS)
    return values


def duration_s(records: Iterable[Record]) -> float:
    """Seconds from the first start to the last content. Raises ValueError when no record counts or no time passed."""
    chosen = measured(records)
    if not chosen:
        raise ValueError("no error-free record of the profiling phase: there is nothing to time")
    span = max(record.end_ns for record in chosen) - min(record.start_ns for record in chosen)
    if span <= 0:
        raise ValueError("the records end before they start: their times are damaged")
    return span / NS_PER_S


def output_tok_s(records: Sequence[Record]) -> float:
    """Output tokens (the server's count) over the duration."""
    return sum(record.output_tokens or 0 for record in measured(records)) / duration_s(records)


def requests_s(records: Sequence[Record]) -> float:
    """Requests over the duration."""
    return len(measured(records)) / duration_s(records)


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0-100), linear between order statistics as numpy and AIPerf compute it.

    Raises ValueError on no values.
    """
    if not values:
        raise ValueError(f"p{q:g} of no values")
    return float(np.percentile(np.asarray(values, dtype=np.float64), q))


def statistic(values: Sequence[float], stat: str) -> float:
    """`mean` or `p<q>` of the values. Raises ValueError on no values or an unknown name."""
    if stat == "mean":
        if not values:
            raise ValueError("mean of no values")
        return float(np.mean(np.asarray(values, dtype=np.float64)))
    if not stat.startswith("p") or not stat[1:].replace(".", "", 1).isdigit():
        raise ValueError(f"unknown statistic {stat!r}: use mean or p<number>")
    return percentile(values, float(stat[1:]))


def requests_needed(q: float, confidence: float = 0.99) -> int:
    """Fewest requests for which at least two lie beyond the q-th percentile with the given confidence.

    The distribution-free two-order-statistics bound, 1 - p^n - n p^(n-1) (1 - p) >= confidence with p the tail's
    larger side: 64 for p90, 130 for p95, 662 for p99.
    """
    if not 0 < q < 100:
        raise ValueError(f"percentile {q} is not between 0 and 100")
    p = max(q, 100 - q) / 100
    n = 2
    while 1 - p**n - n * p ** (n - 1) * (1 - p) < confidence:
        n += 1
    return n


def percentile_supported(n: int, q: float) -> bool:
    """Whether n requests carry the q-th percentile (see `requests_needed`)."""
    return n >= requests_needed(q)


def summarise(records: Sequence[Record]) -> list[Value]:
    """All figures of one result: rates as `value`, latencies as STATS. Raises ValueError when nothing can be timed."""
    n = len(measured(records))
    rates = {"output_tok_s": output_tok_s(records), "requests_s": requests_s(records)}
    figures = [Value(metric, "value", value, UNITS[metric], n, True) for metric, value in rates.items()]
    series = {
        "ttft_ms": ttft_ms(records),
        "itl_ms": itl_ms(records),
        "request_latency_ms": request_latency_ms(records),
    }
    for metric, values in series.items():
        if not values:
            continue
        for stat in STATS:
            supported = stat == "mean" or percentile_supported(len(values), float(stat[1:]))
            figures.append(Value(metric, stat, statistic(values, stat), UNITS[metric], len(values), supported))
    if not all(math.isfinite(figure.value) for figure in figures):
        raise ValueError("a figure is not finite: the records' times are damaged")
    return figures
