"""Running one job's command while a server is held: it ends with the workflow, and with the server."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkinfer.errors import EnvironmentProblem
from sparkinfer_eval.lease import process
from sparkinfer_eval.lease.client import require_running
from sparkinfer_eval.lease.process import ProcessId
from sparkinfer_eval.lease.state import ServerState

KEPT_LINES = 30
INTERRUPTED = 130
DISK_FULL = "No space left on device"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the command ended. `reason` is one sentence, None when it succeeded; `finished`: by itself, server alive."""

    code: int
    reason: str | None
    finished: bool = False


def _kill(child: subprocess.Popen[bytes]) -> None:
    process.signal_group(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(3.0)
    process.signal_group(child.pid, signal.SIGKILL)
    child.wait()
    process.kill_descendants()


class _Output:
    """Copies the command's output to ours and keeps its last lines."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._partial = b""

    def copy(self) -> bool:
        """Copy what is there; False at the end of the stream."""
        data = os.read(self.stream, 65536)
        if data:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            *lines, self._partial = (self._partial + data).split(b"\n")
            self.lines.extend(line.decode("utf-8", errors="replace") for line in lines if line.strip())
        return bool(data)

    def reason(self, code: int) -> str:
        """The last line that says `error:`, else the last line."""
        if self._partial.strip():
            self.lines.append(self._partial.decode("utf-8", errors="replace"))
        if any(DISK_FULL in line for line in self.lines):
            return f"error: the disk is full ({DISK_FULL}): free some space and start again; finished results are kept"
        for line in reversed(self.lines):
            if "error:" in line.lower():
                return line.strip()[:600]
        return f"exit code {code}" + (f": {self.lines[-1].strip()[:500]}" if self.lines else "")


def _guard(child: subprocess.Popen[bytes], output: _Output, fds: Mapping[int, str]) -> str:
    """Copy output until the child ends or one of the watched things happens; returns what did."""
    poll = select.poll()
    for fd in (*fds, output.stream):
        poll.register(fd, select.POLLIN | select.POLLHUP)
    while True:
        for fd, _ in poll.poll():
            if fd == output.stream:
                if not output.copy():
                    poll.unregister(fd)
            else:
                return fds[fd]


def run(command: list[str], owner: ProcessId, folder: Path, state: ServerState | None, env: dict[str, str]) -> Outcome:
    """Run `command` in a process group of its own, its output copied to standard output.

    It is killed when the workflow (`owner`) disappears, on SIGINT or SIGTERM, and when the held server ends.
    """
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    process.become_subreaper()
    try:
        fds = {owner.open(): "owner", wake_read: "signal"}
        if state is not None and state.watchdog is not None:
            fds[state.watchdog.open()] = "server"
    except ProcessLookupError:
        if state is not None:
            require_running(folder, state.key)
        raise EnvironmentProblem("the workflow ended before the job began") from None
    try:
        child = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=process.die_with_parent,
        )
    except OSError as error:
        raise EnvironmentProblem(f"{command[0]} could not be started: {error}") from error
    assert child.stdout is not None
    output = _Output(child.stdout.fileno())
    fds[os.pidfd_open(child.pid)] = "child"
    what = _guard(child, output, fds)
    if what != "child":
        _kill(child)
    code = child.wait()
    os.set_blocking(output.stream, False)
    try:
        while output.copy():
            pass
    except BlockingIOError:
        pass  # a grandchild still holds the pipe; it is killed below
    process.kill_descendants()
    if what in ("owner", "signal"):
        why = "the workflow ended" if what == "owner" else "interrupted"
        return Outcome(INTERRUPTED, f"{why} while the job ran")
    if state is not None:
        try:
            require_running(folder, state.key)
        except EnvironmentProblem as error:
            return Outcome(error.exit_code, f"the server ended while the job ran: {error}")
    return Outcome(0, None, True) if code == 0 else Outcome(code if code > 0 else 1, output.reason(code), code > 0)
