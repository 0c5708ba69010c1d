"""NVFP4 experts at few tokens, in Gluon: `linear/skinny_kernel.py` over a list of items that is made on the device.

An item is an expert with up to BM of its pairs (`kernels.py`), so its weights are read once for all of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparkinfer_kernels.linear.skinny_kernel import (
    _codes_layout,
    _dequantise,
    _fetch_codes,
    _fetch_x,
    _operand,
    _ranges,
    _scales_layout,
    _x_copy_layout,
    _x_layout,
)


@gluon.jit
def _piece(q, steps, blocks, count, SUM: gl.constexpr):
    """Item, block of rows and piece of columns of this program's q-th turn."""
    program, programs = gl.program_id(1), gl.num_programs(1)
    turn = q // steps
    k = q - turn * steps
    if SUM:
        lap = turn // count
        item = turn - lap * count
        block = program + lap * programs
    else:
        unit = program + turn * programs
        item = unit // blocks
        block = unit - item * blocks
        item = gl.minimum(item, count - 1)
    return item, block, k


@gluon.jit
def nvfp4_experts_kernel(
    x_ptr,
    x_stride,
    codes_ptr,
    scales_ptr,
    row_scales_ptr,
    shares_ptr,
    out_ptr,
    item_expert_ptr,
    item_pairs_ptr,
    count_ptr,
    T,
    N,
    K,
    TOP_K: gl.constexpr,
    SLOTS: gl.constexpr,
    GATE_UP: gl.constexpr,
    SHARED: gl.constexpr,
    SUM: gl.constexpr,
    BM: gl.constexpr,
    WK: gl.constexpr,
    WN: gl.constexpr,
    RT: gl.constexpr,
    KB: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN: gl.constexpr,
    PDL: gl.constexpr,
):
    """Every expert's matrix [N, K] times the rows of its pairs.

    GATE_UP: x has a row for each token; rows of gate and up in turns of eight; silu(gate) * up is stored for each pair,
    out [pairs, N / 2], with SHARED multiplied by the pair's share. Otherwise x has a row for each pair: out [pairs, N],
    or with SUM out[t] = the sum over token t's pairs, in the order of the items, whose columns then are the tokens.
    The weight is cut into blocks of WN * RT row tiles and these into pieces of WK * KB * 128 columns (EVEN: they fit
    into K). A program takes every G-th (item, block), with SUM every G-th block with all items: sums have one order,
    whatever else is in the batch.
    """
    RN: gl.constexpr = WN * RT
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WK, WN, 1], instr_shape=[1, 16, 8])
    codes_layout: gl.constexpr = _codes_layout(WK, WN, RT, KB)
    scales_layout: gl.constexpr = _scales_layout(WK, WN, RT, KB)
    x_layout: gl.constexpr = _x_layout(WK, WN, BM, KB)
    copy_layout: gl.constexpr = _x_copy_layout(WK, WN, BM, KB)
    blocks_k = (K + 127) // 128
    steps = (blocks_k + WK * KB - 1) // (WK * KB)
    row_tiles = (N + 15) // 16
    blocks = (row_tiles + RN - 1) // RN

    codes_index = _ranges(WK, RN, KB * 256, codes_layout)
    scales_index = _ranges(WK, RN, KB * 32, scales_layout)
    x_k, column, x_c = _ranges(WK, BM, KB * 128, copy_layout)
    x_at = x_k * (KB * 128) + x_c
    codes_buffer = gl.allocate_shared_memory(
        gl.int32, [STAGES, WK, RN, KB * 256], gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    )
    scales_buffer = gl.allocate_shared_memory(
        gl.int32, [STAGES, WK, RN, KB * 32], gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    )
    x_buffer = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, WK, BM, KB * 128], gl.SwizzledSharedLayout(8, 1, 8, order=[2, 1, 0])
    )
    if PDL and GATE_UP:
        # The kernel before makes the list.
        gdc_wait()
        gdc_launch_dependents()
    count = gl.load(count_ptr, cache_modifier=".cg")
    programs = gl.num_programs(1)
    if SUM:
        total = (blocks - gl.program_id(1) + programs - 1) // programs * count * steps
    else:
        total = (blocks * count - gl.program_id(1) + programs - 1) // programs * steps

    for ahead in gl.static_range(STAGES - 1):
        item, block, k = _piece(ahead, steps, blocks, count, SUM)
        expert = gl.load(item_expert_ptr + item, cache_modifier=".cg").to(gl.int64)
        _fetch_codes(
            ahead < total, block, k, ahead, codes_buffer, scales_buffer,
            codes_ptr + expert * row_tiles * blocks_k * 256, scales_ptr + expert * row_tiles * blocks_k * 32,
            codes_index, scales_index, row_tiles, blocks_k, WK, RN, KB, EVEN,
        )  # fmt: skip
    if PDL and not GATE_UP:
        # The list is older than the kernel before, whose rows are needed from here on.
        gdc_wait()
        gdc_launch_dependents()
    for ahead in gl.static_range(STAGES - 1):
        item, block, k = _piece(ahead, steps, blocks, count, SUM)
        pairs = gl.load(item_pairs_ptr + item * BM + column, cache_modifier=".cg")
        source = pairs // SLOTS if GATE_UP else pairs
        _fetch_x(
            ahead < total, k, ahead, x_buffer, x_ptr + source.to(gl.int64) * x_stride, x_at, pairs >= 0, K, WK, KB
        )  # fmt: skip
        async_copy.commit_group()
    # What a fetch needs from the list is loaded a turn before.
    item, block, k = _piece(STAGES - 1, steps, blocks, count, SUM)
    expert = gl.load(item_expert_ptr + item, cache_modifier=".cg").to(gl.int64)
    pairs = gl.load(item_pairs_ptr + item * BM + column, cache_modifier=".cg")
    acc = gl.zeros([WK, RN * 16, BM], gl.float32, mma)
    sums = gl.zeros([WK, RN * 16, BM], gl.float32, mma)
    slot = 0
    for q in range(0, total):
        async_copy.wait_group(STAGES - 2)
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        alive = q + STAGES - 1 < total
        _fetch_codes(
            alive, block, k, free, codes_buffer, scales_buffer,
            codes_ptr + expert * row_tiles * blocks_k * 256, scales_ptr + expert * row_tiles * blocks_k * 32,
            codes_index, scales_index, row_tiles, blocks_k, WK, RN, KB, EVEN,
        )  # fmt: skip
        source = pairs // SLOTS if GATE_UP else pairs
        _fetch_x(alive, k, free, x_buffer, x_ptr + source.to(gl.int64) * x_stride, x_at, pairs >= 0, K, WK, KB)
        async_copy.commit_group()
        item, block, k = _piece(q + STAGES, steps, blocks, count, SUM)
        expert = gl.load(item_expert_ptr + item, cache_modifier=".cg").to(gl.int64)
        pairs = gl.load(item_pairs_ptr + item * BM + column, cache_modifier=".cg")
        codes = codes_buffer.index(slot).load(codes_layout)
        scales = scales_buffer.index(slot).load(scales_layout)
        x = x_buffer.index(slot).load(x_layout)
        w = _dequantise(codes, scales, WK, RN, KB, gl.DotOperandLayout(0, mma, 2))
        acc = mma_v2(w, _operand(x, WK, BM, KB, gl.DotOperandLayout(1, mma, 2)), acc)
        own_item, own_block, own_k = _piece(q, steps, blocks, count, SUM)
        if own_k == steps - 1:
            own = gl.load(item_expert_ptr + own_item) * (row_tiles * 16)
            if SUM:
                row = gl.arange(0, RN * 16, gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
                row += own_block * (RN * 16)
                sums += acc * gl.load(row_scales_ptr + own + row, mask=row < N, other=0.0)
                if own_item == count - 1:
                    _store_sums(gl.sum(sums, 0), out_ptr, own_block, T, N, BM, RN)
                    sums = gl.zeros([WK, RN * 16, BM], gl.float32, mma)
            else:
                _store_pairs(
                    gl.sum(acc, 0), row_scales_ptr + own, shares_ptr, out_ptr, item_pairs_ptr + own_item * BM,
                    own_block, N, TOP_K, SLOTS, GATE_UP, SHARED, BM, RN,
                )  # fmt: skip
            acc = gl.zeros([WK, RN * 16, BM], gl.float32, mma)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)


