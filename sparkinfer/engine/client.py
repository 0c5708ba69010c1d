"""The server's side of the engine process: start it, send requests, hand out token events, notice its death.

Everything runs on the server's event loop. One message per engine step is read by a loop callback, which appends each
event to its submission and wakes the submission's one waiter: no task, queue or lock per token.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from sparkinfer.engine.ipc import SERVERS_SIGNALS, EngineOptions, Launch, ServerEnd, decode_from_engine, encode
from sparkinfer.engine.messages import (
    AbortRequests,
    AddRequest,
    CacheReset,
    EngineFailed,
    EngineReady,
    EngineStats,
    ResetCache,
    Shutdown,
    StepOutput,
    ToEngine,
    TokenEvent,
)
from sparkinfer.errors import SparkinferError

log = logging.getLogger("sparkinfer.client")

LAST_WORDS_MS = 100
ENGINE_COMMAND = (sys.executable, "-m", "sparkinfer.engine.process")


class EngineDied(SparkinferError):
    """The engine process has ended; its text says why."""


class Submission:
    """Engine requests that one HTTP request waits for."""

    __slots__ = ("_batch", "_client", "_error", "_waiter", "batch_s", "ids")

    def __init__(self, client: EngineClient, ids: list[str]) -> None:
        self.ids = ids
        self.batch_s = 0.0
        """time.perf_counter() at which the newest events arrived."""
        self._client = client
        self._batch: list[TokenEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def push(self, event: TokenEvent, now: float) -> None:
        """Called by the client for each event."""
        self._batch.append(event)
        self.batch_s = now
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """Make `events` raise `error`, now and from now on."""
        if self._error is None:
            self._error = error
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    async def events(self) -> list[TokenEvent]:
        """The events that have arrived since the last call, at least one. Raises what `fail` was given."""
        while not self._batch:
            if self._error is not None:
                raise self._error
            self._waiter = self._client.loop.create_future()
            await self._waiter
            self._waiter = None
        batch, self._batch = self._batch, []
        return batch

    def close(self) -> None:
        """Cancel in the engine what has not finished there. Safe to call more than once."""
        self._client.forget(self.ids)


class EngineClient:
    """Owner of the engine process. Create and use it on one event loop."""

    def __init__(self, options: EngineOptions, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self.loop = asyncio.get_running_loop()
        self.stats = EngineStats()
        self.ready: asyncio.Future[EngineReady] = self.loop.create_future()
        self.died: asyncio.Future[EngineFailed] = self.loop.create_future()
        """Set once, when the process is gone or has said that it fails; not set by an orderly `stop`."""
        self.on_step: Callable[[StepOutput], None] | None = None
        self._options = options
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._end: ServerEnd | None = None
        self._streams: dict[str, Submission] = {}
        self._resets: dict[str, asyncio.Future[CacheReset]] = {}
        self._numbers = itertools.count(1)
        self._stopping = False
        self._gone = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None before `start`."""
        return None if self._process is None else self._process.pid

    @property
    def num_unfinished(self) -> int:
        """Requests in the engine, running or waiting."""
        return len(self._streams)

    def start(self) -> None:
        """Start the process; `ready` or `died` tells how it went."""
        end = self._end = ServerEnd()
        launch = Launch(self._options, end.to_engine, end.from_engine, os.getpid())
        # Ctrl-C reaches the whole group: the child begins with the signals blocked, until it has chosen to ignore them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SERVERS_SIGNALS)
        try:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin is not None
        # The pipe stays open: its end of file tells the engine that the server is gone.
        self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
        self._process.stdin.flush()
        self._pidfd = os.pidfd_open(self._process.pid)
        self.loop.add_reader(self._pidfd, self._on_exit)
        self.loop.add_reader(end.descriptor, self._on_readable)

    # -- requests ---------------------------------------------------------------------------------------------------

    def next_id(self) -> str:
        """A request id that is unique in this server's life."""
        return format(next(self._numbers), "x")

    def submit(self, requests: Sequence[AddRequest]) -> Submission:
        """Send requests to the engine. Raises EngineDied when there is none."""
        self._check_alive()
        submission = Submission(self, [request.id for request in requests])
        for request in requests:
            self._streams[request.id] = submission
            self._send(request)
        return submission

    def forget(self, ids: Sequence[str]) -> None:
        """Cancel requests; those that have finished or are unknown are left alone."""
        running = [rid for rid in ids if self._streams.pop(rid, None) is not None]
        if running and not self.died.done():
            self._send(AbortRequests(running))

    async def reset_cache(self) -> CacheReset:
        """Drop prefix-cache contents. Raises EngineDied."""
        self._check_alive()
        token = self.next_id()
        answer = self._resets[token] = self.loop.create_future()
        self._send(ResetCache(token))
        return await answer

    def fail_all(self, error: Exception) -> None:
        """End every waiting request with `error`."""
        for submission in set(self._streams.values()):
            submission.fail(error)
        self._fail_resets(error)

    def _fail_resets(self, error: Exception) -> None:
        for answer in self._resets.values():
            if not answer.done():
                answer.set_exception(error)
        self._resets.clear()

    # -- the end ----------------------------------------------------------------------------------------------------

    async def stop(self, grace_s: float) -> None:
        """End the process: ask, wait `grace_s` seconds, then kill."""
        self._stopping = True
        if self._process is None or self._end is None:
            return
        if self._process.poll() is None and not self.died.done() and self.ready.done():
            self._send(Shutdown(grace_s))
            try:
                await asyncio.wait_for(self._gone.wait(), grace_s + 2.0)
            except TimeoutError:
                log.warning("the engine process did not end within %.0f s: killing it", grace_s + 2.0)
        self.kill()
        self._process.wait()
        self._fail_resets(EngineDied("the engine has stopped"))
        self._close()

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _close(self) -> None:
        if self._end is not None:
            self.loop.remove_reader(self._end.descriptor)
            self._end.close()
            self._end = None
        if self._pidfd >= 0:
            self.loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    # -- internals --------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self.died.done():
            raise EngineDied(self.died.result().message)
        if not self.ready.done():
            raise EngineDied("the engine is not ready")

    def _send(self, message: ToEngine) -> None:
        if self._end is not None:
            self._end.push.send(encode(message), zmq.NOBLOCK)

    def _on_readable(self) -> None:
        # The descriptor is edge-triggered: read until there is nothing left.
        while self._end is not None:
            try:
                frame = self._end.pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._dispatch(decode_from_engine(frame))

    def _dispatch(self, message: StepOutput | EngineReady | EngineFailed | CacheReset) -> None:
        if isinstance(message, StepOutput):
            now = time.perf_counter()
            self.stats = message.stats
            streams = self._streams
            for event in message.events:
                submission = streams.get(event.id)
                if submission is not None:
                    if event.finish_reason is not None:
                        del streams[event.id]
                    submission.push(event, now)
            if self.on_step is not None:
                self.on_step(message)
        elif isinstance(message, EngineReady):
            assert self._end is not None
            self._end.remove_folder()
            self.stats = message.stats
            self.ready.set_result(message)
        elif isinstance(message, EngineFailed):
            self._fail(message)
        else:
            answer = self._resets.pop(message.token, None)
            if answer is not None and not answer.done():
                answer.set_result(message)

    def _on_exit(self) -> None:
        assert self._process is not None
        self.loop.remove_reader(self._pidfd)
        code = self._process.wait()
        # Its last words may still be on their way through the socket's own thread.
        while (
            not self._stopping and not self.died.done() and self._end is not None and self._end.pull.poll(LAST_WORDS_MS)
        ):
            self._dispatch(decode_from_engine(self._end.pull.recv(zmq.NOBLOCK)))
        self._gone.set()
        if not self._stopping:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            self._fail(EngineFailed(f"the engine process {how}", code if code > 0 else 1))
        # An orderly stop may have come before the engine read them: nobody else answers.
        self._fail_resets(EngineDied("the engine has stopped"))

    def _fail(self, failure: EngineFailed) -> None:
        if self.died.done():
            return
        self.died.set_result(failure)
        self.fail_all(EngineDied(failure.message))
        self._streams.clear()
