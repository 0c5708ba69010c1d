"""Validity gates: what must hold before a load generator's run becomes a result.

A gate is a value held against a limit. Every gate of a run is evaluated, so that the first reason shown is not the
only one known; a run with a failed gate is no result (`InvalidRun`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparkinfer.errors import SparkinferError

from .cells import Cell
from .prompts import PromptSet
from .records import Record


class InvalidRun(SparkinferError):
    """A measurement ran but may not become a result; the text holds the reasons."""


@dataclass(frozen=True)
class Gate:
    """One gate: `value` against `limit`; `reason` says in words what was found, for a failed one."""

    name: str
    value: float | int | str | None
    limit: float | int | str
    ok: bool
    reason: str = ""

    def as_check(self) -> dict[str, Any]:
        """The form kept in `RawResult.checks`: name, value, limit, ok."""
        values = asdict(self)
        del values["reason"]
        return values


def count_gate(name: str, faults: Sequence[str], what: str) -> Gate:
    """A gate that allows no fault; `faults` are descriptions, the first three are shown."""
    shown = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
    return Gate(name, len(faults), 0, not faults, f"{len(faults)} {what}: {shown}" if faults else "")


def limit_gate(name: str, value: float | None, limit: float, what: str) -> Gate:
    """A gate that a measured value passes at or below its limit; a value that is missing does not pass."""
    if value is None:
        return Gate(name, None, limit, False, f"{what} is not known")
    reason = "" if value <= limit else f"{what} is {value:.4g}, the limit is {limit:.4g}"
    return Gate(name, value, limit, value <= limit, reason)


def request_count(cell: Cell, records: Sequence[Record]) -> Gate:
    """Exactly the asked number of requests in each phase, each once."""
    found = Counter(record.phase for record in records)
    repeated = [name for name, n in Counter(record.request_id for record in records).items() if n > 1]
    faults = [
        f"{found[phase]} {phase} requests instead of {asked}"
        for phase, asked in (("profiling", cell.requests), ("warmup", cell.warmup_requests))
        if found[phase] != asked
    ]
    return count_gate("request_count", faults + [f"request {name} was sent twice" for name in repeated], "faults")


def errors(records: Iterable[Record]) -> Gate:
    """No request failed, warm-up included."""
    faults = [f"{record.request_id}: {record.error}" for record in records if record.error is not None]
    return count_gate("errors", faults, "requests failed")


def prompts_sent(prompts: PromptSet, records: Iterable[Record]) -> Gate:
    """Every request sent the prompt that the prompts file holds under its id, in the phase it is meant for."""
    expected = {row["session_id"]: (row["phase"], row["sha256"]) for row in prompts.rows}
    faults = []
    for record in records:
        if record.request_id not in expected:
            faults.append(f"request {record.request_id} is not in the prompts file")
        elif expected[record.request_id] != (record.phase, record.prompt_sha256):
            faults.append(f"request {record.request_id} ({record.phase}) did not send the prompt of the file")
    return count_gate("prompts_sent", faults, "requests do not match the prompts file")


def disjoint_prompts(records: Sequence[Record]) -> Gate:
    """No measured prompt was sent in warm-up, and none was measured twice."""
    warm = {record.prompt_sha256 for record in records if record.phase == "warmup"}
    measured = [record for record in records if record.phase == "profiling"]
    counts = Counter(record.prompt_sha256 for record in measured)
    faults = [f"{r.request_id} was in warm-up" for r in measured if r.prompt_sha256 in warm]
    faults += [f"{r.request_id} shares its prompt" for r in measured if counts[r.prompt_sha256] > 1]
    return count_gate("disjoint_prompts", faults, "measured prompts were not new to the server")


def output_lengths(prompts: PromptSet, records: Iterable[Record]) -> Gate:
    """Every answer has exactly the asked number of tokens by the server's own count."""
    asked = {row["session_id"]: row["output_length"] for row in prompts.rows}
    faults = [
        f"{r.request_id}: {r.output_tokens} instead of {asked.get(r.request_id)}"
        for r in records
        if r.error is None and r.output_tokens != asked.get(r.request_id)
    ]
    return count_gate("output_lengths", faults, "answers have another length than asked (is ignore_eos honoured?)")


def finish_reasons(records: Iterable[Record]) -> Gate:
    """Every answer ended because its length was reached."""
    faults = [
        f"{r.request_id}: {r.finish_reason!r}" for r in records if r.error is None and r.finish_reason != "length"
    ]
    return count_gate("finish_reasons", faults, "answers did not end by length")


