"""The cost of a step and of what surrounds it, fitted from measurements.

A pass, and the host's work between two passes, are linear in a few features with coefficients that are not negative
(Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23). What is minimised is the sum of absolute relative
errors, by least squares with weights from the round before: the model is then that of a typical step, which neither the
long prefill passes nor the steps that another program held up can pull away. How far steps scatter around it is kept
beside it, and a simulation draws from that.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparkinfer.errors import ConfigError
from sparkinfer.output import write_text
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.types import StepPlan
from sparkinfer_eval.rows_json import rows_json

from .steps import HOST_FEATURES, PASS_FEATURES, Step, host_features, matrix, pass_features, plan_line
from .workload import VOCABULARY

SCHEMA = "sparkinfer/step-costs/v3"
ROUNDS = 12
LEAST_ERROR = 0.02
"""Relative errors below this weigh as if they were as large: a step fitted exactly would outweigh all others."""
SCATTER_VALUES = 40
LONGEST_GAP_S = 0.05
"""A longer time between two passes is one in which nothing was to be done."""
FEWEST_STEPS = 30


def nnls(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0 that minimises |a x - b|, by Lawson and Hanson's active set. `a` [n, k], `b` [n] -> [k], float64."""
    columns = a.shape[1]
    gram, target = a.T @ a, a.T @ b
    x = np.zeros(columns)
    passive = np.zeros(columns, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(target).max()))
    for _ in range(10 * columns):
        gradient = target - gram @ x
        gradient[passive] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        passive[best] = True
        while True:
            trial = np.zeros(columns)
            trial[passive] = np.linalg.lstsq(a[:, passive], b, rcond=None)[0]
            if (trial[passive] > 0).all():
                x = trial
                break
            falling = passive & (trial <= 0)
            step = (x[falling] / (x[falling] - trial[falling])).min()
            x = x + step * (trial - x)
            passive &= x > 1e-14
            x[~passive] = 0.0
            if not passive.any():
                break
    return x


def fit_linear(
    rows: Sequence[Sequence[float]], seconds: Sequence[float] | np.ndarray, groups: Sequence[bool] | None = None
) -> list[float]:
    """Non-negative coefficients of `seconds` in the feature rows, of least absolute relative errors.

    `groups` tells two kinds of rows apart, which then count the same however many there are of each.
    """
    a, b = matrix(rows), np.asarray(seconds, dtype=np.float64)
    # Features differ by orders of magnitude: columns of length 1 keep the sums well conditioned.
    scale = np.maximum(np.abs(a).max(axis=0), 1e-12)
    kind = np.zeros(len(b), dtype=int) if groups is None else np.asarray(groups, dtype=int)
    share = 1.0 / np.sqrt(np.bincount(kind, minlength=2)[kind])
    weights = share
    x = np.zeros(a.shape[1])
    floor = max(float(np.median(b)) * 0.1, 1e-6)
    for _ in range(ROUNDS):
        # The triangle of the QR factorisation has the same least squares as all rows.
        columns = np.column_stack((a / scale * weights[:, None], b * weights))
        triangle = np.asarray(np.linalg.qr(columns, mode="r"))
        x = nnls(triangle[:, :-1], triangle[:, -1]) / scale
        fitted = a @ x
        error = np.abs(b - fitted) / np.maximum(fitted, floor)
        weights = share / np.maximum(fitted, floor) / np.sqrt(np.maximum(error, LEAST_ERROR))
    return [float(value) for value in x]


def scatter(values: Sequence[float] | np.ndarray) -> list[float]:
    """At most SCATTER_VALUES values, as likely as each other, that stand for all of these; none for none."""
    if not len(values):
        return []
    count = min(SCATTER_VALUES, len(values))
    return [float(v) for v in np.quantile(np.asarray(values, dtype=np.float64), (np.arange(count) + 0.5) / count)]


