"""`sparkinfer doctor`: is this machine, and a model folder, fit to serve?"""

from __future__ import annotations

import importlib
import json
import os
import platform
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from sparkinfer.errors import SparkinferError
from sparkinfer.settings import printable, resolve

PYTHON_VERSIONS = ((3, 11), (3, 13))
MODULES = ("torch", "transformers", "tokenizers", "safetensors", "uvicorn", "starlette", "zmq", "msgspec")
FAST_MODULES = ("uvloop", "httptools")


@dataclass(frozen=True)
class Finding:
    """One line of the report. `code` 0 is fine, 2 bad input, 3 the machine."""

    name: str
    text: str
    code: int = 0
    note: bool = False
    """Worth knowing, and no reason to fail."""


def doctor(model: str | None) -> int:
    """Print one line per check; returns 0, 2 (something given is wrong) or 3 (the machine cannot serve)."""
    findings = [_python(), *_modules(), *_torch(), _memory(), *_environment()]
    if model is not None:
        findings += _model(model)
    for finding in findings:
        mark = "FAIL" if finding.code else "note" if finding.note else "ok"
        print(f"{mark:5}{finding.name:14}{printable(finding.text)}")
    return max(finding.code for finding in findings)


def _python() -> Finding:
    low, high = PYTHON_VERSIONS
    version = sys.version_info[:2]
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if not low <= version <= high:
        return Finding("python", f"{text}: use {low[0]}.{low[1]} to {high[0]}.{high[1]}", 3)
    if platform.system() != "Linux":
        return Finding("python", f"{text}: only Linux is supported", 3)
    return Finding("python", text)


def _modules() -> list[Finding]:
    findings = []
    for names, code in ((MODULES, 3), (FAST_MODULES, 0)):
        missing = [name for name in names if not _importable(name)]
        if missing:
            hint = "run `make setup`" if code else "serving works without, at a higher cost per token"
            findings.append(Finding("packages", f"missing {', '.join(missing)}: {hint}", code, note=True))
    return findings or [Finding("packages", "all there")]


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _torch() -> list[Finding]:
    if not _importable("torch"):
        return []
    import torch

    findings = [Finding("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            findings.append(Finding("device", f"cuda:{index} {name}, {free >> 20} of {total >> 20} MiB free"))
    else:
        cpus = len(os.sched_getaffinity(0))
        findings.append(Finding("device", f"cpu, {cpus} usable CPUs, {torch.backends.cpu.get_cpu_capability()}"))
    return findings


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    text = f"{memory.available >> 20} of {memory.total >> 20} MiB free"
    if memory.available < 2 << 30:
        return Finding("memory", f"{text}: at least 2048 MiB are needed to serve even a small model", 3)
    return Finding("memory", text)


def _environment() -> list[Finding]:
    try:
        resolve(os.environ)
    except SparkinferError as error:
        return [Finding("settings", text, error.exit_code) for text in str(error).splitlines()]
    return [Finding("settings", "all known and fit to each other")]


def _model(model: str) -> list[Finding]:
    from sparkinfer.models.config import load_config
    from sparkinfer.server.serve import check_model_folder

    try:
        folder = check_model_folder(model)
        config = load_config(folder)
        size = sum(_tensor_bytes(path) for path in sorted(folder.glob("*.safetensors")))
    except SparkinferError as error:
        return [Finding("model", str(error), error.exit_code)]
    except (ValueError, OSError) as error:
        return [Finding("model", f"{model}: unreadable ({error})", 2)]
    if size == 0:
        return [Finding("model", f"{folder}: no *.safetensors", 2)]
    findings = [Finding("model", f"{config.architecture}, {size >> 20} MiB of weights")]
    if size > psutil.virtual_memory().total:
        findings.append(Finding("model", "the weights are larger than this machine's main memory", note=True))
    return findings


def _tensor_bytes(path: Path) -> int:
    """Bytes of tensor data; raises ValueError when the file is shorter than its header says."""
    with path.open("rb") as handle:
        start = handle.read(8)
        if len(start) < 8:
            raise ValueError(f"{path.name} is cut off: {len(start)} bytes")
        (length,) = struct.unpack("<Q", start)
        header = json.loads(handle.read(length))
    data = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    have = path.stat().st_size - 8 - length
    if have < data:
        raise ValueError(f"{path.name} is cut off: {have} of {data} bytes of tensors")
    return int(data)
