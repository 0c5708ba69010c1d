"""The ledger of attempts that did not become a result: `results/<run>/failures/*.json`, one file each.

A cell without a result is reported as missing with the newest reason found here; an attempt that failed before a
later one succeeded is listed too.
"""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkinfer.errors import ConfigError
from sparkinfer_eval.report.run_info import write_json

FAILURE_SCHEMA = "sparkinfer/failure/v1"


@dataclass(frozen=True, slots=True)
class Failure:
    """One attempt at a cell that ended without a result, and why."""

    block: int
    engine: str
    model: str
    cell: str
    rep: int
    reason: str
    at: str
    schema: str = FAILURE_SCHEMA


def record_failure(run_folder: Path, *, block: int, engine: str, model: str, cell: str, rep: int, reason: str) -> Path:
    """Add one failed attempt to the run's ledger and return its file. `reason` is one readable sentence."""
    now = dt.datetime.now(dt.UTC)
    failure = Failure(block, engine, model, cell, rep, reason, now.isoformat(timespec="seconds"))
    stamp = now.strftime("%Y%m%dT%H%M%S%f")
    path = run_folder / "failures" / f"b{block}-{engine}-{model}-{cell}-r{rep}-{stamp}.json"
    write_json(path, asdict(failure))
    return path


def read_failures(run_folder: Path) -> list[Failure]:
    """All failed attempts of a run, oldest first. Raises ConfigError naming a file that does not fit."""
    found = []
    for path in sorted((run_folder / "failures").glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.get("schema") != FAILURE_SCHEMA:
                raise ValueError(f"schema is {data.get('schema')!r}, expected {FAILURE_SCHEMA!r}")
            found.append(Failure(**data))
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is not a failure record ({error}): correct or remove it") from error
    return sorted(found, key=lambda f: (f.at, f.block, f.engine, f.model, f.cell, f.rep))