@dataclass(frozen=True, slots=True)
class Host:
    """Costs outside the engine, in seconds, as measured between load generator and engine.

    `ingest`: from a request's start to its arrival in the idle engine, and `ingest_token` for each prompt token. Of
    requests that come together each takes `ingest_each` of that for itself (None: all of it), the rest side by side.
    `egress`: from the end of a pass to the arrival of its tokens at the clients. `issue`: between the first requests of
    a closed loop; `turn`: work that an ended answer makes; `think`: from there to the next request; `spacing`: between
    such requests whose answers ended together. `scatter`: by the name of a cost, values to add to it, equally likely.
    `crowding`: how many times longer passes take beside ended answers and new requests: several processes are then at
    work on the CPUs that the engine leaves, and on its own.
    """

    ingest: float = 0.0
    ingest_token: float = 0.0
    egress: float = 0.0
    issue: float = 0.0
    turn: float = 0.0
    think: float = 0.0
    spacing: float = 0.0
    scatter: dict[str, list[float]] = field(default_factory=dict)
    crowding: float = 1.0
    ingest_each: float | None = None

    @property
    def occupied(self) -> float:
        """How long a request keeps the next one from being taken in."""
        return self.ingest if self.ingest_each is None else self.ingest_each


@dataclass(frozen=True, slots=True)
class Costs:
    """A fitted cost model with what it was fitted on. Coefficients are seconds per unit of each feature.

    `host` and `host_weights` are of closed loops, `open_host` and `open_host_weights` of planned arrivals, whose client
    is another program. `scatter`: measured over predicted, equally likely, of passes that `decode` only, of those with
    a `prompt`, of the time `between` two, and of that time with planned arrivals (`between, planned`).
    """

    pass_weights: list[float]
    host_weights: list[float]
    host: Host
    scheduler: SchedulerConfig
    about: dict[str, Any] = field(default_factory=dict)
    open_host: Host | None = None
    scatter: dict[str, list[float]] = field(default_factory=dict)
    open_host_weights: list[float] | None = None

    @property
    def vocabulary(self) -> int:
        """Token ids of prompts lie below this."""
        return VOCABULARY

    def next_round(self, first: bool) -> None:
        """A round of simulations begins, with `first` those of another load: fitted costs stay as they are."""

    def pass_seconds(self, plan: StepPlan, rested: bool = False) -> float:
        """How long the model runner takes for a plan; `rested`: after a time without one."""
        return float(np.dot(self.pass_weights, pass_features({**plan_line(plan), "rested": rested})))

    def host_seconds(self, plan: StepPlan, planned: bool = False) -> float:
        """What follows the pass before the next one can begin: scheduling, sending, the server's share of the CPU.

        `planned`: with the client of planned arrivals, where its costs are known.
        """
        known = self.open_host_weights if planned else None
        return float(np.dot(self.host_weights if known is None else known, host_features(plan_line(plan))))

    def describe(self) -> str:
        """The coefficients that are not zero, in microseconds."""
        lines = []
        for name, weights, features in (
            ("pass", self.pass_weights, PASS_FEATURES),
            ("host", self.host_weights, HOST_FEATURES),
            ("host, planned arrivals", self.open_host_weights or [], HOST_FEATURES if self.open_host_weights else ()),
        ):
            if not weights:
                continue
            terms = [f"{w * 1e6:.4g} x {f}" for w, f in zip(weights, features, strict=True) if w > 0]
            lines.append(f"{name} (us): " + " + ".join(terms))
        for name, host in (("closed loops", self.host), ("planned arrivals", self.open_host)):
            if host is not None:
                values = dataclasses.asdict(host)
                del values["scatter"], values["crowding"]
                texts = (f"{cost} {value * 1e3:.3g}" for cost, value in values.items() if value is not None)
                lines.append(f"around, {name} (ms): " + ", ".join(texts) + f"; crowding {host.crowding:.2f} x")
        for name, factors in self.scatter.items():
            low, middle, high = (float(np.percentile(factors, q)) for q in (10, 50, 90))
            lines.append(f"scatter, {name} (p10, p50, p90 of measured / predicted): {low:.2f} {middle:.2f} {high:.2f}")
        return "\n".join(lines)


