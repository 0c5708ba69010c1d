"""Plain torch mixture of experts: fp32 softmax router, top-k renormalised, SwiGLU experts, gated shared expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparkinfer_kernels.linear.reference import BlockedWeight, linear


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of a fused projection [..., 2 * I] (gate half first): [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: softmax in fp32, the `top_k` largest, renormalised to sum 1.

    Args:
        logits: [T, E].

    Returns:
        (weights [T, top_k] fp32, experts [T, top_k] int64).
    """
    weights, experts = torch.softmax(logits.float(), dim=-1).topk(top_k, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), experts


def grouped_experts(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Sum over a token's experts of weight * down(swiglu(gate_up(x))).

    Tokens are sorted by expert, so that each expert is one pair of matrix products over a contiguous slice.

    Args:
        x: [T, H].
        weights: [T, k] fp32; experts: [T, k] int64.
        gate_up: [E, H, 2 * I]; down: [E, I, H].

    Returns:
        [T, H] in the dtype of `x`.
    """
    tokens, top_k = experts.shape
    flat = experts.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=gate_up.shape[0]).tolist()
    source = order // top_k
    rows = x.index_select(0, source)
    out = torch.empty_like(rows)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            stop = start + count
            torch.mm(swiglu(rows[start:stop] @ gate_up[expert]), down[expert], out=out[start:stop])
            start = stop
    scaled = out.float().mul_(weights.reshape(-1, 1).index_select(0, order))
    # Back to token order, then a sum of fixed order: the result does not depend on the neighbours.
    unsorted = torch.empty_like(scaled).index_copy_(0, order, scaled)
    return unsorted.view(tokens, top_k, -1).sum(dim=1).to(x.dtype)


def moe(
    x: torch.Tensor,
    router: torch.Tensor | BlockedWeight,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared_gate_up: torch.Tensor | BlockedWeight,
    shared_down: torch.Tensor | BlockedWeight,
    top_k: int,
) -> torch.Tensor:
    """The whole block: routed experts plus sigmoid(shared gate) times the shared expert.

    Args:
        x: [T, H].
        router: [E + 1, H] packed by `pack_linear`: the router's rows and, last, the shared expert's gate.
        gate_up: [E, H, 2 * I]; down: [E, I, H].
        shared_gate_up: [2 * S, H]; shared_down: [H, S], packed too.

    Returns:
        [T, H] in the dtype of `x`.
    """
    logits = linear(x, router)
    weights, experts = route(logits[:, :-1], top_k)
    routed = grouped_experts(x, weights, experts, gate_up, down)
    shared = linear(swiglu(linear(x, shared_gate_up)), shared_down)
    return routed.add_(shared.mul_(torch.sigmoid(logits[:, -1:])))
