"""What a calibration has done, layer by layer in files, so that a run that was killed goes on after its last layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from sparkinfer.models.safetensors_file import FileWriter, NewTensor, dtype_name


@dataclass(slots=True)
class InputStatistics:
    """Over all calibration tokens of a linear layer's input [T, K]."""

    amax: float
    """Largest magnitude."""
    mean_square: torch.Tensor
    """[K] fp32."""


class SavedLayers:
    """Files in a folder: the statistics of each layer that is done, and what goes into the next one."""

    def __init__(self, folder: Path) -> None:
        """`folder` exists and belongs to one calibration."""
        self._folder, self._state = folder, folder / "calibration-state.safetensors"

    def load(self) -> tuple[int, dict[str, InputStatistics], torch.Tensor, torch.Tensor] | None:
        """(layers done, their statistics by module, x [T, H], residual [T, H]); None before the first layer."""
        if not self._state.exists():
            return None
        state = load_file(self._state)
        done = int(state["layers"])
        found: dict[str, InputStatistics] = {}
        for number in range(done):
            saved = load_file(self._layer(number))
            for name in (name.removesuffix("|amax") for name in saved if name.endswith("|amax")):
                found[name] = InputStatistics(float(saved[f"{name}|amax"]), saved[f"{name}|mean_square"])
        return done, found, state["x"], state["residual"]

    def save(self, number: int, found: Mapping[str, InputStatistics], x: torch.Tensor, residual: torch.Tensor) -> None:
        """Layer `number` is done: its statistics, and x and residual [T, H] behind it. Raises OSError."""
        tensors = {}
        for name, one in found.items():
            tensors[f"{name}|amax"] = torch.tensor(one.amax)
            tensors[f"{name}|mean_square"] = one.mean_square
        _write(self._layer(number), tensors)
        # The state comes last: it says up to where the layers' files count.
        _write(self._state, {"layers": torch.tensor(float(number + 1)), "x": x, "residual": residual})

    def _layer(self, number: int) -> Path:
        return self._folder / f"calibration-{number:03d}.safetensors"


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A file that has its name when it is whole and on the disk."""
    new = [NewTensor(name, dtype_name(value.dtype), tuple(value.shape)) for name, value in tensors.items()]
    writer = FileWriter(path, new)
    try:
        for name, value in tensors.items():
            writer.write_tensor(name, value)
    except BaseException:
        writer.abandon()
        raise
    writer.finish()
