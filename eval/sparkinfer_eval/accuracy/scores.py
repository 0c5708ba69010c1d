"""What an engine says about a task, and the file that keeps it."""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkinfer.errors import ConfigError
from sparkinfer.output import write_bytes

from .held_out import Task

RECORD_TOP = 32
"""Alternatives that a record keeps: all that a server gives, and enough of a local engine's."""
SCHEMA = "sparkinfer/accuracy-scores/v1"


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


def _likeliest(top: dict[int, float]) -> list[list[Any]]:
    """[ids, logprobs] of the first `RECORD_TOP`."""
    return [list(top)[:RECORD_TOP], [round(value, 6) for value in top.values()][:RECORD_TOP]]


def write_scores(path: Path, task: Task, scores: Scores) -> None:
    """Write a record: xz-compressed JSON, to a temporary name first. Raises EnvironmentProblem."""
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
            scores.windows[name] = [Position(p, t, dict(zip(ids, v, strict=True))) for p, t, ids, v in rows]
        for name, (tokens, tops) in document["answers"].items():
            scores.answers[name] = GreedyAnswer(tokens, [dict(zip(ids, v, strict=True)) for ids, v in tops])
        return Task(**document["task"]), scores
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist: write it with --record") from error
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a record of scores ({error}): write it again with --record") from error
