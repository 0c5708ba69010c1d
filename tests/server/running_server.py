"""Start servers for the tests: the real one over a tiny random model, and one whose model echoes its prompt."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from sparkinfer_eval.toy_model import ToySize

ROOT = Path(__file__).resolve().parents[2]
SCRIPTED = Path(__file__).with_name("scripted.py")
SIZE = ToySize(
    hidden=64, heads=2, head_dim=32, linear_key_heads=1, linear_value_heads=2, linear_head_dim=32, ffn=96, vocab=1024,
    max_positions=2048,
)  # fmt: skip
START_S = 120.0
# Where the servers of these tests keep their sockets: other servers of the machine have theirs elsewhere.
SCRATCH = Path(tempfile.mkdtemp(prefix="si-tests-"))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)


def environment(**extra: str) -> dict[str, str]:
    """The environment of a started program: ours, without settings, with the packages importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARKINFER_")}
    path = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "eval"))
    own = {"PYTHONPATH": path, "TMPDIR": str(SCRATCH), "SPARKINFER_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return {**kept, **own, **extra}


@dataclass
class Running:
    """A started server."""

    process: subprocess.Popen[str]
    log: Path
    url: str = ""
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))

    def text(self) -> str:
        """Everything it has written."""
        return self.log.read_text(encoding="utf-8")

    def wait_ready(self) -> None:
        """Until it prints its address; fails the test with its output when it ends before."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for line in self.text().splitlines():
                if line.startswith("ready on "):
                    self.url = line.removeprefix("ready on ")
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        pytest.fail(f"the server did not get ready (exit code {self.process.poll()}):\n{self.text()}")

    def engine(self) -> psutil.Process:
        """Its engine process."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def metrics(self) -> dict[str, float]:
        """Name with labels to value."""
        lines = self.http.get(self.url + "/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """POST JSON."""
        return self.http.post(self.url + path, json=body, **options)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream; the last one must be [DONE], which is left out."""
        with self.http.stream("POST", self.url + path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


@contextmanager
def start(command: list[str], log: Path, wait: bool = True, session: bool = False, **extra: str) -> Iterator[Running]:
    """Start a server, in a session of its own if asked, and end it and its engine whatever happens."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=output, stderr=subprocess.STDOUT, text=True, env=environment(**extra),
            start_new_session=session,
        )  # fmt: skip
    running = Running(process, log)
    try:
        if wait:
            running.wait_ready()
        yield running
    finally:
        running.http.close()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def start_echo(model_dir: Path, log: Path, script: str = "{}", flags: tuple[str, ...] = ()) -> Iterator[Running]:
    """An echoing server of one's own."""
    command = [str(SCRIPTED), "serve", str(model_dir), "--port", "0", *flags]
    with start(command, log, SCRIPT=script) as running:
        yield running


def wait_idle(server: Running, seconds: float = 10.0) -> dict[str, float]:
    """Metrics once no request is left."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        metrics = server.metrics()
        if metrics["sparkinfer_running"] == metrics["sparkinfer_waiting"] == metrics["sparkinfer_slots_used"] == 0:
            return metrics
        time.sleep(0.05)
    raise AssertionError(f"requests are left: {metrics}")
