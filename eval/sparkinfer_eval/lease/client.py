"""Getting hold of a server: reuse the held one, replace it, or start it and wait until it is warm."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkinfer.errors import EnvironmentProblem
from sparkinfer.identity import json_digest
from sparkinfer.settings_check import default_threads
from sparkinfer_eval.lease import process
from sparkinfer_eval.lease.process import ProcessId
from sparkinfer_eval.lease.ready import ask_version, vocabulary_size, wait_ready, warm_up
from sparkinfer_eval.lease.state import (
    DIED,
    READY,
    ServerSpec,
    ServerState,
    forget_state,
    load_state,
    locked,
    log_tail,
    save_state,
    write_json,
)
from sparkinfer_eval.plan.engines import Engine, WarmUp, command

START_ATTEMPTS = 3
THREAD_COUNTS = frozenset(f"{name}_NUM_THREADS" for name in ("OMP", "GOTO", "OPENBLAS", "MKL", "VECLIB", "NUMEXPR")) | {
    "VECLIB_MAXIMUM_THREADS",
    "MKL_DYNAMIC",
}
ADDRESS_IN_USE = ("address already in use", "errno 98")


def server_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for servers: without the thread counts that Snakemake sets for a job, so each engine decides.

    Without this vLLM would be held to what OMP_NUM_THREADS says.
    """
    return {name: value for name, value in environ.items() if name not in THREAD_COUNTS}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The server that a job asks for. `session` separates servers that must not be shared (block, repetition)."""

    engine: Engine
    python: Path
    model: Path
    served_name: str
    device: str
    dtype: str
    max_model_len: int
    seed: int
    session: str
    source: Path
    cache: Path
    log: Path
    port: int | None = None
    expected_digest: str | None = None
    step_trace: Path | None = None
    environ: dict[str, str] = dataclasses.field(default_factory=lambda: server_environment(os.environ))

    def values(self, port: int) -> dict[str, str]:
        """Placeholders of the engine's start command."""
        return {
            "python": str(self.python),
            "model": str(self.model),
            "served_name": self.served_name,
            "port": str(port),
            "device": self.device,
            "dtype": self.dtype,
            "max_model_len": str(self.max_model_len),
            "seed": str(self.seed),
            "cache": str(self.cache),
            "step_trace": "" if self.step_trace is None else str(self.step_trace),
            "threads": str(default_threads()),
            "unpacked": str(self.source),
            "source": os.pathsep.join(str(self.source / part) for part in (".", "kernels", "eval", "containers")),
        }

    def key(self) -> str:
        """Digest of everything that decides whether a running server may be reused."""
        argv, _ = command(self.engine, self.device, self.values(0), self.environ)
        return json_digest([self.engine.raw, argv, self.session])


def owner_from_environment() -> ProcessId:
    """The workflow's process, named by EVALUATION_WORKFLOW_PID. Raises EnvironmentProblem when there is none."""
    text = os.environ.get("EVALUATION_WORKFLOW_PID", "")
    if not text.isdigit():
        raise EnvironmentProblem(
            "no workflow process is named: run this from the Snakemake workflow, or give --owner-pid PID, the process "
            "whose end shall stop the server (in a shell: --owner-pid $$)"
        )
    return owner_of(int(text))


def owner_of(pid: int) -> ProcessId:
    """Identity of the owning process, which must be alive and an ancestor. Raises EnvironmentProblem."""
    try:
        owner = ProcessId.of(pid)
    except ProcessLookupError as error:
        raise EnvironmentProblem(f"the owning process {pid} is gone: start the workflow again") from error
    if not process.is_ancestor(pid):
        raise EnvironmentProblem(
            f"process {pid} is not an ancestor of this one: name the shell or workflow that started it"
        )
    return owner


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Raise EnvironmentProblem when a port that the user fixed is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise EnvironmentProblem(
                f"port {port} cannot be used ({error.strerror}): stop the program that listens there, or take the "
                "setting `port` out of the configuration so that a free one is chosen"
            ) from error


def stop(folder: Path, timeout_s: float = 60.0) -> bool:
    """Stop the held server, if any; returns whether there was one. Raises EnvironmentProblem when it does not end."""
    with locked(folder):
        return _stop(folder, timeout_s)


def _stop(folder: Path, timeout_s: float = 60.0) -> bool:
    state = load_state(folder)
    if state is None:
        return False
    stopped = False
    if state.watchdog is not None and state.watchdog.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(state.watchdog.pid, signal.SIGTERM)
        if not state.watchdog.wait(timeout_s):
            raise EnvironmentProblem(f"the watchdog (process {state.watchdog.pid}) does not end: kill it by hand")
        stopped = True
    forget_state(folder)
    return stopped


