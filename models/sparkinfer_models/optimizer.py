"""Muon for hidden matrices, AdamW for the rest.

Muon after Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/): the momentum of a matrix is replaced by its
nearest semi-orthogonal one, found by a quintic Newton-Schulz iteration.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalise(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Newton-Schulz on a batch [count, rows, columns]; singular values end near 1."""
    a, b, c = _COEFFICIENTS
    x = matrices.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(dtype)
    for _ in range(_ITERATIONS):
        square = x @ x.transpose(-1, -2)
        x = a * x + (b * square + c * square @ square) @ x
    return x.transpose(-1, -2) if tall else x


class Muon(torch.optim.Optimizer):
    """Muon over 2-D or 3-D (stacked) parameters; equal shapes are orthogonalised in one batch."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; gradients must be set."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape[-2:], []).append(parameter)
            for shape, parameters in by_shape.items():
                self._update(parameters, shape, group)

    def _update(self, parameters: list[nn.Parameter], shape: torch.Size, group: dict[str, Any]) -> None:
        grads, momenta = [], []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            grads.append(parameter.grad)
            momenta.append(state["momentum"])
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        blended = torch._foreach_lerp(grads, momenta, group["momentum"])
        dtype = torch.bfloat16 if parameters[0].is_cuda else torch.float32
        flat = orthogonalise(torch.cat([b.reshape(-1, *shape) for b in blended]), dtype).float()
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        counts = [parameter.numel() // shape.numel() for parameter in parameters]
        updates = [u.reshape(p.shape) for u, p in zip(flat.split(counts), parameters, strict=True)]
        tensors: list[Tensor] = list(parameters)
        torch._foreach_mul_(tensors, 1 - group["lr"] * group["decay"])
        torch._foreach_add_(tensors, updates, alpha=-group["lr"] * scale)


_ADAM_ONLY = ("embed", "lm_head", "conv", "in_proj_a", "in_proj_b", "mlp.gate.weight", "shared_expert_gate", "codebook")


def make_optimizers(
    parameters: dict[str, Tensor], muon_lr: float, adam_lr: float, fused: bool
) -> list[torch.optim.Optimizer]:
    """[Muon, AdamW] over a checkpoint's parameters; which one takes a tensor is decided by its name and shape."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, value in parameters.items():
        hidden = value.dim() >= 2 and not any(part in name for part in _ADAM_ONLY)
        (matrices if hidden else others).append(value)
    adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=fused)
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, muon_lr), adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def set_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Sets every learning rate to its peak times `factor`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor


def trapezoid(step: int, total: int, warmup: int, decay_share: float) -> float:
    """Learning-rate factor: linear warm-up, flat, then linear to zero over the last `decay_share` of the steps."""
    rise = min(1.0, (step + 1) / max(1, warmup))
    fall = (total - step) / max(1.0, decay_share * total)
    return min(rise, fall, 1.0)
