"""The per-request record that every measurement ends in, and the raw-result folder that holds it.

A raw result is `results/<run>/b<block>/<engine>/<model>/<cell>/r<rep>/` with
`records.jsonl` (one `Record` a line, warm-up too), `result.json` (a `RawResult`), `command.txt`, and the load
generator's own export under `aiperf/` or `arrivals/`. It appears by rename, after its checks have passed: a folder
without `result.json` is not a result.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULT_SCHEMA = "sparkinfer/raw-result/v1"


@dataclass(frozen=True, slots=True)
class Record:
    """One request as the load generator saw it. Times are nanoseconds of one clock within a result.

    `phase` is `warmup` or `profiling`. `output_tokens` and `prompt_tokens` are the server's own usage counts.
    """

    request_id: str
    phase: str
    prompt_sha256: str
    prompt_tokens: int | None
    output_tokens: int | None
    start_ns: int
    first_token_ns: int | None
    end_ns: int
    finish_reason: str | None
    error: str | None = None
    token_ns: list[int] | None = None
    label: str | None = None
    """Class of the request where a cell has several (Poisson arrivals: `short`, `long`)."""


@dataclass(frozen=True, slots=True)
class RawResult:
    """What was measured, with what, and the load generator's own summary (kept to cross-check ours)."""

    run: str
    block: int
    engine: str
    engine_version: str
    engine_digest: str
    model: str
    model_digest: str
    cell: str
    rep: int
    cell_definition: dict[str, Any]
    cell_digest: str
    prompts_sha256: str
    command: list[str]
    started_at: str
    tool: dict[str, str]
    tool_summary: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    schema: str = RESULT_SCHEMA


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write one JSON object a line."""
    with path.open("w", encoding="utf-8") as handle:
        for record in records:
            handle.write(json.dumps(dataclasses.asdict(record), separators=(",", ":")) + "\n")


def read_records(path: Path) -> list[Record]:
    """Read `records.jsonl`. Raises ValueError naming the line that does not fit."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            records.append(Record(**json.loads(line)))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}:{number}: not a request record ({error})") from error
    return records


def read_result(folder: Path) -> RawResult:
    """Read a folder's `result.json`. Raises FileNotFoundError or ValueError with the reason."""
    path = folder / "result.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema") != RESULT_SCHEMA:
        raise ValueError(f"{path}: schema is {data.get('schema')!r}, expected {RESULT_SCHEMA!r}")
    return RawResult(**data)
