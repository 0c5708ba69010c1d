"""What is known of the server that is held: one JSON file, replaced as a whole, and a lock beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkinfer_eval.lease.process import ProcessId

RUNNING, READY, DIED = "running", "ready", "died"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Everything the watchdog needs to run one server. `key` says for which jobs it may be reused."""

    key: str
    engine: str
    argv: list[str]
    env: dict[str, str]
    url: str
    model: str
    served_name: str
    log: str
    stop_signal: str
    stop_grace_s: float
    owner: ProcessId


@dataclass(frozen=True, slots=True)
class ServerState:
    """The held server as others see it. `info` is the answer to the engine's version query."""

    status: str
    key: str
    engine: str
    url: str
    model: str
    served_name: str
    log: str
    argv: list[str]
    owner: ProcessId
    watchdog: ProcessId | None = None
    server: ProcessId | None = None
    exit_code: int | None = None
    reason: str | None = None
    version: str | None = None
    engine_digest: str | None = None
    ready_s: float | None = None
    info: dict[str, Any] = field(default_factory=dict)


def write_json(path: Path, value: Any) -> None:
    """Write JSON beside `path` and rename it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(path)


def save_state(folder: Path, state: ServerState) -> None:
    """Replace the state file."""
    write_json(folder / "server.json", dataclasses.asdict(state))


def load_state(folder: Path) -> ServerState | None:
    """The state file's content, None when no server is recorded."""
    try:
        data = json.loads((folder / "server.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    for name in ("owner", "watchdog", "server"):
        if data[name] is not None:
            data[name] = ProcessId(**data[name])
    return ServerState(**data)


def forget_state(folder: Path) -> None:
    """Remove the state file."""
    (folder / "server.json").unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: one job at a time changes which server runs."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def log_tail(path: Path, lines: int = 20, width: int = 300) -> str:
    """The last lines of a log, indented, for an error message."""
    if not path.is_file():
        return "    (no log was written)"
    with path.open("rb") as handle:
        handle.seek(0, os.SEEK_END)
        handle.seek(max(0, handle.tell() - 64 * 1024))
        text = handle.read().decode("utf-8", errors="replace")
    kept = [line[:width] for line in text.splitlines() if line.strip()][-lines:]
    return "\n".join("    " + line for line in kept) if kept else "    (the log is empty)"
