"""Facts of the machine, the source tree and the Python environments that a measurement depends on.

Nothing here identifies a host: no name, no address, no path. A fact that cannot be read is None, never guessed.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from sparkinfer.errors import EnvironmentProblem

GPU_FIELDS = (
    "name",
    "uuid",
    "driver_version",
    "vbios_version",
    "memory.total",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "power.draw",
    "temperature.gpu",
    "ecc.mode.current",
    "persistence_mode",
    "clocks_throttle_reasons.active",
)

_FREEZE_PROGRAM = (
    "import importlib.metadata as m, json, platform;"
    "print(json.dumps({'python': platform.python_version(),"
    "'packages': {d.metadata['Name']: d.version for d in m.distributions() if d.metadata['Name']}}))"
)


def _output(command: list[str], timeout_s: float = 60.0, cwd: Path | None = None) -> str | None:
    """Standard output of a command, None when it is absent or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=cwd, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def _first_value(path: Path, key: str) -> str | None:
    """The value of the first `key : value` line of a /proc file."""
    if not path.is_file():
        return None
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _os_name() -> str:
    """PRETTY_NAME of os-release, else the kernel's name."""
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def _memory_bytes() -> int | None:
    """Physical memory in bytes, or the control group's limit where that is lower."""
    text = _first_value(Path("/proc/meminfo"), "MemTotal")
    if text is None:
        return None
    total = int(text.split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file():
        value = limit.read_text().strip()
        if value.isdigit():
            total = min(total, int(value))
    return total


def _cpu_quota() -> float | None:
    """CPUs granted by the control group (quota / period), None when unlimited or unknown."""
    path = Path("/sys/fs/cgroup/cpu.max")
    if not path.is_file():
        return None
    quota, _, period = path.read_text().strip().partition(" ")
    return None if quota == "max" or not period else int(quota) / int(period)


def parse_gpu_query(text: str) -> list[dict[str, str]]:
    """Rows of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` as dictionaries keyed by GPU_FIELDS.

    Raises ValueError when a row has another number of fields.
    """
    rows = []
    for row in csv.reader(io.StringIO(text), skipinitialspace=True):
        if not row:
            continue
        if len(row) != len(GPU_FIELDS):
            raise ValueError(f"nvidia-smi answered {len(row)} fields where {len(GPU_FIELDS)} were asked for: {row}")
        rows.append(dict(zip(GPU_FIELDS, row, strict=True)))
    return rows


def gpus() -> list[dict[str, str]]:
    """The GPUs that nvidia-smi lists (MiB, MHz, W, degrees C); empty without nvidia-smi or GPU."""
    text = _output(["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"])
    return [] if text is None else parse_gpu_query(text)


def machine_facts() -> dict[str, Any]:
    """CPU, cores, memory (bytes), operating system, kernel, frequency governor and GPUs of this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    flags = (_first_value(cpuinfo, "flags") or "").split()
    return {
        "cpu_model": _first_value(cpuinfo, "model name") or platform.processor() or None,
        "cpu_architecture": platform.machine(),
        "cpu_flags": sorted(f for f in flags if f.startswith(("avx", "amx"))),
        "cpus_online": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "cpu_quota": _cpu_quota(),
        "cpu_governor": governor.read_text().strip() if governor.is_file() else None,
        "memory_bytes": _memory_bytes(),
        "os": _os_name(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "gpus": gpus(),
    }


def source_facts(repository: Path) -> dict[str, Any]:
    """Commit, `git describe` and whether tracked files differ from it; None each outside a git checkout."""
    commit = _output(["git", "rev-parse", "HEAD"], cwd=repository)
    if commit is None:
        return {"commit": None, "describe": None, "dirty": None}
    status = _output(["git", "status", "--porcelain", "--untracked-files=no"], cwd=repository)
    describe = _output(["git", "describe", "--tags", "--always"], cwd=repository)
    return {
        "commit": commit.strip(),
        "describe": describe.strip() if describe else None,
        "dirty": None if status is None else bool(status.strip()),
    }


def environment_packages(python: Path) -> dict[str, Any]:
    """`{python, packages: {name: version}}` of the environment whose interpreter is `python`.

    Raises EnvironmentProblem when that interpreter does not run.
    """
    text = _output([str(python), "-c", _FREEZE_PROGRAM])
    if text is None:
        raise EnvironmentProblem(f"{python} does not run: set the environment up first (make setup), or drop it")
    found = json.loads(text)
    found["packages"] = dict(sorted(found["packages"].items(), key=lambda item: item[0].lower()))
    return found
