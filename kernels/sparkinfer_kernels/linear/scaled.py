"""NVFP4 weights with NVFP4 activations through `tl.dot_scaled`: for GPUs whose tensor cores take block scales (sm_120).

Compiled for sm_120 in the tests and checked in Triton's interpreter as far as that knows the operation; never run on
such a GPU. Nothing selects it on its own: 4-bit activations change the result more than the format of the weights does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from sparkinfer_kernels.linear import scaled_kernels as kernels
from sparkinfer_kernels.linear.weights import FP8, Nvfp4Parts


@dataclass(frozen=True, slots=True)
class Nvfp4ScaledWeight:
    """NVFP4 as a checkpoint stores it, projections stacked along N."""

    packed: torch.Tensor
    """[N, K / 2] uint8."""
    scales: torch.Tensor
    """[N, K / 16] float8_e4m3fn."""
    factors: torch.Tensor
    """[N] fp32: each row's global scale."""


def prepare_scaled(parts: Sequence[Nvfp4Parts]) -> Nvfp4ScaledWeight:
    """Stack projections that agree in K."""
    packed = torch.cat([part.packed for part in parts])
    scales = torch.cat([part.scales.view(torch.uint8) for part in parts]).view(FP8)
    factors = [part.global_scale.float().reshape(1).expand(part.packed.shape[0]) for part in parts]
    return Nvfp4ScaledWeight(packed, scales, torch.cat(factors).contiguous())


def quantise_nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations [M, K] bf16, K a multiple of 16, as (codes [M, K / 2] uint8, scales [M, K / 16], factors [M])."""
    m, k = x.shape
    codes = torch.empty(m, k // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(m, k // 16, dtype=FP8, device=x.device)
    factors = torch.empty(m, dtype=torch.float32, device=x.device)
    kernels.quantise_nvfp4_kernel[(m,)](
        x, x.stride(0), codes, scales, factors, k, BLOCK=triton.next_power_of_2(k), num_warps=8
    )
    return codes, scales, factors


def product_scaled(x: torch.Tensor, weight: Nvfp4ScaledWeight) -> torch.Tensor:
    """x @ weight.T with x [M, K] bf16 quantised to NVFP4 first; [M, N] bf16."""
    codes, scales, factors = quantise_nvfp4(x)
    (m, k), n = x.shape, weight.packed.shape[0]
    out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    block = 128
    kernels.nvfp4_scaled_kernel[(triton.cdiv(m, block), triton.cdiv(n, block))](
        codes,
        scales,
        factors,
        weight.packed,
        weight.scales,
        weight.factors,
        out,
        m,
        n,
        K=k,
        BLOCK_M=block,
        BLOCK_N=block,
        BLOCK_K=128,
        num_warps=8,
        num_stages=2,
    )
    return out
