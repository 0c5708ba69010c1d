"""Mixture of experts out of torch's own operations, all of fixed shape, so that it can be captured; experts in bf16.

It is what the kernels are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sparkinfer_kernels.moe.reference import route


@dataclass(frozen=True, slots=True)
class LibraryMoe:
    """One block's weights, bf16."""

    router: torch.Tensor
    """[E + 1, H]: the router's rows and, last, the shared expert's gate."""
    gate_up: torch.Tensor
    """[E, 2 * I, H]."""
    down: torch.Tensor
    """[E, H, I]."""
    shared_gate_up: torch.Tensor
    """[2 * S, H]."""
    shared_down: torch.Tensor
    """[H, S]."""
    top_k: int


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.float()).mul_(up).to(up.dtype)


def make_workspace(*arguments: Any) -> None:
    """Nothing: torch allocates from the graph's pool."""
    return None


def moe(x: torch.Tensor, weights: LibraryMoe, workspace: None) -> torch.Tensor:
    """The whole block, [T, H] to [T, H]; padding rows are computed like others."""
    tokens, experts = x.shape[0], weights.gate_up.shape[0]
    logits = x @ weights.router.t()
    share, chosen = route(logits[:, :-1], weights.top_k)
    flat, order = chosen.reshape(-1).to(torch.int32).sort(stable=True)
    ends = torch.searchsorted(flat, torch.arange(experts, dtype=torch.int32, device=x.device), right=True)
    offsets = ends.to(torch.int32)
    rows = x.index_select(0, order // weights.top_k)
    inner = _swiglu(torch._grouped_mm(rows, weights.gate_up.transpose(1, 2), offs=offsets))
    out = torch._grouped_mm(inner, weights.down.transpose(1, 2), offs=offsets)
    scaled = out.float() * share.reshape(-1, 1).index_select(0, order)
    # Back to token order, then a sum of fixed order: the result does not depend on the neighbours.
    unsorted = torch.empty_like(scaled).index_copy_(0, order, scaled)
    routed = unsorted.view(tokens, weights.top_k, -1).sum(dim=1)
    shared = _swiglu(x @ weights.shared_gate_up.t()) @ weights.shared_down.t()
    return (routed + shared.float() * torch.sigmoid(logits[:, -1:].float())).to(x.dtype)