def require_running(folder: Path, key: str) -> ServerState:
    """The state of a server that must be alive. Raises EnvironmentProblem with the end of its log when it is not."""
    state = load_state(folder)
    if state is None or state.key != key:
        raise EnvironmentProblem("the server was stopped or replaced by another job")
    if state.status != DIED and state.watchdog is not None and state.watchdog.alive():
        return state
    reason = state.reason or "its watchdog was killed"
    raise EnvironmentProblem(f"{state.engine} server: {reason}; the end of {state.log}:\n{log_tail(Path(state.log))}")


def _start_watchdog(folder: Path, wanted: Wanted, port: int, owner: ProcessId) -> None:
    """Start the watchdog, which starts the server; both write to the server's log. Raises EnvironmentProblem."""
    argv, env = command(wanted.engine, wanted.device, wanted.values(port), wanted.environ)
    wanted.log.parent.mkdir(parents=True, exist_ok=True)
    wanted.cache.mkdir(parents=True, exist_ok=True)
    if wanted.step_trace is not None:
        wanted.step_trace.parent.mkdir(parents=True, exist_ok=True)
    spec = ServerSpec(
        key=wanted.key(),
        engine=wanted.engine.name,
        argv=argv,
        env=env,
        url=f"http://127.0.0.1:{port}",
        model=str(wanted.model),
        served_name=wanted.served_name,
        log=str(wanted.log),
        stop_signal=wanted.engine.stop_signal,
        stop_grace_s=wanted.engine.stop_grace_s,
        owner=owner,
    )
    path = folder / f"spec-{os.getpid()}.json"
    write_json(path, dataclasses.asdict(spec))
    program = "import sys; from pathlib import Path; from sparkinfer_eval.lease.watchdog import main; "
    program += "sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with wanted.log.open("ab") as log:
        log.write(("$ " + " ".join(argv) + "\n").encode())
        log.flush()
        done = subprocess.run(
            [sys.executable, "-c", program, str(path), str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=False,
        )
    if done.returncode != 0:
        raise EnvironmentProblem(
            f"the {spec.engine} server could not be started; the end of {wanted.log}:\n{log_tail(wanted.log)}"
        )


def _start(folder: Path, wanted: Wanted, owner: ProcessId, waves: Iterable[WarmUp]) -> ServerState:
    """Start, wait and warm up; one attempt at one port."""
    port = wanted.port if wanted.port is not None else free_port()
    if wanted.port is not None:
        check_port(port)
    key = wanted.key()
    _start_watchdog(folder, wanted, port, owner)
    url = f"http://127.0.0.1:{port}"

    def still_running() -> None:
        require_running(folder, key)
        if not owner.alive():
            raise EnvironmentProblem("the workflow ended while its server was starting")

    seconds = wait_ready(url, wanted.engine, still_running)
    version, digest, info = ask_version(url, wanted.engine)
    if digest is not None and wanted.expected_digest is not None and digest != wanted.expected_digest:
        raise EnvironmentProblem(
            f"the {wanted.engine.name} server runs other code ({digest}) than this run is named after "
            f"({wanted.expected_digest}): the source has changed since the workflow started; start it again"
        )
    warm_up(url, wanted.served_name, vocabulary_size(wanted.model), waves, wanted.max_model_len, still_running)
    state = require_running(folder, key)
    ready = dataclasses.replace(
        state,
        status=READY,
        version=version,
        engine_digest=digest or wanted.expected_digest,
        info=info,
        ready_s=round(seconds, 2),
    )
    save_state(folder, ready)
    return ready


def acquire(folder: Path, wanted: Wanted, owner: ProcessId) -> ServerState:
    """Hand out the server a job wants: the held one if it is the same and healthy, otherwise a newly started one.

    `folder` holds the state of this workflow's server. Raises EnvironmentProblem (with the end of the server's log)
    when it cannot be started, and ConfigError for a missing or malformed model.
    """
    vocabulary_size(wanted.model)
    with locked(folder):
        held = load_state(folder)
        if held is not None and held.watchdog is not None and held.watchdog.alive():
            if held.owner != owner and held.owner.alive():
                raise EnvironmentProblem(
                    f"the device is in use: process {held.owner.pid} holds a {held.engine} server; wait until it ends"
                )
            if held.key == wanted.key() and held.status == READY and held.owner == owner:
                return held
        _stop(folder)
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                return _start(folder, wanted, owner, wanted.engine.warm_up)
            except BaseException as error:
                text = str(error).lower()
                _stop(folder)
                raced = wanted.port is None and any(mark in text for mark in ADDRESS_IN_USE)
                if not raced or attempt == START_ATTEMPTS or not isinstance(error, EnvironmentProblem):
                    raise
    raise AssertionError("unreachable: the loop returns or raises")
