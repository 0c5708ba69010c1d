"""What an engine says about a task, and the file that keeps it."""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkinfer.errors import ConfigError, SparkinferError
from sparkinfer.output import write_bytes

from .held_out import Task

RECORD_TOP = 32
"""Alternatives that a record keeps: all that a server gives, and enough of a local engine's."""
SCHEMA = "sparkinfer/accuracy-scores/v1"


class NotFinite(SparkinferError):
    """An engine's log-probabilities are no numbers: a check that fails, whatever the other engine says."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Position:
    """An engine's distribution of the token at `position` of a window, as far as it reports it.

    `top` maps token ids to natural-log probabilities, the likeliest first; `target` is that of the token that really
    stands there, None where the engine did not say.
    """

    position: int
    target: float | None
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """A greedy answer: its tokens and the likeliest few at each."""

    tokens: list[int]
    tops: list[dict[int, float]]


@dataclass(slots=True)
class Scores:
    """All that one engine said. `engine` describes it; `method` says how the windows were scored."""

    engine: dict[str, Any]
    method: str
    windows: dict[str, list[Position]] = field(default_factory=dict)
    answers: dict[str, GreedyAnswer] = field(default_factory=dict)


def positions_from(
    ids: list[int],
    target: npt.NDArray[np.float32],
    top_ids: npt.NDArray[np.int64],
    top_logprobs: npt.NDArray[np.float32],
) -> list[Position]:
    """Positions 1.. of a window from arrays [n - 1], [n - 1, k] and [n - 1, k]."""
    return [
        Position(place + 1, float(target[place]), dict(zip(row.tolist(), values.tolist(), strict=True)))
        for place, (row, values) in enumerate(zip(top_ids, top_logprobs, strict=True))
        if place + 1 < len(ids)
    ]


def _places(scores: Scores) -> Iterator[tuple[str, Iterable[float | None]]]:
    """Every scored place in words, with the log-probabilities that the engine gave there."""
    for name, rows in scores.windows.items():
        for row in rows:
            yield f"position {row.position} of {name}", (row.target, *row.top.values())
    for name, answer in scores.answers.items():
        for place, top in enumerate(answer.tops):
            yield f"token {place} of the answer to {name}", top.values()


def require_finite(engine: str, scores: Scores) -> None:
    """Raises NotFinite, naming the first place, where a log-probability is NaN or infinite."""
    wrong = [
        (place, value)
        for place, values in _places(scores)
        for value in values
        if value is not None and not math.isfinite(value)
    ]
    if wrong:
        (place, value), others = wrong[0], len({place for place, _ in wrong}) - 1
        raise NotFinite(
            f"{engine} gives a log-probability of {value} at {place} and at {others} other places: nothing was "
            "compared; look for NaN in its weights or its arithmetic"
        )


def _short(values: Iterable[float]) -> list[float]:
    """The shortest decimals that float32, in which engines compute, reads back as the same numbers."""
    return [float(str(value)) for value in np.fromiter(values, np.float32)]


def _exact(values: list[float]) -> list[float]:
    """What `_short` was given."""
    return list(map(float, np.array(values, np.float32)))


def _likeliest(top: dict[int, float]) -> list[list[Any]]:
    """[ids, logprobs] of the first `RECORD_TOP`."""
    return [list(top)[:RECORD_TOP], _short(list(top.values())[:RECORD_TOP])]


def _top(ids: list[int], logprobs: list[float]) -> dict[int, float]:
    return dict(zip(ids, _exact(logprobs), strict=True))


def write_scores(path: Path, task: Task, scores: Scores) -> None:
    """Write a record: xz-compressed JSON, to a temporary name first. Log-probabilities are kept as float32, exactly.

    Raises EnvironmentProblem. All of them must be finite (`require_finite`).
    """
    document = {
        "schema": SCHEMA,
        "engine": scores.engine,
        "method": scores.method,
        "task": task.as_json(),
        "windows": {
            name: [[p.position, p.target, *_likeliest(p.top)] for p in rows] for name, rows in scores.windows.items()
        },
        "answers": {name: [a.tokens, [_likeliest(top) for top in a.tops]] for name, a in scores.answers.items()},
    }
    write_bytes(path, lzma.compress(json.dumps(document, allow_nan=False).encode(), preset=2))


def read_scores(path: Path) -> tuple[Task, Scores]:
    """Read what `write_scores` wrote. Raises ConfigError for a file that is missing, damaged or something else."""
    try:
        document = json.loads(lzma.decompress(path.read_bytes()))
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema is {document['schema']!r}, expected {SCHEMA!r}")
        scores = Scores(document["engine"], document["method"])
        for name, rows in document["windows"].items():
            scores.windows[name] = [Position(p, t, _top(ids, values)) for p, t, ids, values in rows]
        for name, (tokens, tops) in document["answers"].items():
            scores.answers[name] = GreedyAnswer(tokens, [_top(ids, values) for ids, values in tops])
        return Task(**document["task"]), scores
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist: write it with --record") from error
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a record of scores ({error}): write it again with --record") from error
