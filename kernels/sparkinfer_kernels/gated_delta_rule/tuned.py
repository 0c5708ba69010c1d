"""Launch parameters of the kernels, by architecture: read from `tuned.json`, which holds what was measured.

An entry of an architecture has been compared with the reference (`tests/kernels/test_gdn_gpu.py` runs every entry) and
timed on it ("sm_120": only compiled for it). One named "candidate" is still to be compared or timed; nothing picks it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Launch:
    """How one kernel is launched.

    `block`: tokens of a tile of `conv`, columns of V at a time of `decode`, `scan` and `checkpoint`. `narrow`: columns
    of `scan` where programs with so few all run at a time, 0 for `block` always. `programs`: of `output`, how many run
    at a time on a multiprocessor.
    """

    num_warps: int
    num_stages: int = 1
    block: int = 0
    narrow: int = 0
    programs: int = 0
    maxnreg: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        """Keyword arguments of the launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.maxnreg}


@dataclass(frozen=True, slots=True)
class Tuning:
    """Launch parameters of all kernels of the operation."""

    many_rows: int
    """Rows from which on `decode_many` is faster than `decode`."""
    decode: Launch
    decode_many: Launch
    conv: Launch
    transform: Launch
    scan: Launch
    checkpoint: Launch
    output: Launch


@cache
def tunings() -> dict[str, Tuning]:
    """By architecture, e.g. "sm_90", and candidates, e.g. "sm_90 candidate", which nothing picks by itself."""
    table: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("tuned.json").read_text())
    return {arch: _tuning(**entries) for arch, entries in table.items()}


def _tuning(many_rows: int, **kernels: dict[str, int]) -> Tuning:
    return Tuning(many_rows, **{name: Launch(**launch) for name, launch in kernels.items()})


@cache
def _architecture(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def tuning_for(device: torch.device) -> Tuning:
    """Of the device's architecture; of one without entries those of sm_120, which need the least shared memory."""
    if device.type != "cuda":
        return tunings()["sm_120"]
    index = torch.cuda.current_device() if device.index is None else device.index
    return tunings().get(_architecture(index), tunings()["sm_120"])
