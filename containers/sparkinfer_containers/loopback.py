"""Debian's `docker-registry` on a loopback port: the real registry that a release on one machine is pushed to."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from sparkinfer.errors import EnvironmentProblem
from sparkinfer.output import require_folder

START_S = 15


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _config(storage: Path, port: int) -> str:
    return f"""\
version: 0.1
log: {{level: warn}}
storage:
  filesystem: {{rootdirectory: "{storage}"}}
  delete: {{enabled: false}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@contextmanager
def registry(storage: Path) -> Iterator[str]:
    """Serve `storage` until the block ends; yields `127.0.0.1:<port>`.

    Raises ConfigError when `storage` is no folder to write to, EnvironmentProblem when the program is not installed or
    does not start.
    """
    require_folder(storage, "registry storage")
    program = shutil.which("docker-registry")
    if program is None:
        raise EnvironmentProblem("docker-registry is not installed: apt-get install docker-registry")
    storage.mkdir(parents=True, exist_ok=True)
    for _ in range(3):  # the port is free when asked for, but another process may take it before the registry does
        port = _free_port()
        config = storage / "config.yml"
        config.write_text(_config(storage / "data", port), encoding="utf-8")
        with (storage / "registry.log").open("ab") as log:
            process = subprocess.Popen([program, "serve", str(config)], stdout=log, stderr=log)
        try:
            if _answers(process, port):
                yield f"127.0.0.1:{port}"
                return
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    raise EnvironmentProblem(f"docker-registry did not start within {START_S} s: see {storage / 'registry.log'}")


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/v2/", trust_env=False).status_code == 200:
                return True
        except httpx.TransportError:
            time.sleep(0.05)
    return False
