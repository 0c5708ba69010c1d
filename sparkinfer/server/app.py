"""The ASGI application: routes, and the endpoints that do not generate."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import sparkinfer
from sparkinfer.engine.client import EngineDied
from sparkinfer.errors import RequestError
from sparkinfer.identity import digest_of, engine_digest, file_digests, model_files
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS
from sparkinfer.server import params
from sparkinfer.server.errors import HttpError
from sparkinfer.server.generation import chat_completions, completions, read_body
from sparkinfer.server.metrics import CONTENT_TYPE
from sparkinfer.server.protocol import DetokenizeRequest, TokenizeRequest, parse_body
from sparkinfer.server.state import ServerState
from sparkinfer.server.wire import to_json


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


async def health(request: Request) -> Response:
    """GET /health: 200 when requests are served, else 503 with the reason."""
    reason = _state(request).why_not_ready()
    return _json({"status": "ok"}) if reason is None else _json({"status": "unavailable", "reason": reason}, 503)


async def models(request: Request) -> Response:
    """GET /v1/models."""
    return _json({"object": "list", "data": [_model_entry(_state(request))]})


async def model(request: Request) -> Response:
    """GET /v1/models/{name}: 404 for another than the served one."""
    state = _state(request)
    state.check_model(request.path_params["name"])
    return _json(_model_entry(state))


def _model_entry(state: ServerState) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": state.model_name, "object": "model", "created": 0, "owned_by": "sparkinfer"}
    if state.is_ready:
        entry["max_model_len"] = state.limit("max_model_len")
    return entry


async def info(request: Request) -> Response:
    """GET /v1/info: what runs here, its limits and the settings in force."""
    state = _state(request)
    if state.digests is None or (state.digests.done() and state.digests.exception() is not None):
        state.digests = asyncio.ensure_future(asyncio.to_thread(_digests, state))
    engine, files = await state.digests
    return _json(
        {
            "version": sparkinfer.__version__,
            "engine_digest": engine,
            "model": state.model_name,
            "model_digest": digest_of(files),
            "model_files": files,
            "limits": {**state.engine_info.get("limits", {}), "max_queue": state.settings.max_queue},
            "settings": state.settings.as_dict(),
            "engine": state.engine_info,
        }
    )


def _digests(state: ServerState) -> tuple[str, dict[str, str]]:
    return engine_digest(), file_digests(model_files(state.folder))


async def capacity(request: Request) -> Response:
    """GET /v1/capacity: what is free now."""
    state = _state(request)
    state.loaded()
    stats, running = state.client.stats, state.limit("max_num_seqs")
    free = stats.kv_blocks_total - stats.kv_blocks_used
    room = running + state.settings.max_queue - state.client.num_unfinished
    return _json(
        {
            "requests": {"unfinished": state.client.num_unfinished, "running": stats.running, "waiting": stats.waiting},
            "max_num_seqs": running,
            "max_queue": state.settings.max_queue,
            "requests_accepted_now": max(0, room),
            "kv_tokens_total": stats.kv_blocks_total * KV_BLOCK_TOKENS,
            "kv_tokens_free": free * KV_BLOCK_TOKENS,
            "slots_free": stats.slots_total - stats.slots_used,
        }
    )


async def metrics(request: Request) -> Response:
    """GET /metrics, Prometheus text."""
    return Response(_state(request).metrics.exposition(), headers={"content-type": CONTENT_TYPE})


async def tokenize(request: Request) -> Response:
    """POST /v1/tokenize."""
    state = _state(request)
    tokenizer = state.loaded()
    body = parse_body(await read_body(request), TokenizeRequest)
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either `prompt` or `messages`", "prompt")
    if body.messages is not None:
        messages = params.chat_messages(body.messages)
        text = tokenizer.render_chat(messages, body.add_generation_prompt, body.chat_template_kwargs or {})
        ids = await tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = await tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
    return _json({"tokens": ids, "count": len(ids), "max_model_len": state.limit("max_model_len")})


async def detokenize(request: Request) -> Response:
    """POST /v1/detokenize."""
    state = _state(request)
    tokenizer = state.loaded()
    body = parse_body(await read_body(request), DetokenizeRequest)
    state.check_model(body.model)
    params.check_ids(body.tokens, state.limit("vocab_size"), "tokens")
    return _json({"prompt": tokenizer.decode(body.tokens, body.skip_special_tokens)})


async def reset_cache(request: Request) -> Response:
    """POST /v1/cache/reset: empty the prefix cache."""
    state = _state(request)
    state.loaded()
    answer = await state.client.reset_cache()
    return _json({"dropped_blocks": answer.dropped_blocks, "dropped_snapshots": answer.dropped_snapshots})


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        problem = HttpError(400, str(error), error.param)
    elif isinstance(error, EngineDied):
        problem = HttpError(500, str(error), code="engine_failed")
    elif isinstance(error, HTTPException):
        problem = HttpError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    else:
        assert isinstance(error, HttpError)
        problem = error
    _state(request).metrics.refused[str(problem.status)] += 1
    response = problem.response()
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)  # Allow, of a 405
    return response


ROUTES = [
    Route("/health", health, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{name:path}", model, methods=["GET"]),
    Route("/v1/info", info, methods=["GET"]),
    Route("/v1/capacity", capacity, methods=["GET"]),
    Route("/v1/tokenize", tokenize, methods=["POST"]),
    Route("/v1/detokenize", detokenize, methods=["POST"]),
    Route("/v1/cache/reset", reset_cache, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
]


def build_app(state: ServerState) -> Starlette:
    """The application over one server's state."""
    handled = (RequestError, HttpError, EngineDied, HTTPException)
    app = Starlette(routes=ROUTES, exception_handlers={kind: _on_error for kind in handled})
    app.state.server = state
    return app
