"""A scripted OpenAI-compatible server for fault tests: it answers as told, with exact token counts."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class Script:
    """How to answer. `fault` is one of the names in `_stream` or `status`, applied to `faulty` requests (-1: all)."""

    prompt_tokens: int
    fault: str = ""
    faulty: int = -1
    token_s: float = 0.002
    hits_per_request: int = 0
    seen: list[dict] = field(default_factory=list)
    resets: int = 0

    def takes_fault(self) -> bool:
        return bool(self.fault) and (self.faulty < 0 or len(self.seen) <= self.faulty)


HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "toy"}


def _event(value: dict) -> str:
    return f"data: {json.dumps(HEAD | value)}\n\n"


def _chunk(delta: dict, finish: str | None = None) -> str:
    return _event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


async def _stream(script: Script, body: dict, faulty: bool) -> AsyncIterator[str]:
    fault = script.fault if faulty else ""
    tokens = body["max_completion_tokens"] - (fault == "short")
    yield _chunk({"role": "assistant", "content": ""})
    for index in range(tokens):
        if fault == "hang" and index == 1:
            await asyncio.sleep(60)
        if fault == "error_event" and index == 1:
            yield 'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
            return
        await asyncio.sleep(script.token_s)
        last = index == tokens - 1
        reason = None if not last or fault == "no_finish" else "stop" if fault == "stop" else "length"
        yield _chunk({"content": " word"}, reason)
    if fault == "cut":
        return
    counted = script.prompt_tokens + (fault == "other_tokenizer")
    usage = {"prompt_tokens": counted, "completion_tokens": tokens, "total_tokens": counted + tokens}
    yield _event({"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def build(script: Script) -> Starlette:
    async def chat(request: Request) -> Response:
        body = await request.json()
        script.seen.append(body)
        faulty = script.takes_fault()
        if faulty and script.fault == "status":
            return JSONResponse({"error": {"message": "overloaded"}}, status_code=503)
        return StreamingResponse(_stream(script, body, faulty), media_type="text/event-stream")

    async def metrics(request: Request) -> Response:
        hits = script.hits_per_request * len(script.seen)
        return PlainTextResponse(f'# HELP x\nvllm:prefix_cache_hits_total{{engine="0"}} {hits}.0\n')

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "toy"}]})

    async def reset(request: Request) -> Response:
        script.resets += 1
        return JSONResponse({"dropped_blocks": 0})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/cache/reset", reset, methods=["POST"]),
            Route("/metrics", metrics),
            Route("/v1/models", models),
        ]
    )


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """The base URL of a server that follows `script`, in a thread of this process."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)  # from here on a client waits for the thread and is not refused
    server = uvicorn.Server(uvicorn.Config(build(script), log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
