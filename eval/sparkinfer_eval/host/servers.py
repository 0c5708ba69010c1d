"""Servers that outlive the call that started them: a file says which, where and since when."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from sparkinfer.errors import ConfigError, EnvironmentProblem
from sparkinfer_eval.host.site import Host

STOP_S = 20.0
FAST = ["--state-dtype", "bfloat16"]
"""Of the settings that trade accuracy for speed those that pass eval/accuracy.py (docs/gpu.md has the figures)."""
USEFUL = re.compile(r"error|exception|traceback|captured|memory|loaded|kv cache|using |graph", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Running:
    """A server that was started."""

    engine: str
    model: str
    column: str
    port: int
    pid: int
    log: str
    ready_s: float
    """Seconds from start to the first answer of /health; -1 while it was not seen yet."""
    command: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The engine in results: a column other than `exact` is part of it."""
        return self.engine if self.column == "exact" else f"{self.engine}-{self.column}"

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"


def _file(host: Host) -> Path:
    return host.work / "server.json"


def running(host: Host) -> Running:
    """The server that is running. Raises ConfigError when there is none."""
    try:
        found = Running(**json.loads(_file(host).read_text("utf-8")))
    except FileNotFoundError:
        raise ConfigError("no server is running: start one with `gpu_host.py serve`") from None
    if not _alive(found.pid):
        raise ConfigError(f"the {found.engine} server has ended; its log is {found.log}")
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def arguments_of(host: Host, engine: str, model: Path, port: int, column: str, extra: list[str]) -> list[str]:
    """The server's command line. `column` `fast` is ours alone: what trades accuracy and passes the gate is on."""
    if engine == "vllm":
        return [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name",
            "m", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "16384",
            "--gpu-memory-utilization", "0.9", *_text_only(model), *extra,
        ]  # fmt: skip
    return [
        sys.executable, "-m", "sparkinfer.cli", "serve", str(model), "--served-model-name", "m", "--port", str(port),
        "--device", "cuda", "--max-model-len", "16384", *(FAST if column == "fast" else []), *extra,
    ]  # fmt: skip


def _text_only(model: Path) -> list[str]:
    """What keeps vLLM from loading the image tower of a checkpoint that has one."""
    config = json.loads((model / "config.json").read_text("utf-8"))
    return ["--language-model-only"] if "vision_config" in config else []


def start(host: Host, engine: str, model: Path, port: int, column: str, extra: list[str], wait_s: float) -> Running:
    """Start a server in a session of its own, and wait for it up to `wait_s`; call again to go on waiting.

    Raises ConfigError when another one runs, EnvironmentProblem when it ends or does not get ready.
    """
    file = _file(host)
    log = host.work / "logs" / f"{engine}-{model.name}-{column}.log"
    if file.exists() and _alive(json.loads(file.read_text("utf-8"))["pid"]):
        found = running(host)
        if (found.engine, found.model, found.column) != (engine, model.name, column):
            raise ConfigError(f"a {found.engine} server of {found.model} runs already: stop it first")
    else:
        log.parent.mkdir(parents=True, exist_ok=True)
        command = arguments_of(host, engine, model, port, column, extra)
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=host.work, env=host.environment(engine), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        found = Running(engine, model.name, column, port, process.pid, str(log), -1.0, command)
        file.write_text(json.dumps(asdict(found)), "utf-8")
    begun = Path(f"/proc/{found.pid}").stat().st_ctime if _alive(found.pid) else time.time()
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if not _alive(found.pid):
            raise EnvironmentProblem(f"the {engine} server ended; the end of its log:\n{_end(log)}")
        if _healthy(found.url):
            ready = found if found.ready_s >= 0 else replace(found, ready_s=time.time() - begun)
            file.write_text(json.dumps(asdict(ready)), "utf-8")
            print(f"{engine} {model.name} {column}: ready after {ready.ready_s:.1f} s", _useful(log), sep="\n")
            return ready
        time.sleep(0.25)
    raise EnvironmentProblem(f"the {engine} server is not ready after {wait_s:g} s more; its log:\n{_end(log)}")


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(log: Path) -> str:
    return "\n".join(line[:300] for line in log.read_text("utf-8", "replace").splitlines()[-25:])


def _useful(log: Path) -> str:
    lines = [line[:220] for line in log.read_text("utf-8", "replace").splitlines() if USEFUL.search(line)]
    return "\n".join(lines[-12:])


def stop(host: Host) -> None:
    """End the server's session. Harmless when there is none."""
    file = _file(host)
    if not file.exists():
        return
    pid = int(json.loads(file.read_text("utf-8"))["pid"])
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _alive(pid):
            break
        os.killpg(pid, number)
        deadline = time.monotonic() + STOP_S
        while _alive(pid) and time.monotonic() < deadline:
            time.sleep(0.1)
    file.unlink()
