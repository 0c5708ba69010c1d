"""The watchdog: parent of one server, which it kills when the workflow's process disappears.

It runs in a session of its own, so that neither Ctrl-C in the terminal nor the end of the job that started it reaches
it, holds pidfds on the workflow and on the server, and is a subreaper: processes that the server leaves behind become
its children and are killed with it. Should the watchdog itself be killed, the server's parent-death signal fires.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from sparkinfer_eval.lease import process
from sparkinfer_eval.lease.process import ProcessId
from sparkinfer_eval.lease.state import DIED, RUNNING, ServerSpec, ServerState, load_state, save_state


def read_spec(path: Path) -> ServerSpec:
    """Read the specification that the client wrote for this watchdog."""
    data = json.loads(path.read_text(encoding="utf-8"))
    data["owner"] = ProcessId(**data["owner"])
    return ServerSpec(**data)


def initial_state(spec: ServerSpec) -> ServerState:
    """State of a server that is about to be started."""
    return ServerState(
        status=RUNNING,
        key=spec.key,
        engine=spec.engine,
        url=spec.url,
        model=spec.model,
        served_name=spec.served_name,
        log=spec.log,
        argv=spec.argv,
        owner=spec.owner,
        watchdog=ProcessId.of(os.getpid()),
    )


def _stop_server(server: subprocess.Popen[bytes], spec: ServerSpec, grace_s: float) -> None:
    """Stop the server's group, politely for `grace_s` seconds when that is above 0, then kill all that is left."""
    if grace_s > 0:
        process.signal_group(server.pid, signal.Signals[spec.stop_signal])
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and server.poll() is None:
            time.sleep(0.05)
    process.signal_group(server.pid, signal.SIGKILL)
    left = process.kill_descendants()
    if left:
        print(f"watchdog: processes {left} could not be killed", file=sys.stderr)


def _update(folder: Path, **changes: object) -> None:
    """Change fields of the recorded state, as long as it is this watchdog's."""
    state = load_state(folder)
    if state is not None and state.watchdog == ProcessId.of(os.getpid()):
        save_state(folder, dataclasses.replace(state, **changes))  # type: ignore[arg-type]


def _wait_for_end(owner_fd: int, server_fd: int, wake_fd: int) -> str:
    """Block until the workflow is gone (`owner`), the server ended (`server`) or a stop was asked for (`stop`)."""
    poll = select.poll()
    names = {owner_fd: "owner", server_fd: "server", wake_fd: "stop"}
    for fd in names:
        poll.register(fd, select.POLLIN)
    ready = [names[fd] for fd, _ in poll.poll()]
    return min(ready, key=["stop", "owner", "server"].index)


def _daemonise(body: Callable[[Callable[[], None]], int]) -> int:
    """Run `body` in a detached child of init; returns 0 once it has called its argument, 1 when it ended before."""
    read, write = os.pipe()

    def announce() -> None:
        os.write(write, b"1")
        os.close(write)

    if os.fork() == 0:
        os.close(read)
        code = 1
        try:
            code = body(announce)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    return 0 if os.read(read, 1) else 1


def _guard(spec: ServerSpec, folder: Path, started: Callable[[], None]) -> int:
    """Start the server, call `started`, and stay until the server ends or has to."""
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    process.become_subreaper()
    owner_fd = spec.owner.open()
    state = initial_state(spec)
    try:
        with Path(spec.log).open("ab") as log:
            server = subprocess.Popen(
                [*process.namespace_prefix(), *spec.argv],
                env=spec.env,
                # Not in a checkout: `python -m` would import from there instead of from the engine's own source.
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=process.die_with_parent,
            )
    except OSError as error:
        print(f"error: {spec.argv[0]} could not be started: {error}", file=sys.stderr)
        return 1
    save_state(folder, dataclasses.replace(state, server=ProcessId.of(server.pid)))
    started()
    why = _wait_for_end(owner_fd, os.pidfd_open(server.pid), wake_read)
    if why == "server":
        code = server.wait()
        _update(folder, status=DIED, exit_code=code, reason=f"ended by itself with exit code {code}")
    _stop_server(server, spec, spec.stop_grace_s if why == "stop" else 0.0)
    if why != "server":
        _update(folder, status=DIED, reason="stopped" if why == "stop" else "the workflow ended")
    return 0


def main(spec_path: Path, folder: Path) -> int:
    """Start a detached watchdog; returns 0 once its server's process exists, 1 when it could not be started.

    The caller has put this process into a session of its own.
    """
    spec = read_spec(spec_path)
    spec_path.unlink()
    return _daemonise(lambda started: _guard(spec, folder, started))
