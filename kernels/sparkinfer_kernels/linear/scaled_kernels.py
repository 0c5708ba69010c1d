"""NVFP4 products on tensor cores that take both operands with block scales (sm_120; `tl.dot_scaled`)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantise_nvfp4_kernel(x_ptr, x_stride, codes_ptr, scales_ptr, factors_ptr, K, BLOCK: tl.constexpr):
    """One row to e2m1 codes, e4m3 scales of 16 columns and an fp32 factor; value = code * scale * factor."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < K, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(x), 0)
    # 6 * 448 is the largest number the format holds under a factor of 1.
    factor = tl.where(amax > 0, amax / 2688.0, 1.0)
    blocks = tl.reshape(x / factor, (BLOCK // 16, 16))
    scale = tl.maximum(tl.max(tl.abs(blocks), 1) / 6.0, 0.001953125).to(tl.float8e4nv)
    size = tl.minimum(tl.abs(blocks) / scale.to(tl.float32)[:, None], 6.0)
    # Nearest code, ties to the even one.
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    code += tl.where(blocks < 0, 8, 0)
    low, high = tl.split(tl.reshape(code, (BLOCK // 2, 2)))
    pair = tl.arange(0, BLOCK // 2)
    tl.store(codes_ptr + row * (K // 2) + pair, (low | (high << 4)).to(tl.uint8), mask=pair < K // 2)
    block = tl.arange(0, BLOCK // 16)
    tl.store(scales_ptr + row * (K // 16) + block, scale, mask=block < K // 16)
    tl.store(factors_ptr + row, factor)


@triton.jit
def nvfp4_scaled_kernel(
    x_ptr,
    x_scales_ptr,
    x_factors_ptr,
    w_ptr,
    w_scales_ptr,
    w_factors_ptr,
    out_ptr,
    M,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One [BLOCK_M, BLOCK_N] tile of x @ w.T, both NVFP4 with a factor a row."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.arange(0, BLOCK_K // 2)
    block = tl.arange(0, BLOCK_K // 16)
    row = tl.minimum(m, M - 1).to(tl.int64)[:, None]
    line = tl.minimum(n, N - 1).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start // 2 + pair
        x = tl.load(x_ptr + row * (K // 2) + at[None, :], mask=at[None, :] < K // 2, other=0)
        w = tl.load(w_ptr + line[None, :] * (K // 2) + at[:, None], mask=at[:, None] < K // 2, other=0)
        at = (start // 16 + block)[None, :]
        x_scale = tl.load(x_scales_ptr + row * (K // 16) + at, mask=at < K // 16, other=0.0)
        w_scale = tl.load(w_scales_ptr + line[:, None] * (K // 16) + at, mask=at < K // 16, other=0.0)
        acc = tl.dot_scaled(x, x_scale, "e2m1", w, w_scale, "e2m1", acc)
    acc *= tl.load(x_factors_ptr + m, mask=m < M, other=0.0)[:, None]
    acc *= tl.load(w_factors_ptr + n, mask=n < N, other=0.0)[None, :]
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(out_ptr + m.to(tl.int64)[:, None] * N + n[None, :], acc.to(tl.bfloat16), mask=mask)
