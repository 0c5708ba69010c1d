"""AIPerf's export, read into `Record`s.

Three files of its artifact folder are used: `profile_export.jsonl` (times and server token counts of every request,
warm-up too), `profile_export_raw.jsonl` (what was sent and every streamed chunk: the finish reason is in no other
file) and `profile_export_aiperf.json` (its own summary, kept to cross-check ours).
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from . import metrics
from .gates import InvalidRun
from .prompts import PromptSet
from .records import Record

# Keys of the summary that are kept in result.json.
SUMMARY = (
    "schema_version",
    "aiperf_version",
    "benchmark_id",
    "start_time",
    "end_time",
    "request_count",
    "request_throughput",
    "output_token_throughput",
    "benchmark_duration",
    "time_to_first_token",
    "inter_token_latency",
    "request_latency",
    "credit_to_start_latency",
    "request_error_rate",
    "osl_mismatch_count",
    "is_complete",
    "was_cancelled",
    "error_summary",
)
LATENCIES = {
    "ttft_ms": "time_to_first_token",
    "itl_ms": "inter_token_latency",
    "request_latency_ms": "request_latency",
}
STATS = {"mean": "avg", "p50": "p50", "p90": "p90", "p99": "p99"}
PLAIN = {
    "requests": "request_count",
    "duration_s": "benchmark_duration",
    "output_tok_s": "output_token_throughput",
    "requests_s": "request_throughput",
}


@dataclass(frozen=True)
class Export:
    """The records of one AIPerf run, its summary, and how many requests the raw export lacks."""

    records: list[Record]
    summary: dict[str, Any]
    missing_raw: int

    def summary_figures(self) -> dict[str, float | None]:
        """AIPerf's own figures under our names (`ttft_ms/p50`); None where it has none."""
        found: dict[str, float | None] = {ours: self._value(theirs, "avg") for ours, theirs in PLAIN.items()}
        for ours, theirs in LATENCIES.items():
            for stat, key in STATS.items():
                found[f"{ours}/{stat}"] = self._value(theirs, key)
        return found

    def _value(self, metric: str, key: str) -> float | None:
        entry = self.summary.get(metric)
        value = entry.get(key) if isinstance(entry, dict) else None
        return float(value) if isinstance(value, int | float) else None


def recomputed(export: Export) -> dict[str, float]:
    """The figures of AIPerf's summary computed from its records; empty when there are none to have.

    Its rates are over a window from the first decision to send to the end of the last stream, a few ms longer than
    first start to last content (`metrics.duration_s`, which its `benchmark_duration` is): its own window is used here.
    """
    measured = metrics.measured(export.records)
    try:
        begin, end = (dt.datetime.fromisoformat(export.summary[key]) for key in ("start_time", "end_time"))
        window = (end - begin).total_seconds()
        found = {
            "requests": float(len(measured)),
            "duration_s": metrics.duration_s(measured),
            "output_tok_s": sum(record.output_tokens or 0 for record in measured) / window,
            "requests_s": len(measured) / window,
        }
        values = metrics.summarise(measured)
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        # No request succeeded, or times are missing or impossible: there is nothing to compare, and the gate says so.
        return {}
    return found | {f"{value.metric}/{value.stat}": value.value for value in values if value.stat != "value"}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """JSON objects of a JSONL file. Raises InvalidRun when it is missing or damaged."""
    try:
        with path.open(encoding="utf-8") as handle:
            for number, line in enumerate(handle, 1):
                value = json.loads(line)
                if not isinstance(value, dict):
                    raise InvalidRun(f"{path.name}, line {number}: not an object: the export is damaged")
                yield value
    except FileNotFoundError as error:
        raise InvalidRun(f"AIPerf wrote no {path.name}: did any request succeed?") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidRun(f"{path.name} is damaged ({error})") from error


