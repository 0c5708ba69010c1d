"""Time and host memory that loading a checkpoint takes, every weight as it is stored, up to the device."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from sparkinfer.models.config import load_config
from sparkinfer.models.loader import SafetensorsSource
from sparkinfer.models.tensors import language_tensors
from sparkinfer.quantization.nvfp4 import Nvfp4Parts


@dataclass(frozen=True)
class Load:
    """One load. Memory in MiB; `anonymous` leaves out pages of the files themselves, which the kernel can drop."""

    device: str
    mib: float
    seconds: float
    headers_s: float
    tensors: int
    host_peak_anonymous: float
    host_peak: float


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def measure_load(folder: Path, device: torch.device) -> Load:
    """Load everything once, touching every page, and let go of each layer's tensors as a model would that repacks them.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    config = load_config(folder)
    torch.empty(1, device=device)
    start, anonymous = time.perf_counter(), _status("RssAnon")
    source = SafetensorsSource(folder, config, device)
    headers = time.perf_counter() - start
    size, count, peak_anonymous, peak = 0, 0, 0.0, 0.0
    before = _status("VmRSS")
    for spec in language_tensors(config):
        if not source.has(spec.name):
            # Experts that are stored fused.
            continue
        parts = source.quantised(spec.name, spec.shape)
        if parts is None:
            tensors = [source.get(spec.name, spec.shape)]
        elif isinstance(parts, Nvfp4Parts):
            tensors = [parts.packed, parts.scales, parts.global_scale]
        else:
            tensors = [parts.weight, parts.scales]
        for tensor in tensors:
            raw = tensor.reshape(-1).view(torch.uint8)
            # One byte of each page brings it in.
            raw[::4096].max()
            size, count = size + raw.numel(), count + 1
        if count % 16 < len(tensors):
            peak_anonymous = max(peak_anonymous, _status("RssAnon") - anonymous)
            peak = max(peak, _status("VmRSS") - before)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    source.finish()
    seconds = time.perf_counter() - start
    return Load(str(device), size / 2**20, seconds, headers, count, peak_anonymous, peak)


def drop_cache(folder: Path) -> None:
    """Ask the kernel to forget the files' pages, so that the next load reads the disk."""
    for path in folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def as_json(load: Load) -> str:
    """One line."""
    return json.dumps(
        {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(load).items()}
    )
