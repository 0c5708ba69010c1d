"""A closed loop of streaming chats, for comparisons of one engine with itself; benchmark cells are AIPerf's."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from typing import Any

import httpx

from sparkinfer.errors import EnvironmentProblem

from .arrivals import request_body, to_record
from .records import Record
from .sse import stream_chat


async def _run(
    url: str, served_name: str, rows: Sequence[dict[str, Any]], concurrency: int, timeout_s: float
) -> list[Record]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
    waiting = list(rows)[::-1]
    records: list[Record] = []
    async with httpx.AsyncClient(base_url=url.rstrip("/"), limits=limits, trust_env=False) as client:

        async def user() -> None:
            while waiting:
                row = waiting.pop()
                body = request_body(row, served_name, {"temperature": 0.0}, True)
                records.append(to_record(row, await stream_chat(client, body, timeout_s)))

        await asyncio.gather(*(user() for _ in range(concurrency)))
    return records


def closed_loop(
    url: str, served_name: str, rows: Sequence[dict[str, Any]], concurrency: int, timeout_s: float = 300.0
) -> list[Record]:
    """Send all rows (of a prompts file), `concurrency` at a time, greedy, answers of exact length.

    Raises EnvironmentProblem when a request fails: a comparison of fewer requests would be another one.
    """
    # Pauses of the collector would delay sends and time stamps.
    gc.collect()
    gc.disable()
    try:
        records = asyncio.run(_run(url, served_name, rows, concurrency, timeout_s))
    finally:
        gc.enable()
    failed = [record.error for record in records if record.error is not None]
    if failed:
        raise EnvironmentProblem(f"{len(failed)} of {len(records)} requests failed: {failed[0]}")
    return records
