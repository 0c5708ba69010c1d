"""Plain torch rotary embedding (Su et al. 2021, arXiv 2104.09864), partial and in the half-split form.

Only the first `rot` dimensions of a head are rotated; dimension i pairs with i + rot/2. For text the three sections of
interleaved mrope carry the same position, so the embedding is the one-dimensional one.
"""

from __future__ import annotations

import torch

from sparkinfer_kernels.rms_norm.reference import unweighted_rms_norm

SLICE_TOKENS = 2048
"""Tokens whose fp32 copies stay in a CPU's cache from operation to operation; two or more such slices go one by one."""


def rotary_table(max_positions: int, rot: int, theta: float, device: torch.device) -> torch.Tensor:
    """cos and sin of every position, computed in fp32.

    Returns:
        [max_positions, 2, rot / 2] fp32: cos in [:, 0], sin in [:, 1].
    """
    inv_freq = 1.0 / theta ** (torch.arange(0, rot, 2, dtype=torch.float32) / rot)
    angle = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq
    return torch.stack((angle.cos(), angle.sin()), dim=1).to(device)


def qk_norm_rotary(
    qk: torch.Tensor, weight1: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """Zero-centred RMS norm per head, then the rotation of the first dimensions; query and key heads together.

    Args:
        qk: [T, h, d], query heads then key heads.
        weight1: [h, d] fp32, each head's norm weight plus one.
        cos, sin: [T, 1, rot / 2] fp32.
        eps: added to the mean square.

    Returns:
        [T, h, d] in the dtype of `qk`.
    """
    if qk.device.type == "cpu" and qk.shape[0] >= 2 * SLICE_TOKENS:
        out = torch.empty(qk.shape, dtype=qk.dtype)
        for rows in zip(*(x.split(SLICE_TOKENS) for x in (out, qk, cos, sin)), strict=True):
            rows[0].copy_(_qk_norm_rotary(rows[1], weight1, rows[2], rows[3], eps))
        return out
    return _qk_norm_rotary(qk, weight1, cos, sin, eps)


def _qk_norm_rotary(
    qk: torch.Tensor, weight1: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """`qk_norm_rotary` of one slice."""
    y = unweighted_rms_norm(qk, eps).mul_(weight1)
    half = cos.shape[-1]
    first, second = y[..., :half], y[..., half : 2 * half]
    rotated = first * cos
    rotated.addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)
    return y.to(qk.dtype)