def prompt_tokens(cell: Cell, records: Iterable[Record]) -> Gate:
    """The server counted the cell's prompt length for every request."""
    faults = [
        f"{r.request_id}: {r.prompt_tokens} instead of {cell.prompt_tokens}"
        for r in records
        if r.error is None and r.prompt_tokens != cell.prompt_tokens
    ]
    return count_gate("prompt_tokens", faults, "prompts count differently (another tokenizer or chat template?)")


def times(records: Iterable[Record], begin_ns: int, end_ns: int) -> Gate:
    """start <= first token <= end in every record, inside this run's own time (another run's export is outside)."""
    faults = []
    for r in records:
        if r.error is not None:
            continue
        if r.first_token_ns is None:
            faults.append(f"{r.request_id} has no first token")
        elif not r.start_ns <= r.first_token_ns <= r.end_ns:
            faults.append(f"{r.request_id}: start, first token and end are out of order")
        elif r.start_ns < begin_ns or r.end_ns > end_ns:
            faults.append(f"{r.request_id} ran outside of this run: a stale export")
    return count_gate("times", faults, "records have impossible times")


def prefix_cache(before: float | None, after: float | None, records: Iterable[Record], limit: float) -> Gate:
    """Share of the sent prompt tokens that the server's prefix cache says it served."""
    name, what = "prefix_cache_hits", "the share of prompt tokens served by the prefix cache"
    if before is None or after is None:
        return Gate(name, None, limit, False, "the server's /metrics has no prefix-cache hit counter")
    if after < before:
        return Gate(name, None, limit, False, "the prefix-cache counter fell: the server restarted during the run")
    sent = sum(record.prompt_tokens or 0 for record in records)
    return limit_gate(name, (after - before) / sent if sent else None, limit, what)


def start_delay(delay_ms: float | None, latency_ms: float | None, limit: float) -> Gate:
    """The load generator's own mean delay before a send, as a share of the mean request with it.

    That share of the time a request in flight was missing, so that the offered load was lower than asked.
    """
    share = None
    if delay_ms is not None and latency_ms is not None and delay_ms + latency_ms > 0:
        share = max(0.0, delay_ms) / (max(0.0, delay_ms) + latency_ms)
    return limit_gate("start_delay_share", share, limit, "the share of a request's time lost in the load generator")


def common(cell: Cell, prompts: PromptSet, records: Sequence[Record], begin_ns: int, end_ns: int) -> list[Gate]:
    """The gates that hold for any load generator's records."""
    return [
        request_count(cell, records),
        errors(records),
        prompts_sent(prompts, records),
        disjoint_prompts(records),
        output_lengths(prompts, records),
        finish_reasons(records),
        prompt_tokens(cell, records),
        times(records, begin_ns, end_ns),
    ]


def require(gates: Iterable[Gate], context: str) -> list[dict[str, Any]]:
    """The gates as checks. Raises InvalidRun with every failed gate's reason."""
    found = list(gates)
    failed = [gate for gate in found if not gate.ok]
    if failed:
        reasons = " | ".join(f"{gate.name}: {gate.reason}" for gate in failed)
        raise InvalidRun(f"{context} is not a result: {reasons}")
    return [gate.as_check() for gate in found]


def relative_difference(ours: float, theirs: float) -> float:
    """|ours - theirs| over the larger of the two magnitudes; 0 for two zeros."""
    scale = max(abs(ours), abs(theirs))
    return abs(ours - theirs) / scale if scale else 0.0


def agreement(name: str, ours: Mapping[str, float], theirs: Mapping[str, float | None], limit: float) -> Gate:
    """Our figures, recomputed from the records, against the load generator's own summary of them."""
    missing = [figure for figure in ours if theirs.get(figure) is None]
    if missing or not ours:
        return Gate(name, None, limit, False, f"the summary lacks {', '.join(missing) or 'every figure'}")
    differences = {figure: relative_difference(value, float(theirs[figure] or 0.0)) for figure, value in ours.items()}
    worst = max(differences, key=lambda figure: differences[figure])
    gate = limit_gate(name, differences[worst], limit, f"the relative difference in {worst}")
    shown = f"{gate.reason} (from records {ours[worst]:.6g}, summary {theirs[worst]:.6g}): a damaged or stale export"
    return Gate(gate.name, gate.value, gate.limit, gate.ok, "" if gate.ok else shown)
