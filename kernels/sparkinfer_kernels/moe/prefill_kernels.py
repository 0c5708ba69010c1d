"""Experts of many tokens, in Triton: a counting sort into blocks of one expert each, and the product over blocks.

Rows of gate and up lie in turns of eight (`linear.layout.interleave`), so that both halves of a SwiGLU are in one tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparkinfer_kernels.moe.kernels import _choose, finite
from sparkinfer_kernels.programmatic import wait_for_previous


@triton.jit
def route_many_kernel(
    x_ptr,
    x_stride,
    router_ptr,
    shares_ptr,
    chosen_ptr,
    rank_ptr,
    counts_ptr,
    T,
    H,
    E: tl.constexpr,
    EP: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Router of BT tokens. Of each pair its expert and its rank among the program's pairs of that expert; counts."""
    wait_for_previous(PDL)
    block = tl.program_id(0)
    token = block * BT + tl.arange(0, BT)
    expert = tl.arange(0, EP)
    x_row = x_ptr + tl.minimum(token, T - 1).to(tl.int64)[:, None] * x_stride
    acc = tl.zeros((BT, EP), tl.float32)
    gate = tl.zeros((BT,), tl.float32)
    for k in range(0, H, BK):
        column = k + tl.arange(0, BK)
        x = tl.load(x_row + column[None, :], mask=(column < H)[None, :], other=0.0)
        mask = (expert < E)[None, :] & (column < H)[:, None]
        acc = tl.dot(x, tl.load(router_ptr + expert[None, :] * H + column[:, None], mask=mask, other=0.0), acc)
        w = tl.load(router_ptr + E * H + column, mask=column < H, other=0.0).to(tl.float32)
        gate += tl.sum(x.to(tl.float32) * w[None, :], 1)
    logits = tl.where((expert < E)[None, :], finite(acc), float("-inf"))
    slot = _choose(logits, gate, token, T, shares_ptr, E, EP, TOP_K)
    member = (slot < TOP_K).to(tl.int32)
    pair = token[:, None] * SLOTS + slot
    rank = tl.cumsum(member, 0) - member
    tl.store(chosen_ptr + pair, tl.broadcast_to(expert[None, :], (BT, EP)), mask=member > 0)
    tl.store(rank_ptr + pair, rank, mask=member > 0)
    tl.store(counts_ptr + block * (E + 1) + expert, tl.sum(member, 0), mask=expert < E)
    tl.store(counts_ptr + block * (E + 1) + E, tl.minimum(T - block * BT, BT) * (SLOTS - TOP_K))
    if SLOTS > TOP_K:
        tl.store(chosen_ptr + token * SLOTS + TOP_K, tl.full((BT,), E, tl.int32), mask=token < T)
        tl.store(rank_ptr + token * SLOTS + TOP_K, tl.arange(0, BT), mask=token < T)


@triton.jit
def totals_kernel(
    counts_ptr, before_ptr, totals_ptr, blocks, E: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr, PDL: tl.constexpr
):
    """Of BE experts: pairs in the token blocks before each, and of all."""
    wait_for_previous(PDL)
    expert = tl.program_id(0) * BE + tl.arange(0, BE)
    inside = (expert <= E)[None, :]
    total = tl.zeros((BE,), tl.int32)
    for first in range(0, blocks, BB):
        block = first + tl.arange(0, BB)
        at = block[:, None] * (E + 1) + expert[None, :]
        mask = (block < blocks)[:, None] & inside
        counts = tl.load(counts_ptr + at, mask=mask, other=0)
        tl.store(before_ptr + at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=mask)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + expert, total, mask=expert <= E)


