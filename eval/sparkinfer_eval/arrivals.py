"""Open-loop load: requests arrive as planned, whether or not earlier ones have been answered.

An event loop of its own sends each request at its planned time; the plan comes with the prompts file of a cell, or,
when the program is used alone, from a seed. `schedule_lag` is how late requests actually left.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import gc
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sparkinfer.errors import EnvironmentProblem

from . import gates, metrics, server_probe
from .arrival_plan import LONG, SHORT
from .cells import Cell
from .prompts import PromptSet
from .records import RawResult, Record
from .result_folder import Target, check_prompts, staged, write_result
from .sse import StreamResult, stream_chat

TOOL_VERSION = "1"
SCHEDULE = "schedule.json"


@dataclass(frozen=True)
class Planned:
    """One request to send: its row of the prompts file, and seconds after the start (warm-up: 0)."""

    row: dict[str, Any]
    at_s: float

    @property
    def request_id(self) -> str:
        """Id as in the prompts file."""
        return str(self.row["session_id"])


@dataclass(frozen=True)
class Sent:
    """A record with its planned and its actual start (ns, the record's clock)."""

    record: Record
    scheduled_ns: int

    @property
    def lag_ms(self) -> float:
        """How late the request left, in ms."""
        return (self.record.start_ns - self.scheduled_ns) / metrics.NS_PER_MS


def request_body(row: dict[str, Any], served_name: str, sampling: dict[str, float], ignore_eos: bool) -> dict[str, Any]:
    """The chat request of one row: its own seed, the cell's sampling, an exact answer length."""
    return {
        "model": served_name,
        "messages": [{"role": "user", "content": row["text"]}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": row["output_length"],
        "ignore_eos": ignore_eos,
        **sampling,
        **(row.get("extra") or {}),
    }


def to_record(row: dict[str, Any], result: StreamResult) -> Record:
    """The record of one answered (or failed) row."""
    return Record(
        request_id=str(row["session_id"]),
        phase=str(row["phase"]),
        prompt_sha256=hashlib.sha256(row["text"].encode()).hexdigest(),
        prompt_tokens=result.prompt_tokens,
        output_tokens=result.output_tokens,
        start_ns=result.start_ns,
        first_token_ns=result.token_ns[0] if result.token_ns else None,
        end_ns=result.end_ns,
        finish_reason=result.finish_reason,
        error=result.error,
        token_ns=result.token_ns or None,
        label=row.get("label"),
    )


async def send_all(
    url: str,
    served_name: str,
    rows: Sequence[dict[str, Any]],
    cell_sampling: dict[str, float],
    timeout_s: float,
    ignore_eos: bool = True,
) -> list[Sent]:
    """Send warm-up rows one after the other, then the measured ones at their `timestamp` (ms from a common start)."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url.rstrip("/"), limits=limits, trust_env=False) as client:

        async def send(row: dict[str, Any], scheduled_ns: int | None) -> Sent:
            body = request_body(row, served_name, cell_sampling, ignore_eos)
            if scheduled_ns is not None:
                await asyncio.sleep(max(0.0, (scheduled_ns - time.time_ns()) / metrics.NS_PER_S))
            record = to_record(row, await stream_chat(client, body, timeout_s))
            return Sent(record, record.start_ns if scheduled_ns is None else scheduled_ns)

        sent = [await send(row, None) for row in rows if row["phase"] == "warmup"]
        # Pauses of the collector would delay sends and time stamps; there is little to collect in a run.
        gc.collect()
        gc.disable()
        try:
            begin = time.time_ns() + 50_000_000
            measured = [row for row in rows if row["phase"] == "profiling"]
            plan = [send(row, begin + round(row["timestamp"] * metrics.NS_PER_MS)) for row in measured]
            return sent + list(await asyncio.gather(*plan))
        finally:
            gc.enable()


def realised_rate(records: Sequence[Record]) -> float | None:
    """Arrivals per second between the first and the last actual start of the measured requests."""
    starts = sorted(record.start_ns for record in records if record.phase == "profiling")
    if len(starts) < 2 or starts[-1] == starts[0]:
        return None
    return (len(starts) - 1) / ((starts[-1] - starts[0]) / metrics.NS_PER_S)


def rate_gate(records: Sequence[Record], planned: float, limit: float) -> gates.Gate:
    """The realised arrival rate is the planned one within a relative limit."""
    realised = realised_rate(records)
    difference = None if realised is None else abs(realised - planned) / planned
    what = f"the relative difference of the realised arrival rate ({realised or 0.0:.3f}/s planned {planned:.3f}/s)"
    return gates.limit_gate("arrival_rate", difference, limit, what)


def all_failed(records: Sequence[Record]) -> str | None:
    """One sentence when no request succeeded: the server is down, refuses everything, or hangs."""
    failures = [record.error for record in records if record.error is not None]
    if not records or len(failures) < len(records):
        return None
    kinds = sorted(set(failures))
    return f"all {len(failures)} requests failed: {kinds[0]}" + (f" (and {len(kinds) - 1} others)" if kinds[1:] else "")


def figures(sent: Sequence[Sent]) -> dict[str, Any]:
    """Tokens over makespan, latency mean and p90 (s), counts per class, realised rate, lag; measured requests only."""
    records = [item.record for item in sent]
    measured = metrics.measured(records)
    latencies = [value / 1000 for value in metrics.request_latency_ms(records)]
    lags = [item.lag_ms for item in sent if item.record.phase == "profiling"]
    by_class = {}
    for label in (SHORT, LONG):
        members = [record for record in measured if record.label == label]
        if members:
            by_class[label] = {
                "requests": len(members),
                "output_tokens": sum(record.output_tokens or 0 for record in members),
                "latency_mean_s": metrics.statistic([v / 1000 for v in metrics.request_latency_ms(members)], "mean"),
            }
    return {
        "requests": len(measured),
        "makespan_s": metrics.duration_s(records),
        "output_tok_s": metrics.output_tok_s(records),
        "latency_mean_s": metrics.statistic(latencies, "mean"),
        "latency_p90_s": metrics.percentile(latencies, 90),
        "latency_p90_supported": metrics.percentile_supported(len(latencies), 90),
        "classes": by_class,
        "arrival_rate": realised_rate(records),
        "schedule_lag_p99_ms": metrics.percentile(lags, 99),
    }


def render(values: dict[str, Any]) -> str:
    """`figures` as the lines the program prints."""
    thin = "" if values["latency_p90_supported"] else f" (from {values['requests']} requests only)"
    rate = "-" if values["arrival_rate"] is None else f"{values['arrival_rate']:.2f}/s"
    lines = [
        f"requests       {values['requests']} in {values['makespan_s']:.2f} s, arriving at {rate}",
        f"output         {values['output_tok_s']:.1f} tok/s (tokens over makespan)",
        f"latency        mean {values['latency_mean_s']:.3f} s, p90 {values['latency_p90_s']:.3f} s{thin}",
    ]
    for label, entry in values["classes"].items():
        lines.append(
            f"{label:<15s}{entry['requests']} requests, {entry['output_tokens']} tokens, "
            f"mean {entry['latency_mean_s']:.3f} s"
        )
    lines.append(f"schedule lag   p99 {values['schedule_lag_p99_ms']:.1f} ms")
    return "\n".join(lines)


def measure(
    url: str, served_name: str, cell: Cell, prompts: PromptSet, target: Target, command: Sequence[str]
) -> RawResult:
    """Run one open-loop cell and publish its result folder.

    Raises gates.InvalidRun when the run may not become a result, ConfigError and EnvironmentProblem as named there.
    """
    check_prompts(cell, prompts, target.block)
    assert cell.rate is not None
    with staged(target) as staging:
        server_probe.reset_prefix_cache(url)
        hits = server_probe.prefix_hits(url)
        started, begin_ns = dt.datetime.now(dt.UTC), time.time_ns()
        sent = asyncio.run(
            send_all(url, served_name, prompts.rows, cell.sampling, cell.request_timeout_s, cell.ignore_eos)
        )
        end_ns = time.time_ns()
        records = [item.record for item in sent]
        _write_schedule(staging / "arrivals", sent)
        reason = all_failed(records)
        if reason is not None:
            raise gates.InvalidRun(f"cell {cell.id} of {target.engine} is not a result: {reason}")
        lag = metrics.statistic([item.lag_ms for item in sent if item.record.phase == "profiling"], "mean")
        latency = metrics.statistic(metrics.request_latency_ms(records), "mean")
        found = [
            *gates.common(cell, prompts, records, begin_ns, end_ns),
            rate_gate(records, cell.rate, cell.gates["arrival_rate"]),
            gates.start_delay(lag, latency, cell.gates["start_delay_share"]),
            gates.prefix_cache(hits, server_probe.prefix_hits(url), records, cell.gates["prefix_cache_hits"]),
        ]
        checks = gates.require(found, f"cell {cell.id} of {target.engine}")
        tool = {"name": "spec_open_arrivals", "version": TOOL_VERSION}
        return write_result(staging, target, cell, prompts, records, command, started, tool, figures(sent), checks)


def _write_schedule(folder: Path, sent: Sequence[Sent]) -> None:
    """Planned and actual start of each measured request."""
    folder.mkdir()
    rows = [
        {"request_id": item.record.request_id, "scheduled_ns": item.scheduled_ns, "start_ns": item.record.start_ns}
        for item in sent
        if item.record.phase == "profiling"
    ]
    (folder / SCHEDULE).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def served_model(url: str) -> str:
    """The first model that the server lists. Raises EnvironmentProblem when it does not answer or lists none."""
    try:
        answer = httpx.get(url.rstrip("/") + "/v1/models", timeout=10, trust_env=False)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise EnvironmentProblem(f"{url}/v1/models does not name a model ({error}): is the server up?") from error
