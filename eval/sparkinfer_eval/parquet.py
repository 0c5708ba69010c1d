"""`requests.parquet`: every request of a run in one typed table, from its raw-result folders.

The columns are fixed (`SCHEMA`): anything downstream, the report and the verifier alike, reads this file only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sparkinfer.errors import ConfigError

from .records import RawResult, Record, read_records, read_result

SCHEMA = pa.schema(
    [
        pa.field("run", pa.string(), nullable=False),
        pa.field("block", pa.int32(), nullable=False),
        pa.field("engine", pa.string(), nullable=False),
        pa.field("engine_digest", pa.string(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("cell", pa.string(), nullable=False),
        pa.field("rep", pa.int32(), nullable=False),
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("phase", pa.string(), nullable=False),
        pa.field("prompt_sha256", pa.string(), nullable=False),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("output_tokens", pa.int32()),
        pa.field("start_ns", pa.int64(), nullable=False),
        pa.field("first_token_ns", pa.int64()),
        pa.field("end_ns", pa.int64(), nullable=False),
        pa.field("token_ns", pa.list_(pa.int64())),
        pa.field("finish_reason", pa.string()),
        pa.field("error", pa.string()),
        pa.field("label", pa.string()),
    ]
)
RESULT_COLUMNS = ("run", "block", "engine", "engine_digest", "model", "cell", "rep")
RECORD_COLUMNS = tuple(field.name for field in SCHEMA if field.name not in RESULT_COLUMNS)
ENCODING: dict[str, Any] = {
    "use_dictionary": ["run", "engine", "engine_digest", "model", "cell", "phase", "finish_reason", "label"],
    "column_encoding": {"token_ns.list.element": "BYTE_STREAM_SPLIT"},
}
"""Times of tokens are nearly all of the file: with their high bytes side by side it is less than half as large."""


def rows(result: RawResult, records: Iterable[Record]) -> list[dict[str, Any]]:
    """One row per record, in the columns of SCHEMA."""
    common = {name: getattr(result, name) for name in RESULT_COLUMNS}
    return [common | {name: getattr(record, name) for name in RECORD_COLUMNS} for record in records]


def table(results: Iterable[tuple[RawResult, list[Record]]]) -> pa.Table:
    """The table of several results, rows sorted by cell position and start, so that equal input gives equal bytes.

    Raises ConfigError when the same request appears twice or a value does not fit its column.
    """
    collected = [row for result, records in results for row in rows(result, records)]
    key = (*RESULT_COLUMNS, "request_id", "phase")
    seen: set[tuple[Any, ...]] = set()
    for row in collected:
        identity = tuple(row[name] for name in key)
        if identity in seen:
            raise ConfigError(f"request {identity} appears twice: two result folders hold the same measurement")
        seen.add(identity)
    collected.sort(key=lambda row: (*(row[name] for name in RESULT_COLUMNS), row["start_ns"], row["request_id"]))
    try:
        built = pa.Table.from_pylist(collected, schema=SCHEMA)
        # from_pylist does not look at nullable=False; a required value that is missing must not reach the file.
        built.validate(full=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise ConfigError(f"a record does not fit the table: {error}") from error
    for field in SCHEMA:
        if not field.nullable and built.column(field.name).null_count:
            raise ConfigError(f"column {field.name} is missing in {built.column(field.name).null_count} records")
    return built


def write(folders: Iterable[Path], path: Path) -> int:
    """Write `path` from raw-result folders (form in `records`); returns the number of rows.

    Raises FileNotFoundError or ValueError when a folder is not a result, ConfigError when its records do not fit.
    """
    results = [(read_result(folder), read_records(folder / "records.jsonl")) for folder in folders]
    built = table(results)
    temporary = path.with_name(f".{path.name}.part")
    pq.write_table(built, temporary, compression="zstd", compression_level=19, store_schema=True, **ENCODING)
    temporary.replace(path)
    return built.num_rows


def read(path: Path) -> pa.Table:
    """Read a requests table. Raises ConfigError when its columns or types are not SCHEMA's."""
    built = pq.read_table(path)
    if not built.schema.equals(SCHEMA):
        expected, found = (
            {field.name: (str(field.type), field.nullable) for field in s} for s in (SCHEMA, built.schema)
        )
        differing = sorted(
            name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
        ) or ["order of columns"]
        raise ConfigError(f"{path}: not a requests table, differs in {', '.join(differing)}")
    return built


def records(built: pa.Table) -> list[tuple[dict[str, Any], Record]]:
    """The rows of a table as (result columns, `Record`) pairs."""
    names = {field.name for field in dataclasses.fields(Record)}
    pairs = []
    for row in built.to_pylist():
        record = Record(**{name: value for name, value in row.items() if name in names})
        pairs.append(({name: row[name] for name in RESULT_COLUMNS}, record))
    return pairs
