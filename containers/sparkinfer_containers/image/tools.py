"""Running the programs that a build needs, with errors that say what to install or do."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkinfer.errors import EnvironmentProblem

PACKAGES = {"mmdebstrap": "mmdebstrap", "dpkg-deb": "dpkg", "bwrap": "bubblewrap", "git": "git"}
APT_HELPER = Path("/usr/lib/apt/apt-helper")


def need(program: str) -> str:
    """Path of a program. Raises EnvironmentProblem naming the Debian package when it is not installed."""
    found = shutil.which(program)
    if found is None:
        raise EnvironmentProblem(f"{program} is not installed: apt-get install {PACKAGES.get(program, program)}")
    return found


def run(
    command: Sequence[str], *, cwd: Path | None = None, extra: Mapping[str, str] | None = None, timeout: int = 1800
) -> str:
    """Standard output of a command in a plain environment. Raises EnvironmentProblem with its last lines on failure."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SPARKINFER_", "PYTHON"))}
    kept.update({"LC_ALL": "C.UTF-8", "TZ": "UTC", "PIP_CONSTRAINT": "", **(extra or {})})
    try:
        done = subprocess.run(
            list(command), cwd=cwd, env=kept, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentProblem(f"{command[0]} did not end within {timeout} s") from error
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-12:])
        raise EnvironmentProblem(f"{' '.join(command[:4])} ... failed with exit code {done.returncode}:\n{tail}")
    return done.stdout