def ending(raw: dict[str, Any]) -> tuple[str | None, str | None]:
    """(finish reason, error) in the streamed chunks of one raw record: the last reason, the first error event.

    AIPerf 0.13 takes an error event inside a 200 stream for the end of a good answer.
    """
    reason, failure = None, None
    for response in raw.get("responses", ()):
        for packet in response.get("packets", ()):
            text = packet.get("value") or ""
            # Most chunks have neither: look before parsing.
            if packet.get("name") != "data" or not ('"finish_reason"' in text or '"error"' in text):
                continue
            chunk = json.loads(text)
            for choice in chunk.get("choices") or ():
                reason = choice.get("finish_reason") or reason
            if chunk.get("error") and failure is None:
                failure = str(chunk["error"].get("message") if isinstance(chunk["error"], dict) else chunk["error"])
    return reason, failure


def prompt_sent(raw: dict[str, Any]) -> str:
    """Sha256 of the user message that was sent (one message of plain text). Raises InvalidRun on another form."""
    try:
        (message,) = raw["payload"]["messages"]
        content = message["content"]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRun("a raw record holds no single chat message: the export is damaged") from error
    if not isinstance(content, str):
        raise InvalidRun("AIPerf sent a message in parts instead of plain text: templates may count it differently")
    return hashlib.sha256(content.encode()).hexdigest()


def _record(entry: dict[str, Any], raw: dict[str, Any] | None) -> Record:
    """One `Record` from a line of profile_export.jsonl and its raw record.

    AIPerf keeps wall-clock start and monotonic differences; all times here are its start plus its differences.
    `token_ns` are the arrival times of content chunks (a chunk is one token on servers that stream each).
    """
    meta, values = entry["metadata"], entry.get("metrics") or {}

    def value(name: str) -> Any:
        found = values.get(name)
        return None if found is None else found["value"]

    start = int(meta["request_start_ns"])
    first, latency = value("time_to_first_token"), value("request_latency")
    first_ns = None if first is None else start + round(first * metrics.NS_PER_MS)
    gaps = value("inter_chunk_latency")
    token_ns = None
    if first_ns is not None and gaps is not None:
        token_ns = list(accumulate((round(gap * metrics.NS_PER_MS) for gap in gaps), initial=first_ns))
    reason, event = (None, None) if raw is None else ending(raw)
    failure = entry.get("error") or (None if event is None else {"message": event})
    if failure is None and (meta.get("was_cancelled") or latency is None):
        failure = {"message": "cancelled" if meta.get("was_cancelled") else "the answer had no content"}
    return Record(
        request_id=str(meta["conversation_id"]),
        phase=str(meta["benchmark_phase"]),
        prompt_sha256="" if raw is None else prompt_sent(raw),
        prompt_tokens=value("usage_prompt_tokens"),
        output_tokens=value("usage_completion_tokens"),
        start_ns=start,
        first_token_ns=first_ns,
        end_ns=int(meta["request_end_ns"]) if latency is None else start + round(latency * metrics.NS_PER_MS),
        finish_reason=reason,
        error=None if failure is None else str(failure.get("message") or failure)[:500],
        token_ns=token_ns,
    )


def read_export(folder: Path, prompts: PromptSet) -> Export:
    """Read an artifact folder. Raises InvalidRun when a file is missing, damaged, or holds no request.

    A failed request's record lacks what it never got; the gates decide what that means.
    """
    path = folder / "profile_export_aiperf.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidRun(f"AIPerf wrote no {path.name}: see aiperf.log") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidRun(f"{path.name} is damaged ({error})") from error
    if not isinstance(summary, dict):
        raise InvalidRun(f"{path.name} is damaged: no object at its top")
    raws: dict[tuple[str, str], dict[str, Any]] = {}
    records, missing = [], 0
    try:
        for raw in _lines(folder / "profile_export_raw.jsonl"):
            raws[raw["metadata"]["conversation_id"], raw["metadata"]["benchmark_phase"]] = raw
        for entry in _lines(folder / "profile_export.jsonl"):
            matching = raws.get((entry["metadata"]["conversation_id"], entry["metadata"]["benchmark_phase"]))
            missing += matching is None
            records.append(_record(entry, matching))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRun(
            f"AIPerf's export is damaged or of another version ({type(error).__name__}: {error})"
        ) from error
    if not records:
        raise InvalidRun(f"AIPerf exported no request of the {len(prompts.rows)} asked for")
    records.sort(key=lambda record: (record.start_ns, record.request_id))
    return Export(records, summary, missing)
