"""Start `sparkinfer serve` as users do, wait until it answers, and end it whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from sparkinfer.errors import ConfigError, EnvironmentProblem

COMMAND = (sys.executable, "-m", "sparkinfer.cli", "serve")
START_S = 600.0
STOP_S = 30.0
READY = "ready on "
KEPT = ("SPARKINFER_IMAGE_DIGEST",)


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Ours, without the settings of a sparkinfer server, then `settings`; the packages that we import can be found."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("SPARKINFER_") or k in KEPT}
    return {**own, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part), **settings}


def _wait(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address that the server prints. Raises ConfigError or EnvironmentProblem with the end of its output."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(READY):
                return line.removeprefix(READY)
        if process.poll() is not None:
            break
        time.sleep(0.05)
    said = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
    code = process.poll()
    how = "did not get ready in time" if code is None else f"ended with code {code}"
    kind = ConfigError if code == ConfigError.exit_code else EnvironmentProblem
    raise kind(f"the server {how}; the end of its output:\n{said}")


@contextmanager
def served(
    model: Path, flags: Sequence[str], settings: Mapping[str, str], command: Sequence[str] = COMMAND
) -> Iterator[str]:
    """The address of a server of `model` on a free port.

    Args:
        model: its folder.
        flags: of `sparkinfer serve`.
        settings: SPARKINFER_* variables; those of our own environment are not handed on.
        command: what starts the server.

    Raises ConfigError and EnvironmentProblem when it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="sparkinfer-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, str(model), "--port", "0", *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(settings),
            )
        try:
            yield _wait(process, log)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