@gluon.jit
def _store_sums(y, out_ptr, block, T, N, BM: gl.constexpr, RN: gl.constexpr):
    """bf16 [T, N]."""
    layout: gl.constexpr = y.type.layout
    row = gl.arange(0, RN * 16, gl.SliceLayout(1, layout))[:, None] + block * (RN * 16)
    token = gl.arange(0, BM, gl.SliceLayout(0, layout))[None, :]
    gl.store(out_ptr + token * N + row, y.to(gl.bfloat16), mask=(row < N) & (token < T))


@gluon.jit
def _store_pairs(
    y,
    row_scales_ptr,
    shares_ptr,
    out_ptr,
    pairs_ptr,
    block,
    N,
    TOP_K: gl.constexpr,
    SLOTS: gl.constexpr,
    GATE_UP: gl.constexpr,
    SHARED: gl.constexpr,
    BM: gl.constexpr,
    RN: gl.constexpr,
):
    """Scale the rows, apply SwiGLU and shares if asked, write one row for each pair."""
    layout: gl.constexpr = y.type.layout
    row = gl.arange(0, RN * 16, gl.SliceLayout(1, layout)) + block * (RN * 16)
    y *= gl.load(row_scales_ptr + row, mask=row < N, other=0.0)[:, None]
    if GATE_UP:
        # Rows r * 8 + g of a tile: the gates have r = 0, their ups r = 1, both in one thread.
        gate, up = gl.split(y.reshape([RN, 2, 8, BM]).permute([0, 2, 3, 1]))
        z = gate / (1.0 + gl.exp(-gate)) * up
        zl: gl.constexpr = z.type.layout
        tile, inner, m = _ranges(RN, 8, BM, zl)
        n = (block * RN + tile) * 8 + inner
        pair = gl.load(pairs_ptr + m)
        if SHARED:
            token = pair // SLOTS
            z *= gl.load(shares_ptr + (token * (TOP_K + 1) + pair - token * SLOTS), mask=pair >= 0, other=0.0)
        width = N // 2
        gl.store(out_ptr + pair.to(gl.int64) * width + n, z.to(gl.bfloat16), mask=(pair >= 0) & (n < width))
    else:
        pair = gl.load(pairs_ptr + gl.arange(0, BM, gl.SliceLayout(0, layout)))[None, :]
        mask = (pair >= 0) & (row[:, None] < N)
        gl.store(out_ptr + pair.to(gl.int64) * N + row[:, None], y.to(gl.bfloat16), mask=mask)
