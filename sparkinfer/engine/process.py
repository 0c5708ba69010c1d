"""The engine process: `python -m sparkinfer.engine.process`, started by `sparkinfer.engine.client`.

It reads one launch line on standard input, builds the engine, and then loops: take all messages that are there, run one
step, send its tokens. Tokenisation, HTTP and text are the server's, so nothing but the model runs between two steps.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from sparkinfer import garbage
from sparkinfer.engine.ipc import SERVERS_SIGNALS, EngineEnd, EngineOptions, Launch
from sparkinfer.engine.messages import (
    AbortRequests,
    AddRequest,
    CacheReset,
    EngineFailed,
    EngineReady,
    EngineStats,
    PromptToken,
    ResetCache,
    StepOutput,
    ToEngine,
    TokenEvent,
)
from sparkinfer.errors import RequestError, SparkinferError
from sparkinfer.scheduling.types import FinishReason, Request, SamplingParams, TokenLogprobs, TokenUpdates

log = logging.getLogger("sparkinfer.engine")

PR_SET_PDEATHSIG = 1
STATS_INTERVAL_S = 0.25
"""Steps without tokens (chunks of a long prompt) report the engine's state at most this often."""


class Core(Protocol):
    """What the loop drives; `sparkinfer.engine.core.EngineCore` is one."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def abort(self, ids: Iterable[str]) -> list[Request]: ...

    def step(self) -> TokenUpdates: ...

    def reset_cache(self) -> tuple[int, int]: ...

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True)
class Engine:
    """A built engine: what to drive, the model's end-of-sequence ids, and what /v1/info says about it.

    `info["limits"]` holds at least `max_model_len`, `max_num_seqs` and `vocab_size`.
    """

    core: Core
    eos_token_ids: frozenset[int]
    info: dict[str, Any]


class Loop:
    """Messages in, steps, token events out."""

    def __init__(self, end: EngineEnd, engine: Engine) -> None:
        self._end = end
        self._core = engine.core
        self._eos = engine.eos_token_ids
        self._refused: list[TokenEvent] = []
        self._report = False
        self._stop_at: float | None = None
        self._reported_s = 0.0

    def run(self) -> None:
        """Until a Shutdown message is obeyed."""
        core, end = self._core, self._end
        while True:
            while (message := end.receive()) is not None:
                self._handle(message)
            if self._stop_at is not None and (not core.has_work or time.monotonic() >= self._stop_at):
                return
            if core.has_work:
                self._send([_event(*update) for update in core.step().columns()])
            elif self._refused or self._report:
                self._report = True
                self._send([])
            else:
                end.wait()

    def _send(self, events: list[TokenEvent]) -> None:
        if self._refused:
            events = self._refused + events
            self._refused = []
        now = time.monotonic()
        # The step that leaves nothing to do always reports, so that idle gauges are right.
        if events or self._report or now - self._reported_s > STATS_INTERVAL_S:
            self._reported_s, self._report = now, False
            self._end.send(StepOutput(events, self._core.stats()))

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, AddRequest):
            try:
                self._core.add(_request(message, self._eos))
            except RequestError as error:
                self._refused.append(TokenEvent(message.id, None, FinishReason.ERROR.value, error=str(error)))
        elif isinstance(message, AbortRequests):
            self._core.abort(message.ids)
            self._report = True
        elif isinstance(message, ResetCache):
            blocks, snapshots = self._core.reset_cache()
            self._end.send(CacheReset(message.token, blocks, snapshots))
            self._report = True
        else:
            self._stop_at = time.monotonic() + message.grace_s


def _request(message: AddRequest, eos: frozenset[int]) -> Request:
    wire = message.sampling
    sampling = SamplingParams(
        max_tokens=wire.max_tokens,
        min_tokens=wire.min_tokens,
        temperature=wire.temperature,
        top_k=wire.top_k,
        top_p=wire.top_p,
        min_p=wire.min_p,
        seed=wire.seed,
        logprobs=wire.logprobs,
        prompt_logprobs=wire.prompt_logprobs,
        stop_token_ids=frozenset(wire.stop_token_ids),
        ignore_eos=wire.ignore_eos,
    )
    return Request(
        id=message.id,
        prompt=message.prompt,
        sampling=sampling,
        eos_token_ids=eos,
        arrival_s=time.monotonic(),
        priority=message.priority,
        cache_salt=message.cache_salt,
        use_cache=message.use_cache,
        prompt_hashes=message.prompt_hashes,
    )


def _event(
    request: Request, token: int | None, logprobs: TokenLogprobs | None, finish_reason: FinishReason | None
) -> TokenEvent:
    reason = None if finish_reason is None else finish_reason.value
    if request.sampling.prompt_logprobs is not None and len(request.output) == 1:
        return _first_event(request, token, logprobs, reason)
    if logprobs is None:
        return TokenEvent(request.id, token, reason, num_cached=request.num_cached)
    top = list(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
    return TokenEvent(request.id, token, reason, logprobs.logprob, top, request.num_cached)


def _first_event(request: Request, token: int | None, logprobs: TokenLogprobs | None, reason: str | None) -> TokenEvent:
    """The first token of a request that asked for its prompt's log-probabilities, or that the runner has none."""
    tokens: list[PromptToken] = []
    for position, entry in enumerate((request.prompt_logprobs or [None] * len(request.prompt))[1:], 1):
        if entry is None:
            text = f"no log-probability of prompt position {position}: this engine's runner does not report them"
            return TokenEvent(request.id, None, FinishReason.ERROR.value, error=text)
        tokens.append((entry.logprob, entry.rank, list(zip(entry.top_ids, entry.top_logprobs, strict=True))))
    return TokenEvent(
        request.id,
        token,
        reason,
        None if logprobs is None else logprobs.logprob,
        None if logprobs is None else list(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)),
        request.num_cached,
        prompt_logprobs=tokens,
    )


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent dies, and end on the end of standard input as well.

    The parent's own exit can come before the first call, hence the check of who the parent is.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        log.warning("no parent-death signal here (errno %d): relying on standard input", ctypes.get_errno())
    if os.getppid() != parent_pid:
        os._exit(1)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def serve_engine(build: Callable[[EngineOptions], Engine]) -> int:
    """Run an engine process to its end and return its exit code. `build` loads the model."""
    launch = msgspec.json.decode(_read_line(), type=Launch)
    logging.basicConfig(
        level=launch.options.settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # The server decides when to end: Ctrl-C reaches the whole foreground group, and requests are still to be drained.
    # They were blocked until here; what came meanwhile is dropped, and our children get an ordinary mask.
    for number in SERVERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SERVERS_SIGNALS)
    die_with_parent(launch.parent_pid)
    end = EngineEnd(launch)
    try:
        engine = build(launch.options)
        end.send(EngineReady(engine.info, engine.core.stats()))
        garbage.settle()
        Loop(end, engine).run()
    except SparkinferError as error:
        end.send(EngineFailed(str(error), error.exit_code))
        return error.exit_code
    except Exception as error:
        # The process boundary: whatever it was, the server must hear why before this process ends.
        log.exception("the engine failed")
        end.send(EngineFailed(f"the engine failed: {type(error).__name__}: {error}", 1))
        return 1
    finally:
        end.close()
    return 0


def _read_line() -> bytes:
    """The launch line, unbuffered: later bytes of standard input are the parent watch's."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            os._exit(1)
        line += piece
    return bytes(line)


if __name__ == "__main__":
    from sparkinfer.engine.build import build_engine

    sys.exit(serve_engine(build_engine))
