"""Plain torch RMS norms (Zhang and Sennrich 2019, arXiv 1910.07467) as the Qwen3.5 family uses them.

All of them compute in fp32 whatever the dtype of their input. `weight1` is `1 + w` of the checkpoint's zero-centred
weight `w`, formed once at load.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight1: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm over the last dimension.

    Args:
        x: [..., d], any float dtype.
        weight1: [d] fp32, the zero-centred weight plus one.
        eps: added to the mean square.

    Returns:
        [..., d] in the dtype of `x`.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight1.shape, weight1, eps)
    return x.float().mul_(inverse_rms(x, eps)).mul_(weight1).to(x.dtype)


def unweighted_rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x)` over the last dimension: a new tensor in fp32."""
    wide = x.float()
    factor = inverse_rms(wide, eps)
    return wide * factor if wide is x else wide.mul_(factor)


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean of squares + eps) over the last dimension, [..., 1] fp32: one pass over `x` and no copy of it.

    torch's norm on a CPU is a chain of operations, each of which makes a new tensor; on fresh memory that costs more
    than the arithmetic.
    """
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
    return squares.mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight1: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `x` into `residual` in place, then norm the sum.

    Args:
        x: [T, d], the sublayer's output.
        residual: [T, d], overwritten by `residual + x`.
        weight1: [d] fp32.
        eps: added to the mean square.

    Returns:
        (normed sum [T, d] in the dtype of `x`, `residual`).
    """
    residual.add_(x)
    return rms_norm(residual, weight1, eps), residual


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`norm(x) * weight * silu(gate)`, the output norm of Gated DeltaNet (arXiv 2412.06464); weight is plain.

    Args:
        x: [T, h, d] fp32.
        gate: [T, h, d], any float dtype.
        weight: [d] fp32.
        eps: added to the mean square.

    Returns:
        [T, h, d] in the dtype of `gate`.
    """
    if gate.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps).mul_(F.silu(gate))
    return F.silu(gate.float(), inplace=True).mul_(x).mul_(inverse_rms(x, eps)).mul_(weight).to(gate.dtype)