@triton.jit
def place_kernel(
    chosen_ptr,
    rank_ptr,
    before_ptr,
    totals_ptr,
    pairs_ptr,
    position_ptr,
    block_expert_ptr,
    block_rows_ptr,
    T,
    max_blocks,
    E: tl.constexpr,
    E1P: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_P: tl.constexpr,
    BT: tl.constexpr,
    BM: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Where the pairs of BT tokens go; and of BLOCKS blocks of BM rows whose they are and how many rows they have."""
    wait_for_previous(PDL)
    program = tl.program_id(0)
    expert = tl.arange(0, E1P)
    size = tl.load(totals_ptr + expert, mask=expert <= E, other=0)
    needed = (size + BM - 1) // BM
    last = tl.cumsum(needed, 0)

    flat = tl.arange(0, BT * SLOTS_P)
    token, slot = program * BT + flat // SLOTS_P, flat % SLOTS_P
    inside = (token < T) & (slot < SLOTS)
    pair = token * SLOTS + slot
    chosen = tl.load(chosen_ptr + pair, mask=inside, other=0)
    at = tl.load(rank_ptr + pair, mask=inside, other=0)
    at += tl.load(before_ptr + program * (E + 1) + chosen, mask=inside, other=0)
    at += BM * tl.gather(last - needed, chosen, 0)
    tl.store(pairs_ptr + at, pair, mask=inside)
    tl.store(position_ptr + pair, at, mask=inside)

    block = program * BLOCKS + tl.arange(0, BLOCKS)
    owner = tl.sum((last[None, :] <= block[:, None]).to(tl.int32), 1)
    begin = tl.gather(last - needed, tl.minimum(owner, E), 0)
    rows = tl.load(totals_ptr + owner, mask=owner <= E, other=0) - (block - begin) * BM
    tl.store(block_expert_ptr + block, owner, mask=block < max_blocks)
    tl.store(block_rows_ptr + block, tl.minimum(tl.maximum(rows, 0), BM), mask=block < max_blocks)


@triton.jit
def _times(pair, scale, ASM: tl.constexpr):
    """Two bfloat16 in an int32, each times one of another's: exact here."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pair, scale], dtype=tl.int32, is_pure=True, pack=1
        )
    low = (pair << 16).to(tl.float32, bitcast=True) * (scale << 16).to(tl.float32, bitcast=True)
    high = (pair & -65536).to(tl.float32, bitcast=True) * (scale & -65536).to(tl.float32, bitcast=True)
    return ((low.to(tl.int32, bitcast=True) >> 16) & 65535) | (high.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def _row(first, second, scale, ASM: tl.constexpr):
    """[.., 4] words of pairs for h = 0 and 1 -> [.., 4, h, i] bf16."""
    pairs = tl.join(_times(first, scale, ASM), _times(second, scale, ASM))
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _nvfp4_tile(codes_ptr, scales_ptr, row_tile, column_tile, tiles, TILES: tl.constexpr, ASM: tl.constexpr):
    """[TILES * 16, 64] bf16 out of fragment order (`linear/layout.py`), without the row scales."""
    lane = tl.arange(0, 32)
    at = (row_tile * tiles + column_tile)[:, None, None] * 128 + lane[None, :, None] * 4
    w = tl.load(codes_ptr + at + tl.arange(0, 4)[None, None, :])
    at = (row_tile * (tiles // 2) + column_tile // 2)[:, None] * 32 + lane[None, :]
    scale = tl.load(scales_ptr + at) >> ((column_tile % 2) * 16)
    upper = ((scale & 0xFF) * 0x00100010 + 0x6F806F80)[:, :, None]
    lower = (((scale >> 8) & 0xFF) * 0x00100010 + 0x6F806F80)[:, :, None]
    # -0x7E3F7E40 is 0x81C081C0 and -0x7FFF8000 is 0x80008000 as int32
    p0 = w & -0x7E3F7E40
    p1 = (w << 3) & -0x7E3F7E40
    p2 = ((w & 0x40074007) * 66) & -0x7E3F7E40
    p3 = ((w >> 3) & 0x01C001C0) | ((w << 2) & -0x7FFF8000)
    rows = _row(p0, p2, upper, ASM).reshape(TILES, 8, 64)
    halves = tl.join(rows, _row(p1, p3, lower, ASM).reshape(TILES, 8, 64))
    return tl.permute(halves, (0, 3, 1, 2)).reshape(TILES * 16, 64)


@triton.jit
def grouped_kernel(
    x_ptr,
    x_stride,
    x_scales_ptr,
    w_ptr,
    w_scales_ptr,
    row_scales_ptr,
    out_ptr,
    pairs_ptr,
    block_expert_ptr,
    block_rows_ptr,
    N,
    K,
    SLOTS: tl.constexpr,
    NVFP4: tl.constexpr,
    GATHER: tl.constexpr,
    ACTIVATE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of BN rows of an expert's matrix [N, K] times one block of BM rows of x, as [BN, BM].

    The weights are the first operand: few rows of x then cost few columns, not a tile of 64. Scales of rows of x
    (FP8) and of rows of the weight (FP8, NVFP4) are applied to the sums; ACTIVATE: rows of gate and up in turns of
    eight, silu(gate) * up is stored. GATHER: rows of x by the blocks' pairs; otherwise x has the blocks' order.
    """
    wait_for_previous(PDL)
    tiles_n = tl.cdiv(N, BN)
    block, tile = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    rows = tl.load(block_rows_ptr + block)
    if rows == 0:
        return
    expert = tl.load(block_expert_ptr + block).to(tl.int64)
    m = tl.arange(0, BM)
    position = block * BM + m
    source = position
    if GATHER:
        source = tl.load(pairs_ptr + position, mask=m < rows, other=0) // SLOTS
    n = tl.minimum(tile * BN + tl.arange(0, BN), N - 1)
    k = tl.arange(0, BK)
    x_at = x_ptr + source.to(tl.int64)[None, :] * x_stride + k[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    if NVFP4:
        tiles = (K + 127) // 128 * 2
        row_tile = tl.minimum(tile * (BN // 16) + tl.arange(0, BN // 16), N // 16 - 1)
        codes_ptr = w_ptr + expert * (N // 16) * tiles * 128
        scales_ptr = w_scales_ptr + expert * (N // 16) * tiles * 16
        for step in range(0, tl.cdiv(K, BK)):
            if EVEN_K:
                x = tl.load(x_at + step * BK)
            else:
                x = tl.load(x_at + step * BK, mask=(step * BK + k)[:, None] < K, other=0.0)
            acc = tl.dot(_nvfp4_tile(codes_ptr, scales_ptr, row_tile, step, tiles, BN // 16, ASM), x, acc)
    else:
        w_at = w_ptr + (expert * N + n)[:, None] * K + k[None, :]
        for step in range(0, tl.cdiv(K, BK)):
            if EVEN_K:
                x = tl.load(x_at + step * BK)
                w = tl.load(w_at + step * BK)
            else:
                x = tl.load(x_at + step * BK, mask=(step * BK + k)[:, None] < K, other=0.0)
                w = tl.load(w_at + step * BK, mask=(step * BK + k)[None, :] < K, other=0.0)
            acc = tl.dot(w, x, acc)
    if row_scales_ptr is not None:
        acc *= tl.load(row_scales_ptr + expert * N + n)[:, None]
    if x_scales_ptr is not None:
        acc *= tl.load(x_scales_ptr + source)[None, :]
    if ACTIVATE:
        parts = tl.permute(acc.reshape(BN // 16, 2, 8, BM), (0, 2, 3, 1)).reshape(BN // 2, BM, 2)
        gate, up = tl.split(parts)
        acc = gate / (1.0 + tl.exp(-gate)) * up
        width = N // 2
        column = tile * (BN // 2) + tl.arange(0, BN // 2)
    else:
        width = N
        column = tile * BN + tl.arange(0, BN)
    place = out_ptr + position.to(tl.int64)[None, :] * width + column[:, None]
    tl.store(place, acc.to(tl.bfloat16), mask=(column < width)[:, None] & (m < rows)[None, :])
