"""The figures that tables and plots show, computed from request records by `sparkinfer_eval.metrics`.

Percentiles and means of an engine in a cell are taken over the requests of all its runs (blocks and repetitions)
together; rates (`output_tok_s`, `requests_s`) are the mean of the runs' rates. With one run both are that run's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sparkinfer_eval import metrics
from sparkinfer_eval.records import Record
from sparkinfer_eval.report.load import BASELINE, THIS, Measurement, RunData

PER_REQUEST: dict[str, Callable[[Iterable[Record]], list[float]]] = {
    "ttft_ms": metrics.ttft_ms,
    "itl_ms": metrics.itl_ms,
    "request_latency_ms": metrics.request_latency_ms,
}
RATES: dict[str, Callable[[Sequence[Record]], float]] = {
    "output_tok_s": metrics.output_tok_s,
    "requests_s": metrics.requests_s,
}
PERCENTILES_SHOWN = (90, 95, 99)


def enough_requests(stat: str, count: int) -> bool:
    """Whether `count` requests carry a statistic. The p50 is always shown unmarked, as are means and rates."""
    return stat in ("value", "mean", "p50") or metrics.percentile_supported(count, float(stat[1:]))


@dataclass
class Figures:
    """Looks figures up by engine, model, cell, metric and stat; None where the run has no such result."""

    run: RunData

    @cached_property
    def _index(self) -> dict[tuple[str, str, str], list[Measurement]]:
        index: dict[tuple[str, str, str], list[Measurement]] = {}
        for m in self.run.measurements:
            index.setdefault((m.result.engine, m.result.model, m.result.cell), []).append(m)
        return index

    def runs(self, engine: str, model: str, cell: str) -> list[Measurement]:
        """The measurements of an engine in a cell, by block and repetition."""
        return self._index.get((engine, model, cell), [])

    def models(self) -> list[str]:
        """Names of the run's models, in declared order."""
        return [m["name"] for m in self.run.info["models"]]

    def model_info(self, model: str) -> dict[str, Any]:
        """The declaration of a model."""
        return next(m for m in self.run.info["models"] if m["name"] == model)

    def model_label(self, model: str) -> str:
        """A model's printed name."""
        return str(self.model_info(model)["label"])

    def model_title(self, model: str) -> str:
        """A model's printed name, with the note that its weights are random where that is so."""
        label = self.model_label(model)
        return f"{label} (random weights)" if self.random_weights(model) and "random weights" not in label else label

    def random_weights(self, model: str) -> bool:
        """Whether the model's weights are random."""
        return bool(self.model_info(model)["random_weights"])

    def cells(self, model: str) -> list[str]:
        """The cells with at least one result for this model, in table order."""
        return [c for c in self.run.info["cells"] if any(k[1:] == (model, c) for k in self._index)]

    def arrival_name(self, cell: str) -> str:
        """`4 requests/s (poisson-r1)`, the rate being the one that the cell's definition in this run asks for."""
        for m in self.run.measurements:
            rate = m.result.cell_definition.get("rate")
            if m.result.cell == cell and rate is not None:
                return f"{rate:g} request{'' if rate == 1 else 's'}/s ({cell})"
        return cell

    def has_engine(self, engine: str, model: str) -> bool:
        """Whether an engine has any result for this model."""
        return any(k[:2] == (engine, model) for k in self._index)

    def requests(self, engine: str, model: str, cell: str) -> int:
        """Error-free measured requests of all runs."""
        return sum(len(metrics.measured(m.records)) for m in self.runs(engine, model, cell))

    def at_once(self, engine: str, model: str, cell: str) -> int:
        """Requests whose several tokens all arrived at one instant: of those only the delivery was timed."""
        return sum(
            (r.output_tokens or 0) > 1 and r.first_token_ns == r.end_ns
            for m in self.runs(engine, model, cell)
            for r in metrics.measured(m.records)
        )

    def values(self, engine: str, model: str, cell: str, metric: str) -> list[float]:
        """A per-request metric of all requests of all runs."""
        return [v for m in self.runs(engine, model, cell) for v in PER_REQUEST[metric](m.records)]

    def rates(self, engine: str, model: str, cell: str, metric: str) -> list[float]:
        """A per-run metric, one value per run."""
        return [RATES[metric](m.records) for m in self.runs(engine, model, cell)]

    def value(self, engine: str, model: str, cell: str, metric: str, stat: str) -> float | None:
        """The figure that the tables show."""
        if metric in RATES:
            values, stat = self.rates(engine, model, cell, metric), "mean"
        else:
            values = self.values(engine, model, cell, metric)
        return metrics.statistic(values, stat) if values else None

    def count(self, engine: str, model: str, cell: str, metric: str) -> int:
        """Requests behind a figure."""
        if metric in RATES:
            return self.requests(engine, model, cell)
        return len(self.values(engine, model, cell, metric))

    def ratio(self, model: str, cell: str, metric: str, stat: str) -> float | None:
        """This engine's figure divided by the baseline's, None unless both exist."""
        ours = self.value(THIS, model, cell, metric, stat)
        theirs = self.value(BASELINE, model, cell, metric, stat)
        return ours / theirs if ours is not None and theirs else None
