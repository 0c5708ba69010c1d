"""The mixture-of-experts block on a GPU: see `qwen3_5.MoeMlp`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparkinfer.models.config import ModelConfig
from sparkinfer.models.gpu_weights import GpuWeights, Projection, Rows

if TYPE_CHECKING:
    from sparkinfer.models.qwen3_5_gpu import PassInputs


class MoeMlp:
    """Routed experts and one shared expert behind a sigmoid gate."""

    def __init__(self, config: ModelConfig, weights: GpuWeights, prefix: str) -> None:
        self.ops = weights.ops
        hidden, shared = config.hidden_size, config.shared_intermediate_size
        names = (f"{prefix}gate.weight", config.num_experts), (f"{prefix}shared_expert_gate.weight", 1)
        router = torch.cat([weights.get(name, rows, hidden) for name, rows in names])
        shared_gate_up = torch.cat(
            [weights.get(f"{prefix}shared_expert.{name}_proj.weight", shared, hidden) for name in ("gate", "up")]
        )
        shared_down = weights.get(f"{prefix}shared_expert.down_proj.weight", hidden, shared)
        gate_up, down = self._experts(config, weights, f"{prefix}experts.")
        self.weights = self.ops.prepare_moe(
            router, gate_up, down, shared_gate_up, shared_down, config.experts_per_token
        )
        self.input = InputRows(weights, hidden)

    @staticmethod
    def _experts(config: ModelConfig, weights: GpuWeights, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """All experts' matrices [E, 2 * I, H] and [E, H, I]: stored fused, or expert by expert."""
        count, inner, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        if weights.source.has(f"{prefix}gate_up_proj"):
            gate_up = weights.get(f"{prefix}gate_up_proj", count, 2 * inner, hidden)
            return gate_up, weights.get(f"{prefix}down_proj", count, hidden, inner)
        gate_up = torch.empty(count, 2 * inner, hidden, dtype=weights.dtype, device=weights.device)
        down = torch.empty(count, hidden, inner, dtype=weights.dtype, device=weights.device)
        for expert in range(count):
            one = f"{prefix}{expert}."
            gate_up[expert, :inner] = weights.get(f"{one}gate_proj.weight", inner, hidden)
            gate_up[expert, inner:] = weights.get(f"{one}up_proj.weight", inner, hidden)
            down[expert] = weights.get(f"{one}down_proj.weight", hidden, inner)
        return gate_up, down

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


Reader = Projection | InputRows
"""What reads a norm's output."""
