"""The mixture-of-experts block on a GPU: see `qwen3_5.MoeMlp`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sparkinfer.models.config import ModelConfig
from sparkinfer.models.gpu_weights import GpuWeights, Parts, Projection, Rows
from sparkinfer.quantization import nvfp4
from sparkinfer.quantization.nvfp4 import Nvfp4Parts

if TYPE_CHECKING:
    from sparkinfer.models.qwen3_5_gpu import PassInputs


class MoeMlp:
    """Routed experts and one shared expert behind a sigmoid gate."""

    def __init__(self, config: ModelConfig, weights: GpuWeights, prefix: str) -> None:
        self.ops = weights.ops
        hidden, shared = config.hidden_size, config.shared_intermediate_size
        names = (f"{prefix}gate.weight", config.num_experts), (f"{prefix}shared_expert_gate.weight", 1)
        router = torch.cat([weights.get(name, rows, hidden) for name, rows in names])
        shared_prefix = f"{prefix}shared_expert."
        gate_and_up = [weights.parts(f"{shared_prefix}{name}_proj.weight", shared, hidden) for name in ("gate", "up")]
        shared_gate_up = kept_or_stacked(gate_and_up, weights.dtype)
        shared_down = kept_or_stacked(
            [weights.parts(f"{shared_prefix}down_proj.weight", hidden, shared)], weights.dtype
        )
        gate_up, down = self._experts(config, weights, f"{prefix}experts.")
        # NVFP4 experts are read as they are for few tokens; many tokens multiply a copy.
        copies = {} if isinstance(gate_up, torch.Tensor) else {"wide": "fp8" if weights.fp8_prefill else "bf16"}
        self.weights = self.ops.prepare_moe(
            router, gate_up, down, shared_gate_up, shared_down, config.experts_per_token, **copies
        )
        self.input = InputRows(weights, hidden)

    @staticmethod
    def _experts(config: ModelConfig, weights: GpuWeights, prefix: str) -> tuple[Matrices, Matrices]:
        """All experts' matrices [E, 2 * I, H] and [E, H, I], or NVFP4 ones expert by expert."""
        count, inner, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        gate_up: Matrices
        down: Matrices
        if weights.source.has(f"{prefix}gate_up_proj"):
            gate_up = weights.get(f"{prefix}gate_up_proj", count, 2 * inner, hidden)
            return gate_up, weights.get(f"{prefix}down_proj", count, hidden, inner)
        pairs = [
            weights.parts(f"{prefix}{expert}.{name}_proj.weight", inner, hidden)
            for expert in range(count)
            for name in ("gate", "up")
        ]
        downs = [weights.parts(f"{prefix}{expert}.down_proj.weight", hidden, inner) for expert in range(count)]
        gate_up, down = kept_or_stacked(pairs, weights.dtype), kept_or_stacked(downs, weights.dtype)
        if isinstance(gate_up, torch.Tensor):
            gate_up = gate_up.view(count, 2 * inner, hidden)
        return gate_up, down.view(count, hidden, inner) if isinstance(down, torch.Tensor) else down

    def __call__(self, x: Rows, inputs: PassInputs) -> torch.Tensor:
        """[T, H] to [T, H]."""
        assert x.bf16 is not None
        return self.ops.moe(x.bf16, self.weights, inputs.workspaces.moe)


class InputRows:
    """What the norm before the block writes: bf16 rows."""

    def __init__(self, weights: GpuWeights, hidden: int) -> None:
        self._dtype, self._device, self._hidden = weights.dtype, weights.device, hidden

    def empty_rows(self, count: int) -> Rows:
        """As `Projection.empty_rows`."""
        return Rows(torch.empty(count, self._hidden, dtype=self._dtype, device=self._device), None)


Matrices = torch.Tensor | list[Nvfp4Parts]


def kept_or_stacked(parts: Sequence[Parts], dtype: torch.dtype) -> Matrices:
    """NVFP4 matrices as they are (N a multiple of 16: the kernels' tiles), others below each other, [sum of N, K]."""
    quantised = [part for part in parts if isinstance(part, Nvfp4Parts)]
    if len(quantised) == len(parts) and all(part.shape[0] % 16 == 0 for part in quantised):
        return quantised
    return stacked(parts, dtype)


def stacked(parts: Sequence[Parts], dtype: torch.dtype) -> torch.Tensor:
    """Matrices of one shape below each other, [sum of N, K]; NVFP4 ones all expanded at once, rounded once."""
    if not all(isinstance(part, Nvfp4Parts) for part in parts):
        return torch.cat([part if isinstance(part, torch.Tensor) else part.dequantise(dtype) for part in parts])
    quantised = [part for part in parts if isinstance(part, Nvfp4Parts)]
    scales = torch.cat([part.scales.view(torch.uint8) for part in quantised]).view(torch.float8_e4m3fn)
    factors = torch.stack([part.global_scale.float() for part in quantised])
    values = nvfp4.dequantise(torch.cat([part.packed for part in quantised]), scales, torch.ones_like(factors[0]))
    return values.mul_(factors.repeat_interleave(parts[0].shape[0]).unsqueeze(1)).to(dtype)


Reader = Projection | InputRows
"""What reads a norm's output."""
