"""Linux process control: identities that survive pid reuse, parent-death signals, namespaces, killing a whole tree."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from sparkinfer.errors import EnvironmentProblem

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process for certain: its number and its start time (clock ticks since boot)."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Identity of a running process. Raises ProcessLookupError when there is none."""
        return cls(pid, _stat(pid)[1])

    def alive(self) -> bool:
        """True while this very process runs; a zombie counts as gone."""
        try:
            state, start, _ = _stat_fields(self.pid)
        except ProcessLookupError:
            return False
        return start == self.start and state not in "ZX"

    def open(self) -> int:
        """A pidfd that becomes readable when the process ends. Raises ProcessLookupError when it is gone already."""
        try:
            fd = os.pidfd_open(self.pid)
        except OSError as error:
            if isinstance(error, ProcessLookupError):
                raise
            raise EnvironmentProblem(f"pidfd_open failed ({error.strerror}): Linux 5.3 or newer is needed") from error
        if not self.alive():
            os.close(fd)
            raise ProcessLookupError(self.pid)
        return fd

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process is gone; False when it still runs after the timeout."""
        try:
            fd = self.open()
        except ProcessLookupError:
            return True
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            return bool(poll.poll(int(timeout_s * 1000)))
        finally:
            os.close(fd)


def _stat_fields(pid: int) -> tuple[str, int, int]:
    """(state, start time, parent) of /proc/PID/stat. Raises ProcessLookupError."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(pid) from error
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19]), int(fields[1])


def _stat(pid: int) -> tuple[int, int]:
    """(parent, start time) of a process. Raises ProcessLookupError."""
    _, start, parent = _stat_fields(pid)
    return parent, start


def is_ancestor(pid: int) -> bool:
    """True when `pid` is this process or one it descends from."""
    current = os.getpid()
    while current > 0:
        if current == pid:
            return True
        try:
            current = _stat(current)[0]
        except ProcessLookupError:
            return False
    return False


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, children before grandchildren."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                parents.setdefault(_stat(int(entry.name))[0], []).append(int(entry.name))
    found: list[int] = []
    queue = [pid]
    while queue:
        children = parents.get(queue.pop(0), [])
        found.extend(children)
        queue.extend(children)
    return found


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise EnvironmentProblem(f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (a `preexec_fn`)."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, so that none can slip away."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def namespace_prefix() -> list[str]:
    """Command prefix that gives a server a process namespace which dies as a whole; empty where that is not allowed."""
    if shutil.which("unshare") is None:
        return []
    base = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    for prefix in (base, [*base, "--user", "--map-current-user"]):
        probe = subprocess.run([*prefix, "true"], capture_output=True, check=False, timeout=20)
        if probe.returncode == 0:
            return prefix
    return []


def signal_group(pgid: int, number: signal.Signals) -> None:
    """Signal a process group; one that is gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pgid, number)


def reap() -> None:
    """Collect ended children of this process without waiting."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass


def kill_descendants(timeout_s: float = 10.0) -> list[int]:
    """SIGKILL everything below this process until nothing is left; returns what still lives after the timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
        reap()
        left = descendants(os.getpid())
        if not left or time.monotonic() > deadline:
            return left
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
