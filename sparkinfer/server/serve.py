"""The life of a server: take the port, start the engine, serve, drain, and end with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from sparkinfer import garbage
from sparkinfer.engine.client import ENGINE_COMMAND, EngineClient
from sparkinfer.engine.ipc import EngineOptions
from sparkinfer.errors import CheckpointError, EnvironmentProblem
from sparkinfer.models.hub import resolve_model
from sparkinfer.output import require_appendable
from sparkinfer.server.app import build_app
from sparkinfer.server.errors import HttpError
from sparkinfer.server.metrics import Metrics
from sparkinfer.server.state import ServerState
from sparkinfer.server.tokenizer import ServerTokenizer
from sparkinfer.settings import Settings, require_utf8

log = logging.getLogger("sparkinfer.server")

FAILED_ENGINE_GRACE_S = 5
ENGINE_STOP_S = 5.0
REPEATED_SIGNAL_S = 0.5
"""A repeat this soon is the same stop, sent to the process and to its group (timeout(1) does that)."""


@dataclass(frozen=True)
class ServeOptions:
    """What `sparkinfer serve` was asked for."""

    model: str
    host: str
    port: int
    settings: Settings
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    load_format: str = "auto"


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: the drain is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def check_model_folder(model: str) -> Path:
    """The model's folder, fetched if `model` is a hub id with a commit.

    Raises CheckpointError, EnvironmentProblem, and ConfigError for a path that is not UTF-8.
    """
    folder = resolve_model(model)
    require_utf8(f"{model} {folder.resolve()}", "MODEL")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise CheckpointError(f"{model}: {name} is missing, so this is no complete model folder")
    return folder


def take_port(host: str, port: int) -> socket.socket:
    """A bound socket, before anything slow happens. Raises EnvironmentProblem when that is not possible."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Two servers may bind with SO_REUSEADDR; only one may listen.
        sock.listen(2048)
    except UnicodeError as error:
        raise EnvironmentProblem(f"cannot listen on {host}: this is no host name ({error})") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise EnvironmentProblem(
                f"port {port} on {host} is in use: choose another with --port, or --port 0 for any free one"
            ) from error
        raise EnvironmentProblem(f"cannot listen on {host}:{port}: {error}") from error
    return sock


async def serve(options: ServeOptions, sock: socket.socket, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serve on `sock` until a signal or the engine's end; returns the exit code.

    Raises SparkinferError when the model or the engine cannot be loaded.
    """
    folder = check_model_folder(options.model)
    settings = options.settings
    client = EngineClient(
        EngineOptions(
            model=str(folder),
            settings=settings,
            dtype=options.dtype,
            device=options.device,
            seed=options.seed,
            load_format=options.load_format,
        ),
        engine_command,
    )
    state = ServerState(
        client=client,
        settings=settings,
        folder=folder,
        model_name=settings.served_model_name or folder.resolve().name,
        aliases=frozenset({options.model, str(folder), str(folder.resolve())}),
        seeds=random.Random(options.seed),
        metrics=Metrics(lambda: client.stats),
    )
    return await _Life(state, sock).run()


class _Life:
    """One server from start to end."""

    def __init__(self, state: ServerState, sock: socket.socket) -> None:
        self._state = state
        self._sock = sock
        config = uvicorn.Config(
            build_app(state),
            log_config=None,
            access_log=False,
            lifespan="off",
            loop="none",
            http="httptools",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=math.ceil(state.settings.shutdown_grace_s) + FAILED_ENGINE_GRACE_S,
        )
        self._server = _Server(config)
        self._stopped = asyncio.Event()
        self._signalled = 0.0

    async def run(self) -> int:
        state, client = self._state, self._state.client
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        host, port = self._sock.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        print(f"listening on {url}, loading {state.model_name}", flush=True)
        client.start()
        serving = loop.create_task(self._server.serve(sockets=[self._sock]))
        try:
            await self._until_end(url, serving)
        finally:
            await client.stop(0 if client.died.done() else ENGINE_STOP_S)
            if state.tokenizer is not None:
                state.tokenizer.close()
        if client.died.done():
            failure = client.died.result()
            log.error("%s", failure.message)
            return failure.exit_code or 1
        log.info("stopped")
        return 0

    async def _until_end(self, url: str, serving: asyncio.Task[None]) -> None:
        state, client = self._state, self._state.client
        loading = asyncio.ensure_future(self._load(url))
        stopped = asyncio.ensure_future(self._stopped.wait())
        ends: set[asyncio.Future[Any]] = {client.died, stopped, serving}
        try:
            await asyncio.wait({*ends, loading}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loading.cancel()
            stopped.cancel()
            if client.died.done() or not state.is_ready:
                self._server.config.timeout_graceful_shutdown = FAILED_ENGINE_GRACE_S
            if self._stopped.is_set():
                late = HttpError(503, "the server is shutting down and its grace period is over", code="shutting_down")
                asyncio.get_running_loop().call_later(state.settings.shutdown_grace_s, client.fail_all, late)
            self._server.should_exit = True
            await serving

    async def _load(self, url: str) -> None:
        state = self._state
        tokenizer = await asyncio.to_thread(ServerTokenizer, state.folder)
        ready = await state.client.ready
        state.tokenizer = tokenizer
        garbage.settle()
        for line in json.dumps(ready.info, indent=1, sort_keys=True).splitlines():
            log.info("%s", line)
        print(f"ready on {url}", flush=True)

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._state.draining:
            if now - self._signalled < REPEATED_SIGNAL_S:
                return
            log.warning("second signal: ending at once")
            self._state.client.kill()
            os._exit(128 + number)
        grace = self._state.settings.shutdown_grace_s
        count = self._state.client.num_unfinished
        log.info("signal %d: %d requests get %g s to finish; a second signal ends at once", number, count, grace)
        self._state.draining, self._signalled = True, now
        self._stopped.set()


def run(options: ServeOptions, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Blocking form of `serve`, on uvloop where it is installed. Raises SparkinferError.

    What can be refused without the model is refused before it is loaded.
    """
    check_model_folder(options.model)
    require_utf8(options.device, "--device")
    if options.settings.step_trace is not None:
        require_appendable(Path(options.settings.step_trace), "SPARKINFER_STEP_TRACE:")
    sock = take_port(options.host, options.port)
    logging.basicConfig(
        level=options.settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(serve(options, sock, engine_command))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        log.info("uvloop is not installed: using asyncio's own loop, which costs more per token")
        return asyncio.new_event_loop
    return uvloop.new_event_loop