def fit(
    steps: Sequence[Sequence[Step]],
    host: Host,
    scheduler: SchedulerConfig,
    about: dict[str, Any],
    open_host: Host | None = None,
    crowded: Sequence[bool] | None = None,
    planned: Sequence[bool] | None = None,
) -> Costs:
    """Fit from stretches of consecutive steps. Raises ConfigError for too few of them.

    `crowded` tells, of all steps in a row, which began while ended answers and new requests were dealt with; `planned`,
    of each stretch, whether its load were planned arrivals and there are closed loops besides.
    """
    all_steps = [step for stretch in steps for step in stretch]
    if len(all_steps) < FEWEST_STEPS:
        raise ConfigError(
            f"{len(all_steps)} steps are too few to fit a cost model from: record a load of at least {FEWEST_STEPS}"
        )
    # Few steps carry prompts, but they are all that the time to the first token consists of.
    carries = [bool(s.line.get("p")) for s in all_steps]
    features, seconds = [pass_features(s.line) for s in all_steps], np.array([s.seconds for s in all_steps])
    passes = fit_linear(features, seconds, carries)
    factors = _factors(features, passes, seconds)
    mask, apart = np.array(carries), ~np.array(crowded or [False] * len(all_steps))
    spread = {"decode": scatter(factors[~mask & apart]), "prompt": scatter(factors[mask & apart])}
    if apart.any() and not apart.all():
        crowding = float(factors[~apart].mean() / factors[apart].mean())
        host = dataclasses.replace(host, crowding=max(1.0, crowding))
    kinds = planned or [False] * len(steps)
    between = _fit_between([stretch for stretch, kind in zip(steps, kinds, strict=True) if not kind])
    beside = _fit_between([stretch for stretch, kind in zip(steps, kinds, strict=True) if kind])
    spread |= {"between": between[1]} if between else {}
    spread |= {"between, planned": beside[1]} if beside else {}
    return Costs(
        pass_weights=passes,
        host_weights=between[0] if between else [0.0] * len(HOST_FEATURES),
        host=host,
        scheduler=scheduler,
        about={**about, "steps": len(all_steps)},
        open_host=open_host,
        scatter=spread,
        open_host_weights=beside[0] if beside else None,
    )


def _fit_between(stretches: Sequence[Sequence[Step]]) -> tuple[list[float], list[float]] | None:
    """Coefficients and scatter of the time between two passes; None from too few of them."""
    rows, gaps = [], []
    for stretch in stretches:
        for step, following in itertools.pairwise(stretch):
            gap = following.wall_s - step.end_s
            if gap < LONGEST_GAP_S and following.line["d"]:
                rows.append(host_features(step.line))
                gaps.append(max(0.0, gap))
    if len(gaps) < FEWEST_STEPS:
        return None
    weights = fit_linear(rows, gaps)
    return weights, scatter(_factors(rows, weights, gaps))


def _factors(
    rows: Sequence[Sequence[float]], weights: Sequence[float], seconds: Sequence[float] | np.ndarray
) -> np.ndarray:
    """Measured over predicted."""
    return np.asarray(seconds) / np.maximum(matrix(rows) @ np.asarray(weights), 1e-9)


def error_of(costs: Costs, steps: Sequence[Step]) -> float:
    """Sum of the predicted pass times over that of the measured ones, less 1."""
    predicted = float((matrix([pass_features(s.line) for s in steps]) @ np.asarray(costs.pass_weights)).sum())
    return predicted / sum(s.seconds for s in steps) - 1


def save(costs: Costs, path: Path) -> None:
    """Write as JSON: temporary name first, then rename. Raises EnvironmentProblem."""
    document = {"schema": SCHEMA, **dataclasses.asdict(costs)}
    document["pass_weights"] = dict(zip(PASS_FEATURES, costs.pass_weights, strict=True))
    document["host_weights"] = dict(zip(HOST_FEATURES, costs.host_weights, strict=True))
    write_text(path, rows_json(document, allow_nan=False))


def load(path: Path) -> Costs:
    """Read what `save` wrote. Raises ConfigError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("schema") != SCHEMA:
            raise ConfigError(f"{path}: schema is {document.get('schema')!r}, expected {SCHEMA!r}")
        return Costs(
            [float(document["pass_weights"][name]) for name in PASS_FEATURES],
            [float(document["host_weights"][name]) for name in HOST_FEATURES],
            Host(**document["host"]),
            SchedulerConfig(**document["scheduler"]),
            dict(document["about"]),
            Host(**document["open_host"]) if document["open_host"] is not None else None,
            dict(document["scatter"]),
            document["open_host_weights"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a cost model ({error}): make one with eval/simulate.py --save") from error
