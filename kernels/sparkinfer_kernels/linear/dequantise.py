"""Launchers of the plain Triton kernels around the projections: expanding to bf16, FP8 block products."""

from __future__ import annotations

import torch
import triton

from sparkinfer_kernels.linear import triton_kernels as kernels
from sparkinfer_kernels.linear.weights import FP8_BLOCK, Fp8BlockWeight, Nvfp4Weight

DEQUANTISE_TILES = 4
"""64-column tiles of one program."""
EXPANDED_ROWS = 64
"""Rows of an FP8 block that one program expands."""


def nvfp4_to_bf16(weight: Nvfp4Weight, out: torch.Tensor) -> None:
    """Write the matrix as bf16: code * scale is exact, its product with the global scale is rounded once.

    Args:
        weight: [N, K].
        out: [N, K] bf16, contiguous; rows in the order of the projection's outputs.
    """
    (n, k), tiles = weight.shape, weight.codes.shape[1]
    grid = (weight.codes.shape[0], triton.cdiv(tiles, DEQUANTISE_TILES))
    kernels.nvfp4_to_bf16_kernel[grid](
        weight.codes.view(torch.int32),
        weight.scales.view(torch.int32),
        weight.row_scales,
        out,
        n,
        k,
        tiles,
        GATE_UP=weight.gate_up,
        TILES=DEQUANTISE_TILES,
        WGMMA=weight.order == "wgmma",
        num_warps=4,
    )


def fp8_block_to_bf16(weight: Fp8BlockWeight, out: torch.Tensor) -> None:
    """Write the matrix as bf16: value * scale in fp32, rounded once.

    Args:
        weight: [N, K].
        out: [N, K] bf16, contiguous.
    """
    n, k = weight.shape
    grid = (triton.cdiv(n, EXPANDED_ROWS), triton.cdiv(k, FP8_BLOCK))
    kernels.fp8_block_to_bf16_kernel[grid](
        weight.values, weight.scales, out, n, k, weight.scales.shape[1], BLOCK_N=EXPANDED_ROWS, num_warps=4
    )


def product_fp8_block(x: torch.Tensor, weight: Fp8BlockWeight, out: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in FP8: activations are quantised in groups of 128 columns while they are loaded.

    Args:
        x: [M, K] bf16, rows contiguous.
        weight: [N, K].
        out: [M, N] bf16 or fp32, contiguous.
    """
    m, (n, k) = x.shape[0], weight.shape
    block_m, block_n = 128, 128
    kernels.fp8_block_kernel[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
        x,
        x.stride(0),
        weight.values,
        weight.scales,
        out,
        m,
        n,
        k,
        scale_columns=weight.scales.shape[1],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=FP8_BLOCK,
        GROUP=8,
        num_warps=8,
        num_stages=3,
    )
    return out
