"""Figures from records equal hand-computed ones and follow AIPerf's definitions; requests.parquet keeps its schema."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sparkinfer_eval import metrics, parquet
from sparkinfer_eval.records import RawResult, Record, read_records, write_records

from sparkinfer.errors import ConfigError

MS = 1_000_000


def record(index: int, start: int, first: int, end: int, tokens: int = 11, **change: Any) -> Record:
    """Times in ms."""
    base = Record(
        request_id=f"r{index}",
        phase="profiling",
        prompt_sha256=f"{index:064d}",
        prompt_tokens=128,
        output_tokens=tokens,
        start_ns=start * MS,
        first_token_ns=first * MS,
        end_ns=end * MS,
        finish_reason="length",
    )
    return dataclasses.replace(base, **change)


def raw_result(**change: Any) -> RawResult:
    values: dict[str, Any] = {
        "run": "0.1.0-cpu-12345678",
        "block": 1,
        "engine": "sparkinfer",
        "engine_version": "0.1.0",
        "engine_digest": "sha256:aa",
        "model": "spark-tiny-dense",
        "model_digest": "sha256:bb",
        "cell": "chat-c4",
        "rep": 1,
        "cell_definition": {},
        "cell_digest": "sha256:cc",
        "prompts_sha256": "dd",
        "command": ["aiperf"],
        "started_at": "2026-01-01T00:00:00Z",
        "tool": {"name": "aiperf"},
    }
    return RawResult(**(values | change))


RECORDS = [
    record(0, 0, 100, 300),
    record(1, 50, 250, 450),
    record(2, 300, 350, 2000, tokens=1),
    record(3, -9000, -8000, -7000, phase="warmup"),
    record(4, 100, 9000, 9000, error="HTTP 500"),
]


def test_definitions() -> None:
    assert metrics.ttft_ms(RECORDS) == [100.0, 200.0, 50.0]
    assert metrics.request_latency_ms(RECORDS) == [300.0, 400.0, 1700.0]
    # One token has no gap; the others divide by tokens - 1.
    assert metrics.itl_ms(RECORDS) == [20.0, 20.0]
    assert metrics.duration_s(RECORDS) == 2.0
    assert metrics.output_tok_s(RECORDS) == (11 + 11 + 1) / 2.0
    assert metrics.requests_s(RECORDS) == 1.5


def test_percentiles_are_numpys() -> None:
    values = list(np.random.default_rng(3).exponential(size=37))
    for q in (1, 50, 90, 99):
        assert metrics.percentile(values, q) == float(np.percentile(values, q))
    assert metrics.statistic([1.0, 2.0, 4.0], "p50") == 2.0
    assert metrics.statistic([1.0, 2.0, 6.0], "mean") == 3.0
    with pytest.raises(ValueError, match="unknown statistic"):
        metrics.statistic([1.0], "median")
    with pytest.raises(ValueError, match="no values"):
        metrics.percentile([], 50)


@pytest.mark.parametrize(("q", "needed"), [(50, 11), (90, 64), (95, 130), (99, 662)])
def test_requests_needed(q: float, needed: int) -> None:
    assert metrics.requests_needed(q) == needed
    assert metrics.percentile_supported(needed, q)
    assert not metrics.percentile_supported(needed - 1, q)


def test_summary_has_every_figure_and_marks_thin_percentiles() -> None:
    figures = {(value.metric, value.stat): value for value in metrics.summarise(RECORDS)}
    assert {metric for metric, _ in figures} == set(metrics.UNITS)
    assert figures["ttft_ms", "p50"].value == 100.0
    assert figures["ttft_ms", "mean"].supported
    assert not figures["ttft_ms", "p99"].supported
    assert figures["output_tok_s", "value"].n == 3
    many = [record(i, i, i + 5, i + 20) for i in range(64)]
    assert {v.stat: v.supported for v in metrics.summarise(many) if v.metric == "ttft_ms"} == {
        "mean": True,
        "p50": True,
        "p90": True,
        "p99": False,
    }
    with pytest.raises(ValueError, match="nothing to time"):
        metrics.summarise([RECORDS[3], RECORDS[4]])


def test_parquet_has_the_fixed_columns_and_round_trips(tmp_path: Path) -> None:
    records = [*RECORDS, record(9, 5, 6, 7, token_ns=[6 * MS, 7 * MS], label="short", finish_reason=None)]
    path = tmp_path / "requests.parquet"
    folder = tmp_path / "r1"
    folder.mkdir()
    write_records(folder / "records.jsonl", records)
    assert read_records(folder / "records.jsonl") == records
    with pytest.raises(FileNotFoundError):
        parquet.write([folder], path)
    import json

    (folder / "result.json").write_text(json.dumps(dataclasses.asdict(raw_result())))
    assert parquet.write([folder], path) == len(records)
    built = parquet.read(path)
    documented = (
        "run, block, engine, engine_digest, model, cell, rep, request_id, phase, prompt_sha256, prompt_tokens, "
        "output_tokens, start_ns, first_token_ns, end_ns, token_ns, finish_reason, error"
    )
    assert built.column_names[: len(documented.split(", "))] == documented.split(", ")
    back = {row.request_id: row for _, row in parquet.records(built)}
    assert back == {row.request_id: row for row in records}
    assert metrics.summarise(list(back.values())) == metrics.summarise(records)
    first = path.read_bytes()
    parquet.write([folder], path)
    assert path.read_bytes() == first


def test_parquet_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="twice"):
        parquet.table([(raw_result(), [RECORDS[0]]), (raw_result(), [RECORDS[0]])])
    with pytest.raises(ConfigError, match="does not fit"):
        parquet.table([(raw_result(), [dataclasses.replace(RECORDS[0], prompt_tokens="many")])])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="engine_digest"):
        parquet.table([(raw_result(engine_digest=None), [RECORDS[0]])])
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"run": ["x"], "block": pa.array([1], pa.int64())}), other)
    with pytest.raises(ConfigError, match=r"block.*cell"):
        parquet.read(other)
