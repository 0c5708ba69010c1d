"""Which program runs an image on this machine: bubblewrap, or podman or docker. Imports nothing outside the project."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess

from sparkinfer.errors import EnvironmentProblem


def uses_daemon(device: str) -> bool:
    """Whether an image is run by podman or docker (for a GPU, or when ATTEST_RUNTIME says so) or under bubblewrap."""
    return device == "cuda" or bool(os.environ.get("ATTEST_RUNTIME"))


def runtime(device: str) -> list[str]:
    """podman or docker, with its own options. Raises EnvironmentProblem saying what is missing."""
    given = shlex.split(os.environ.get("ATTEST_RUNTIME", ""))
    if device == "cuda" and shutil.which("nvidia-ctk") is None:
        raise EnvironmentProblem("the NVIDIA container toolkit is not installed (nvidia-container-toolkit)")
    for program in [given] if given else [["podman"], ["docker"]]:
        if shutil.which(program[0]) is not None:
            done = subprocess.run([*program, "info"], capture_output=True, text=True, check=False, timeout=60)
            if done.returncode == 0:
                return program
    raise EnvironmentProblem(f"{shlex.join(given) or 'neither podman nor docker'} answers here")
