"""Seeded random weights of real shape, for measuring without a checkpoint."""

from __future__ import annotations

import torch

from sparkinfer.errors import CheckpointError
from sparkinfer.models.config import ModelConfig
from sparkinfer.quantization import fp8, nvfp4
from sparkinfer.quantization.fp8 import Fp8BlockParts
from sparkinfer.quantization.nvfp4 import Nvfp4Parts
from sparkinfer.quantization.schemes import Format

STD = 0.02


class DummySource:
    """A `WeightSource` without files, in the formats that the config asks for. Figures must say that it was used."""

    def __init__(self, config: ModelConfig, seed: int, device: torch.device | str = "cpu") -> None:
        self._quantization = config.quantization
        self._dtype = getattr(torch, config.dtype)
        self._device = torch.device(device)
        self._generator = torch.Generator(self._device).manual_seed(seed)

    def has(self, name: str) -> bool:
        """Experts are fused where they are not quantised, single where they are."""
        if ".experts." not in name:
            return True
        prefix = name.partition(".experts.")[0]
        single = self._quantization is not None and self._quantization.scheme_of(f"{prefix}.experts.0.up_proj")
        return name.endswith(("experts.gate_up_proj", "experts.down_proj")) != bool(single)

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Normal with standard deviation 0.02; norms, gates and decays get values a trained model could have."""
        parts = self.quantised(name, shape)
        if parts is not None:
            return parts.dequantise(self._dtype)
        if name.endswith("A_log"):
            return self._empty(shape).uniform_(1.0, 16.0, generator=self._generator).log_()
        if name.endswith(("linear_attn.norm.weight", "dt_bias")):
            return self._empty(shape).fill_(1.0)
        if name.endswith("norm.weight"):
            return self._empty(shape).zero_().to(self._dtype)
        return self._empty(shape).normal_(0.0, STD, generator=self._generator).to(self._dtype)

    def quantised(self, name: str, shape: tuple[int, ...] | None = None) -> Nvfp4Parts | Fp8BlockParts | None:
        """Uniform codes with scales that give the same standard deviation; `shape` is needed here."""
        scheme = self._quantization.scheme_of(name.removesuffix(".weight")) if self._quantization else None
        if scheme is None:
            return None
        if shape is None:
            raise CheckpointError(f"{name}: the shape of a random weight must be given")
        if scheme.format is Format.NVFP4:
            if shape[-1] % nvfp4.BLOCK:
                raise CheckpointError(f"{name} has {shape[-1]} columns; NVFP4 needs multiples of {nvfp4.BLOCK}")
            packed = self._codes((*shape[:-1], shape[-1] // 2))
            scales = torch.ones(*shape[:-1], shape[-1] // nvfp4.BLOCK, device=self._device).to(torch.float8_e4m3fn)
            rms = torch.tensor(nvfp4.E2M1_VALUES).square().mean().sqrt()
            fp32 = torch.ones((), device=self._device)
            return Nvfp4Parts(packed, scales, fp32 * float(STD / rms), fp32 * float(10 / 2688))
        codes = self._codes(shape).bitwise_and_(0xBF).view(torch.float8_e4m3fn)
        # Without the top bit of the exponent, the codes' root mean square is 0.598.
        blocks = [fp8.blocks_of(size) for size in shape[-2:]]
        return Fp8BlockParts(codes, torch.full((*shape[:-2], *blocks), STD / 0.598, device=self._device))

    def finish(self) -> None:
        """Nothing can be left over."""

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, device=self._device)

    def _codes(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self._device).random_(0, 256, generator=self._generator)
