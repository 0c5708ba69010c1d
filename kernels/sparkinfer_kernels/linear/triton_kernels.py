"""Plain Triton kernels around the projections."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _product(pair, high: tl.constexpr, scale, row_scale):
    """One bfloat16 of a pair (int32) times a bfloat16 scale (fp32 here; exact), times the row's fp32 scale."""
    bits = pair & -65536 if high else pair << 16
    return ((bits.to(tl.float32, bitcast=True) * scale) * row_scale).to(tl.bfloat16)


@triton.jit
def _row(first, second, scale, row_scale, TILES: tl.constexpr, WGMMA: tl.constexpr):
    """[TILES, 32, 4] words of pairs for h = 0 and 1 -> [TILES, 8, 64] bf16."""
    low = tl.join(_product(first, False, scale, row_scale), _product(first, True, scale, row_scale))
    high = tl.join(_product(second, False, scale, row_scale), _product(second, True, scale, row_scale))
    values = tl.join(low, high)
    if WGMMA:
        # [g, t, s, i, h] -> [g, s, h, t, i]
        values = tl.permute(values.reshape(TILES, 8, 4, 4, 2, 2), (0, 1, 3, 5, 2, 4))
    else:
        values = tl.permute(values, (0, 1, 2, 4, 3))
    return values.reshape(TILES, 8, 64)


@triton.jit
def nvfp4_to_bf16_kernel(
    codes_ptr,
    scales_ptr,
    row_scales_ptr,
    out_ptr,
    N,
    K,
    tiles,
    GATE_UP: tl.constexpr,
    TILES: tl.constexpr,
    WGMMA: tl.constexpr,
):
    """One row tile and TILES column tiles of `layout.py` (WGMMA: order "wgmma") to plain rows."""
    row_tile = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    inside = tile < tiles
    lane = tl.arange(0, 32)
    word = tl.arange(0, 4)
    at = (row_tile * tiles + tile)[:, None, None] * 128 + lane[None, :, None] * 4 + word[None, None, :]
    w = tl.load(codes_ptr + at, mask=inside[:, None, None], other=0)
    if WGMMA:
        at = (row_tile * tiles + tile)[:, None, None] * 16 + lane[None, :, None] // 4 * 2 + word[None, None, :] // 2
        scale = tl.load(scales_ptr + at, mask=inside[:, None, None], other=0)
        scale = tl.where(word[None, None, :] % 2 == 0, scale, ((scale >> 8) & 0x00FFFFFF) | (scale << 24))
        scale = (scale & 0x0FF00FF0) | 0x60006000
        scale_0 = (scale << 16).to(tl.float32, bitcast=True)
        scale_1 = (scale & -65536).to(tl.float32, bitcast=True)
    else:
        at = (row_tile * (tiles // 2) + tile // 2)[:, None] * 32 + lane[None, :]
        scale = tl.load(scales_ptr + at, mask=inside[:, None], other=0) >> ((tile % 2) * 16)[:, None]
        scale_0 = ((((scale & 0xFF) << 4) + 0x6F80) << 16).to(tl.float32, bitcast=True)[:, :, None]
        scale_1 = (((((scale >> 8) & 0xFF) << 4) + 0x6F80) << 16).to(tl.float32, bitcast=True)[:, :, None]
    row_scale_0 = tl.load(row_scales_ptr + row_tile * 16 + lane // 4)[None, :, None]
    row_scale_1 = tl.load(row_scales_ptr + row_tile * 16 + 8 + lane // 4)[None, :, None]
    # -0x7E3F7E40 is 0x81C081C0 and -0x7FFF8000 is 0x80008000 as int32
    p0 = w & -0x7E3F7E40
    p1 = (w << 3) & -0x7E3F7E40
    p2 = ((w & 0x40074007) * 66) & -0x7E3F7E40
    p3 = ((w >> 3) & 0x01C001C0) | ((w << 2) & -0x7FFF8000)
    upper = _row(p0, p2, scale_0, row_scale_0, TILES, WGMMA)
    lower = _row(p1, p3, scale_1, row_scale_1, TILES, WGMMA)
    g = tl.arange(0, 8)
    if GATE_UP:
        row_0 = row_tile * 8 + g
        row_1 = row_0 + N // 2
    else:
        row_0 = row_tile * 16 + g
        row_1 = row_0 + 8
    column = tile[:, None, None] * 64 + tl.arange(0, 64)[None, None, :]
    row_0 = row_0[None, :, None]
    row_1 = row_1[None, :, None]
    tl.store(out_ptr + row_0 * K + column, upper, mask=(row_0 < N) & (column < K))
    tl.store(out_ptr + row_1 * K + column, lower, mask=(row_1 < N) & (column < K))


@triton.jit
def fp8_block_to_bf16_kernel(w_ptr, w_scale_ptr, out_ptr, N, K, scale_columns, BLOCK_N: tl.constexpr):
    """BLOCK_N rows of one block of 128 x 128 times its scale, as bf16; BLOCK_N divides 128."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    at = row.to(tl.int64)[:, None] * K + column[None, :]
    mask = (row[:, None] < N) & (column[None, :] < K)
    scale = tl.load(w_scale_ptr + tl.program_id(0) * BLOCK_N // 128 * scale_columns + tl.program_id(1))
    values = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale
    tl.store(out_ptr + at, values.to(tl.bfloat16), mask=mask)


@triton.jit
def fp8_block_kernel(
    x_ptr,
    x_stride,
    w_ptr,
    w_scale_ptr,
    out_ptr,
    M,
    N,
    K,
    scale_columns: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One [BLOCK_M, BLOCK_N] tile; both operands have one scale for each BLOCK_K = 128 columns, BLOCK_N = 128."""
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP * columns)
    height = tl.minimum(rows - group * GROUP, GROUP)
    block_m = group * GROUP + (pid % (GROUP * columns)) % height
    block_n = (pid % (GROUP * columns)) // height
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_row = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * x_stride
    w_row = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[None, :] * K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(scale_columns):
        column = step * BLOCK_K + k
        x = tl.load(x_row + column[None, :], mask=column[None, :] < K, other=0.0).to(tl.float32)
        w = tl.load(w_row + column[:, None], mask=column[:, None] < K, other=0.0)
        amax = tl.max(tl.abs(x), 1)
        x_scale = tl.where(amax > 0, amax / 448.0, 1.0)
        w_scale = tl.load(w_scale_ptr + block_n * scale_columns + step)
        product = tl.dot((x / x_scale[:, None]).to(tl.float8e4nv), w)
        acc += product * (x_scale * w_scale)[:, None]
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(out_ptr + m.to(tl.int64)[:, None] * N + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
