"""A closed loop by token ids over /v1/completions: a quick look at any engine, without tokenizer, template or AIPerf.

Both engines get the same seeded random ids for a cell, all prompts distinct. Plain asyncio streams read the events:
at thousands of tokens a second a full HTTP client would cost the measured server its CPU.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from sparkinfer.errors import EnvironmentProblem
from sparkinfer_eval.records import Record

FIRST_ID = 1000
"""Smaller ids may be special tokens."""
LINE_LIMIT = 1 << 22


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    id: str
    phase: str
    prompt: list[int]
    output_tokens: int


def jobs(cell: str, phase: str, count: int, prompt_tokens: int, output_tokens: int, vocab: int, seed: int) -> list[Job]:
    """`count` requests of a cell; the same for every engine."""
    draw = random.Random(f"{cell}-{phase}-{seed}")
    return [
        Job(
            f"{cell}-{phase}-{index}",
            phase,
            [draw.randrange(FIRST_ID, vocab) for _ in range(prompt_tokens)],
            output_tokens,
        )
        for index in range(count)
    ]


async def _request(host: str, port: int, model: str, job: Job, timeout_s: float) -> Record:
    body = json.dumps(
        {
            "model": model,
            "prompt": job.prompt,
            "max_tokens": job.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    start, origin = time.time_ns(), time.perf_counter_ns()
    tokens: list[int] = []
    usage: dict[str, int] = {}
    finish: str | None = None
    error: str | None = None
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, limit=LINE_LIMIT)
            writer.write(head.encode() + body)
            await writer.drain()
            status = (await reader.readline()).decode("latin-1").strip()
            if " 200 " not in f"{status} ":
                error = f"{status}: {(await reader.read(2000)).decode('utf-8', 'replace')[-300:]}"
            # Lines of chunk sizes and headers lie between those of the events; only the latter matter.
            while error is None and (line := await reader.readline()):
                if not line.startswith(b"data: {"):
                    continue
                now = start + time.perf_counter_ns() - origin
                event = json.loads(line[6:])
                if event.get("error"):
                    error = str(event["error"])[:300]
                for choice in event.get("choices") or ():
                    if choice.get("text") or choice.get("token_ids"):
                        tokens.append(now)
                    finish = choice.get("finish_reason") or finish
                usage = event.get("usage") or usage
    except (OSError, TimeoutError, ValueError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    finally:
        if writer is not None:
            writer.close()
    if error is None and (not tokens or usage.get("completion_tokens") != job.output_tokens):
        error = f"{usage.get('completion_tokens')} tokens instead of {job.output_tokens}"
    end = tokens[-1] if tokens else start + time.perf_counter_ns() - origin
    digest = hashlib.sha256(json.dumps(job.prompt).encode()).hexdigest()
    return Record(
        job.id, job.phase, digest, usage.get("prompt_tokens"), usage.get("completion_tokens"), start,
        tokens[0] if tokens else None, end, finish, error, tokens,
    )  # fmt: skip


async def _loop(
    url: str, model: str, waves: Sequence[Sequence[Job]], concurrency: int, timeout_s: float
) -> list[Record]:
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    records: list[Record] = []
    for wave in waves:
        waiting = list(wave)[::-1]

        async def user(waiting: list[Job] = waiting) -> None:
            while waiting:
                records.append(await _request(host, port, model, waiting.pop(), timeout_s))

        await asyncio.gather(*(user() for _ in range(concurrency)))
    return records


def run(
    url: str, model: str, waves: Sequence[Sequence[Job]], concurrency: int, timeout_s: float = 300.0
) -> list[Record]:
    """Send the waves one after another, `concurrency` requests at a time.

    Raises EnvironmentProblem when a request fails: figures of fewer requests would be those of another load.
    """
    gc.collect()
    gc.disable()
    try:
        records = asyncio.run(_loop(url, model, waves, concurrency, timeout_s))
    finally:
        gc.enable()
    failed = [record for record in records if record.error is not None]
    if failed:
        raise EnvironmentProblem(f"{len(failed)} of {len(records)} requests failed: {failed[0].error}")
    return records
