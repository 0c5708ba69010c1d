"""Time and host memory that loading a checkpoint takes: every weight as it is stored, or as the GPU engine keeps it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from sparkinfer.models.config import load_config
from sparkinfer.models.loader import SafetensorsSource
from sparkinfer.models.tensors import language_tensors
from sparkinfer.quantization.nvfp4 import Nvfp4Parts

SAMPLE_S = 0.01


@dataclass(frozen=True)
class Load:
    """One load. Memory in MiB, what the process held before left out.

    `host_peak_anonymous` leaves out pages of the files themselves, which the kernel can drop; `host_pinned` is memory
    that the device reads directly, which is part of neither.
    """

    device: str
    what: str
    mib: float
    seconds: float
    headers_s: float
    tensors: int
    host_peak_anonymous: float
    host_peak: float
    host_pinned: float


@dataclass
class Peak:
    """Largest values seen, MiB."""

    anonymous: float = 0.0
    resident: float = 0.0
    pinned: float = 0.0
    _before: tuple[float, float] = field(default_factory=lambda: (_status("RssAnon"), _status("VmRSS")))

    def look(self) -> None:
        """Take the values of this moment."""
        self.anonymous = max(self.anonymous, _status("RssAnon") - self._before[0])
        self.resident = max(self.resident, _status("VmRSS") - self._before[1])


@contextmanager
def sampled(device: torch.device) -> Iterator[Peak]:
    """Look at the process's memory all the while."""
    peak, ended = Peak(), threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_S):
            peak.look()

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()
        peak.look()
        if device.type == "cuda":
            peak.pinned = torch.cuda.host_memory_stats()["allocated_bytes.peak"] / 2**20


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def measure_load(folder: Path, device: torch.device) -> Load:
    """Read everything once, and let go of each layer's tensors as a model would that repacks them.

    On a CPU, where tensors are pages of the files, every page is touched.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    config = load_config(folder)
    torch.empty(1, device=device)
    start = time.perf_counter()
    size, count = 0, 0
    with sampled(device) as peak:
        source = SafetensorsSource(folder, config, device)
        headers = time.perf_counter() - start
        for spec in language_tensors(config):
            if not source.has(spec.name):
                # Experts that are stored fused.
                continue
            for tensor in _stored(source, spec.name, spec.shape):
                raw = tensor.reshape(-1).view(torch.uint8)
                if device.type == "cpu":
                    # One byte of each page brings it in.
                    raw[::4096].max()
                size, count = size + raw.numel(), count + 1
        source.finish()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    found = peak.anonymous, peak.resident, peak.pinned
    return Load(str(device), "stored tensors", size / 2**20, seconds, headers, count, *found)


def _stored(source: SafetensorsSource, name: str, shape: tuple[int, ...]) -> list[torch.Tensor]:
    parts = source.quantised(name, shape)
    if parts is None:
        return [source.get(name, shape)]
    if isinstance(parts, Nvfp4Parts):
        return [parts.packed, parts.scales, parts.global_scale]
    return [parts.weight, parts.scales]


def measure_engine_load(folder: Path, device: torch.device) -> Load:
    """Load the model as the GPU engine does: every weight repacked for its kernels, and kept.

    Raises:
        SparkinferError: the checkpoint is damaged, or the device too small.
    """
    from sparkinfer.engine.build_gpu import gpu_limits, gpu_options
    from sparkinfer.runner.open_runner import load_gpu_model
    from sparkinfer.settings import Settings

    config, settings = load_config(folder), Settings()
    torch.empty(1, device=device)
    before, start = torch.cuda.memory_allocated(device), time.perf_counter()
    with sampled(device) as peak:
        load_gpu_model(
            folder,
            config,
            device=device,
            dtype="auto",
            max_model_len=min(config.max_positions, 16384),
            limits=gpu_limits(settings, 0),
            options=gpu_options(settings),
            load_format="auto",
            seed=0,
        )
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    size = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    count = sum(1 for _ in language_tensors(config))
    found = peak.anonymous, peak.resident, peak.pinned
    return Load(str(device), "engine's weights; mib is the device's peak", size, seconds, 0.0, count, *found)


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
