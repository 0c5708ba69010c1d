"""One streaming chat completion over HTTP, timed: the client side of an OpenAI-compatible server."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class StreamResult:
    """What one request got; times are `time.time_ns` derived (wall start plus monotonic differences)."""

    start_ns: int = 0
    end_ns: int = 0
    token_ns: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None


async def events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each server-sent event, `[DONE]` excluded; ends with the stream.

    Lines end with a line feed only: httpx's own also end at U+0085 and U+2028, which JSON may hold as they are.
    """
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip().decode("utf-8", errors="replace")
                if data == "[DONE]":
                    return
                yield data


def _absorb(result: StreamResult, chunk: Any, now_ns: int) -> None:
    """Take one chunk in: content in any channel is a token's arrival, an `error` object fails the request."""
    if not isinstance(chunk, dict):
        result.error = f"a chunk of the stream is no object: {str(chunk)[:100]}"
        return
    if chunk.get("error") is not None:
        error = chunk["error"]
        result.error = str(error.get("message", error) if isinstance(error, dict) else error)[:500]
        return
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
            result.token_ns.append(now_ns)
        result.finish_reason = choice.get("finish_reason") or result.finish_reason
    usage = chunk.get("usage")
    if usage:
        result.prompt_tokens = usage.get("prompt_tokens")
        result.output_tokens = usage.get("completion_tokens")


async def stream_chat(client: httpx.AsyncClient, body: dict[str, Any], timeout_s: float) -> StreamResult:
    """Send one streaming chat request and time it; a failure of any kind is in `error`, never raised.

    `end_ns` is the last content's arrival (or the failure's time). A stream that ends without usage, without a finish
    reason or without content is a failure.
    """
    result = StreamResult(start_ns=time.time_ns())
    origin = time.perf_counter_ns()

    def now() -> int:
        return result.start_ns + time.perf_counter_ns() - origin

    try:
        async with client.stream("POST", "/v1/chat/completions", json=body, timeout=timeout_s) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", errors="replace")
                result.error = f"HTTP {response.status_code}: {text[:300]}"
            else:
                async for data in events(response):
                    _absorb(result, json.loads(data), now())
                    if result.error is not None:
                        break
    except httpx.TimeoutException:
        result.error = f"timed out after {timeout_s:g} s"
    except httpx.ConnectError as error:
        result.error = f"connection refused or unreachable: {error}"
    except httpx.HTTPError as error:
        result.error = f"the connection broke: {error or type(error).__name__}"
    except json.JSONDecodeError as error:
        result.error = f"a chunk of the stream is not JSON: {error}"
    if result.error is None:
        missing = [
            text
            for absent, text in (
                (not result.token_ns, "content"),
                (result.finish_reason is None, "finish reason"),
                (result.output_tokens is None, "usage"),
            )
            if absent
        ]
        if missing:
            result.error = f"the stream ended without {', '.join(missing)}"
    result.end_ns = result.token_ns[-1] if result.error is None else now()
    return result
