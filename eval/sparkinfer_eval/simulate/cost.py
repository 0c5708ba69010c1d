"""The cost of a step and of what surrounds it, fitted from measurements.

A pass, and the host's work between two passes, are linear in a few features with coefficients that are not negative
(Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23). Errors are relative: weights follow the
prediction of the round before, so that long prefill passes do not drown the many short decode passes.
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
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.types import StepPlan

from .steps import HOST_FEATURES, PASS_FEATURES, Step, host_features, matrix, pass_features, plan_line

SCHEMA = "sparkinfer/step-costs/v1"
ROUNDS = 4
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
    rows: Sequence[Sequence[float]], seconds: Sequence[float], groups: Sequence[bool] | None = None
) -> list[float]:
    """Non-negative coefficients of `seconds` in the feature rows, with relative errors weighed alike.

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
        x = nnls(a / scale * weights[:, None], b * weights) / scale
        weights = share / np.maximum(a @ x, floor)
    return [float(value) for value in x]


@dataclass(frozen=True, slots=True)
class Host:
    """Costs outside the engine, in seconds, as measured between load generator and engine.

    `ingest`: from a request's start to its arrival in the idle engine, and `ingest_token` for each prompt token.
    `front`: least time between the arrivals of two requests (the server reads and tokenises one after the other).
    `egress`: from the end of a pass to the token's arrival at the client. `issue`: between the first requests of a
    closed loop; `think`: from an answer's end to the next request of that loop; `spacing`: least time between two such
    requests, since answers end together.
    """

    ingest: float = 0.0
    ingest_token: float = 0.0
    front: float = 0.0
    egress: float = 0.0
    issue: float = 0.0
    think: float = 0.0
    spacing: float = 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """A fitted cost model with what it was fitted on. Coefficients are seconds per unit of each feature."""

    pass_weights: list[float]
    host_weights: list[float]
    host: Host
    scheduler: SchedulerConfig
    about: dict[str, Any] = field(default_factory=dict)

    def pass_seconds(self, plan: StepPlan) -> float:
        """How long the model runner takes for a plan."""
        return float(np.dot(self.pass_weights, pass_features(plan_line(plan))))

    def host_seconds(self, plan: StepPlan) -> float:
        """What follows the pass before the next one can begin: scheduling, sending, the server's share of the CPU."""
        return float(np.dot(self.host_weights, host_features(plan_line(plan))))

    def describe(self) -> str:
        """The coefficients that are not zero, in microseconds."""
        lines = []
        for name, weights, features in (
            ("pass", self.pass_weights, PASS_FEATURES),
            ("host", self.host_weights, HOST_FEATURES),
        ):
            terms = [f"{w * 1e6:.4g} x {f}" for w, f in zip(weights, features, strict=True) if w > 0]
            lines.append(f"{name} (us): " + " + ".join(terms))
        values = dataclasses.asdict(self.host)
        lines.append("around (ms): " + ", ".join(f"{name} {value * 1e3:.3g}" for name, value in values.items()))
        return "\n".join(lines)


def fit(steps: Sequence[Sequence[Step]], host: Host, scheduler: SchedulerConfig, about: dict[str, Any]) -> Costs:
    """Fit from stretches of consecutive steps. Raises ConfigError for too few of them."""
    all_steps = [step for stretch in steps for step in stretch]
    if len(all_steps) < FEWEST_STEPS:
        raise ConfigError(
            f"{len(all_steps)} steps are too few to fit a cost model from: record a load of at least {FEWEST_STEPS}"
        )
    # Few steps carry prompts, but they are all that the time to the first token consists of.
    carries = [bool(s.line.get("p")) for s in all_steps]
    passes = fit_linear([pass_features(s.line) for s in all_steps], [s.seconds for s in all_steps], carries)
    rows, gaps = [], []
    for stretch in steps:
        for step, following in itertools.pairwise(stretch):
            gap = following.wall_s - step.end_s
            if gap < LONGEST_GAP_S and following.line["d"]:
                rows.append(host_features(step.line))
                gaps.append(max(0.0, gap))
    between = fit_linear(rows, gaps) if len(gaps) >= FEWEST_STEPS else [0.0] * len(HOST_FEATURES)
    return Costs(passes, between, host, scheduler, {**about, "steps": len(all_steps)})


def error_of(costs: Costs, steps: Sequence[Step]) -> float:
    """Sum of the predicted pass times over that of the measured ones, less 1."""
    predicted = float((matrix([pass_features(s.line) for s in steps]) @ np.asarray(costs.pass_weights)).sum())
    return predicted / sum(s.seconds for s in steps) - 1


def save(costs: Costs, path: Path) -> None:
    """Write as JSON: temporary name first, then rename."""
    document = {"schema": SCHEMA, **dataclasses.asdict(costs)}
    document["pass_weights"] = dict(zip(PASS_FEATURES, costs.pass_weights, strict=True))
    document["host_weights"] = dict(zip(HOST_FEATURES, costs.host_weights, strict=True))
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)


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
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a cost model ({error}): make one with eval/simulate.py --save") from error
