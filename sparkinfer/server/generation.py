"""POST /v1/completions and /v1/chat/completions: from body to engine requests, from token events to chunks."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sparkinfer.engine.client import EngineDied, Submission
from sparkinfer.engine.messages import AddRequest, TokenEvent
from sparkinfer.scheduling.prefix_index import prompt_hashes
from sparkinfer.scheduling.types import FinishReason
from sparkinfer.server import params
from sparkinfer.server.choice import Choice
from sparkinfer.server.errors import HttpError
from sparkinfer.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, StreamOptions, parse_body
from sparkinfer.server.state import ServerState
from sparkinfer.server.wire import DONE, ChatFormat, CompletionFormat, Delta, Format, usage

MAX_BODY_BYTES = 64 << 20
STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


class ClientGone(Exception):
    """The client closed its connection."""


async def read_body(request: Request) -> bytes:
    """The request body. Raises HttpError 413, or ClientGone."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY_BYTES:
                raise HttpError(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
    except ClientDisconnect as error:
        raise ClientGone from error
    return bytes(body)


@dataclass
class Job:
    """A checked request, ready for the engine."""

    requests: list[AddRequest]
    choices: dict[str, Choice]
    """Engine request id to the choice it fills."""
    format: Format
    prompt_tokens: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_ids: bool
    scores_only: bool
    """No output was asked for: the token that each engine request ends with is not part of the answer."""
    arrival_s: float

    def usage(self) -> dict[str, Any]:
        counts = usage(self.prompt_tokens, list(self.choices.values()))
        if self.scores_only:
            counts |= {"completion_tokens": 0, "total_tokens": self.prompt_tokens}
        return counts


async def prepare(state: ServerState, raw: bytes, kind: type[GenerationRequest], arrival_s: float) -> Job:
    """Check a body and make its engine requests. Raises RequestError or HttpError."""
    tokenizer = state.loaded()
    body = parse_body(raw, kind)
    state.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise HttpError(400, "`stream_options` needs `stream` to be true", "stream_options")
    vocab_size, context = state.limit("vocab_size"), state.limit("max_model_len")
    prompts = await params.prompt_ids(body, tokenizer, vocab_size)
    count, stops = params.number_of_choices(body), params.stop_strings(body)
    # Before the requests are made: a body of a few bytes a prompt can ask for millions.
    state.check_queue(len(prompts) * count)
    seed = params.seed_of(body, drawn=state.seeds.getrandbits(params.SEED_BITS))
    requests: list[AddRequest] = []
    choices: dict[str, Choice] = {}
    salt = state.settings.prefix_cache_salt + (body.cache_salt or "")
    for prompt in prompts:
        limit = params.token_limit(body, len(prompt), context)
        hashes = prompt_hashes(prompt, salt) if state.settings.prefix_cache and body.use_cache else b""
        for _ in range(count):
            # Choices differ by their seed; the first has the seed that was asked for.
            own_seed = (seed + len(choices)) % (1 << params.SEED_BITS)
            sampling = params.sampling_of(body, limit, own_seed, vocab_size)
            rid = state.client.next_id()
            # Positions taken from the prefix cache are not computed, hence have no log-probabilities.
            use_cache = body.use_cache and sampling.prompt_logprobs is None
            requests.append(AddRequest(rid, prompt, sampling, body.priority, salt, use_cache, hashes))
            choices[rid] = Choice(
                index=len(choices),
                prompt=prompt,
                detokenizer=tokenizer.detokenizer(body.skip_special_tokens),
                stops=stops,
                include_stop=body.include_stop_str_in_output,
                min_tokens=sampling.min_tokens,
            )
    options = body.stream_options or StreamOptions()
    is_chat = isinstance(body, ChatRequest)
    make, prefix = (ChatFormat, "chatcmpl-") if is_chat else (CompletionFormat, "cmpl-")
    response_format = make(
        prefix + uuid4().hex, int(time.time()), state.model_name, tokenizer, null_usage=options.include_usage
    )
    scores_only = False
    if isinstance(body, CompletionRequest) and isinstance(response_format, CompletionFormat):
        scores_only = response_format.show(body)
    return Job(
        requests=requests,
        choices=choices,
        format=response_format,
        prompt_tokens=sum(map(len, prompts)),
        stream=bool(body.stream),
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage_stats,
        return_ids=bool(body.return_token_ids),
        scores_only=scores_only,
        arrival_s=arrival_s,
    )


class GenerationResponse:
    """ASGI response that runs a job. Headers go out with the first token, so that an early failure has its status."""

    def __init__(self, state: ServerState, job: Job) -> None:
        self._state = state
        self._job = job
        self._deltas = {rid: Delta() for rid in job.choices}
        self._sent: set[str] = set()
        self._open = set(job.choices)
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, job = self._state, self._job
        loop = asyncio.get_running_loop()
        try:
            state.check_queue(len(job.requests))
            submission = state.client.submit(job.requests)
        except (HttpError, EngineDied) as error:
            await self._fail(error, scope, receive, send)
            return
        state.metrics.prompt_tokens += job.prompt_tokens
        watcher = loop.create_task(_watch_disconnect(receive, submission))
        limit_s = state.settings.request_timeout_s
        late = HttpError(504, f"the request took longer than SPARKINFER_REQUEST_TIMEOUT_S, {limit_s:g} s")
        timer = loop.call_later(limit_s, submission.fail, late) if limit_s else None
        try:
            await self._run(submission, send)
        except ClientGone:
            state.metrics.finished["cancelled"] += len(self._open)
        except (HttpError, EngineDied) as error:
            state.metrics.finished["error"] += len(self._open)
            await self._fail(error, scope, receive, send)
        finally:
            watcher.cancel()
            if timer is not None:
                timer.cancel()
            submission.close()

    async def _run(self, submission: Submission, send: Send) -> None:
        job, deltas = self._job, self._deltas
        while self._open:
            touched = [rid for event in await submission.events() if (rid := self._take(event, submission)) is not None]
            if not job.stream:
                continue
            if len(touched) == 1:
                body = self._chunk(touched[0], deltas[touched[0]])
            else:
                body = b"".join([self._chunk(rid, deltas[rid]) for rid in dict.fromkeys(touched)])
            if not self._open:
                body += (job.format.usage_event(job.usage()) if job.include_usage else b"") + DONE
            if not self._started:
                self._started = True
                await send(STREAM_START)
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": bool(self._open)})
        metrics = self._state.metrics
        metrics.request.observe(time.perf_counter() - job.arrival_s)
        metrics.cached_tokens += job.usage()["prompt_tokens_details"]["cached_tokens"]
        if not job.stream:
            body = job.format.body(list(job.choices.values()), list(deltas.values()), job.return_ids, job.usage())
            await Response(body, media_type="application/json")({"type": "http"}, _no_receive, send)

    def _take(self, event: TokenEvent, submission: Submission) -> str | None:
        """Add one event to its choice; None for events after the choice's end."""
        rid = event.id
        if rid not in self._open:
            return None
        if event.finish_reason == FinishReason.ERROR:
            raise HttpError(400 if event.error else 500, event.error or "the engine ended the request with an error")
        job, metrics, now = self._job, self._state.metrics, submission.batch_s
        choice, delta = job.choices[rid], self._deltas[rid]
        piece = choice.push(event)
        if piece.token is not None:
            metrics.output_tokens += 1
            if choice.num_tokens == 1:
                metrics.first_token.observe(now - job.arrival_s)
            else:
                metrics.between_tokens.observe(now - choice.last_token_s)
            choice.last_token_s = now
            if job.return_ids:
                delta.tokens.append(piece.token)
            if piece.logprob is not None:
                delta.logprobs.append(piece.logprob)
        delta.text += piece.text
        if piece.finished:
            self._open.discard(rid)
            metrics.finished[str(choice.finish_reason)] += 1
            if event.finish_reason is None:
                # A stop string: the engine does not know of it and would go on.
                self._state.client.forget([rid])
        return rid

    def _chunk(self, rid: str, delta: Delta) -> bytes:
        """The event for what has come for a choice; empty while its text is held back and there is nothing else."""
        job = self._job
        choice = job.choices[rid]
        if not (delta.text or delta.logprobs or delta.tokens or choice.finish_reason or job.continuous_usage):
            return b""
        counts = job.usage() if job.continuous_usage else None
        chunk = job.format.event(choice, delta, first=rid not in self._sent, ids=job.return_ids, usage=counts)
        self._sent.add(rid)
        delta.text = ""
        if delta.tokens or delta.logprobs:
            delta.tokens, delta.logprobs = [], []
        return chunk

    async def _fail(self, error: HttpError | EngineDied, scope: Scope, receive: Receive, send: Send) -> None:
        problem = error if isinstance(error, HttpError) else HttpError(500, str(error), code="engine_failed")
        self._state.metrics.refused[str(problem.status)] += 1
        if self._started:
            await send({"type": "http.response.body", "body": problem.event(), "more_body": False})
        else:
            await problem.response()(scope, receive, send)


async def _watch_disconnect(receive: Receive, submission: Submission) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    submission.fail(ClientGone())


async def _no_receive() -> Any:
    raise RuntimeError("a response without a body to read")


async def completions(request: Request) -> Any:
    """POST /v1/completions."""
    return await _generate(request, CompletionRequest)


async def chat_completions(request: Request) -> Any:
    """POST /v1/chat/completions."""
    return await _generate(request, ChatRequest)


async def _generate(request: Request, kind: type[GenerationRequest]) -> GenerationResponse | Response:
    arrival_s = time.perf_counter()
    state: ServerState = request.app.state.server
    try:
        job = await prepare(state, await read_body(request), kind, arrival_s)
    except ClientGone:
        return Response(status_code=400)
    return GenerationResponse(state, job)
