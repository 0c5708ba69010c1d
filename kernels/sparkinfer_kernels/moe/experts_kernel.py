"""Experts' products on Hopper, in Gluon: every item, an expert with up to BM of its pairs, times the expert's matrix.

The list of items is made on the device (`items_kernels.py`). Fragments, copies and the product of one NVFP4 piece are
those of the projections (`linear/tiles.py`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import constexpr_function

from sparkinfer_kernels.linear.tiles import (
    arrived,
    bits,
    copy_layout,
    fetch_words,
    fetch_x,
    mma_layout,
    multiply_nvfp4,
    operand_layout,
    ranges,
    words_layout,
)


@constexpr_function
def _store_layout(warps, rows, bm):
    """[ROWS, BM] for storing: 8 rows for a lane, which lie side by side in memory, then the next lanes' rows."""
    order = [[b, 0] for b in bits(8, rows)] + [[0, b] for b in bits(1, bm)]
    count = 5 + len(bits(1, warps))
    threads = order[:count] + [[0, 0]] * (count - len(order))
    registers = [[b, 0] for b in bits(1, 8)] + order[count:]
    return gl.DistributedLinearLayout(registers, threads[:5], threads[5:], [], [rows, bm])


@gluon.jit
def _allocate(FORM: gl.constexpr, RN: gl.constexpr, BM: gl.constexpr, COLUMNS: gl.constexpr, x_type: gl.constexpr):
    """One stage: weights, scales (NVFP4) and x."""
    BITS: gl.constexpr = 8 if FORM == "fp8" else 16
    x = gl.allocate_shared_memory(x_type, [BM, COLUMNS], operand_layout(BITS))
    if FORM == "nvfp4":
        words = gl.allocate_shared_memory(gl.int32, [RN, COLUMNS * 2], words_layout())
        return words, gl.allocate_shared_memory(gl.int32, [RN, COLUMNS // 4], words_layout()), x
    else:
        words = gl.allocate_shared_memory(x_type, [RN * 16, COLUMNS], operand_layout(BITS))
        return words, words, x


@gluon.jit
def _fetch_weights(
    stage, words_ptr, scales_ptr, expert, block, k, alive, row_tiles, K,
    FORM: gl.constexpr, WARPS: gl.constexpr, RN: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Start the copies of piece `k` of a block of rows of an expert."""
    if FORM == "nvfp4":
        pieces = (K + 127) // 128
        first = expert.to(gl.int64) * row_tiles
        fetch_words(
            stage[0], words_ptr + first * (pieces * 256), block * RN, row_tiles, pieces * 256, k, alive,
            WARPS, RN, COLUMNS * 2,
        )  # fmt: skip
        fetch_words(
            stage[1], scales_ptr + first * (pieces * 32), block * RN, row_tiles, pieces * 32, k, alive,
            WARPS, RN, COLUMNS // 4,
        )  # fmt: skip
    else:
        size: gl.constexpr = 16 if FORM == "fp8" else 8
        row, column = ranges(RN * 16, COLUMNS, copy_layout(WARPS, RN * 16, COLUMNS, size))
        row = gl.minimum(block * (RN * 16) + row, row_tiles * 16 - 1)
        at = k * COLUMNS + column
        async_copy.async_copy_global_to_shared(
            stage[0],
            words_ptr + expert.to(gl.int64) * row_tiles * 16 * K + (row * K + at),
            mask=(at < alive.to(gl.int32) * K) & (row >= 0),
        )


@gluon.jit
def _multiply(
    acc, stage, mma: gl.constexpr, FORM: gl.constexpr, WARPS: gl.constexpr, RT: gl.constexpr, COLUMNS: gl.constexpr
):
    """acc + weight @ x.T of one piece."""
    if FORM == "nvfp4":
        return multiply_nvfp4(acc, stage[0], stage[1], stage[2], mma, WARPS, RT, COLUMNS)
    else:
        acc = warpgroup_mma(stage[0], stage[2].permute([1, 0]), acc, is_async=True)
        return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit(do_not_specialize=["N"])
def experts_kernel(
    x_ptr,
    x_stride,
    x_scales_ptr,
    words_ptr,
    scales_ptr,
    row_scales_ptr,
    out_ptr,
    item_expert_ptr,
    item_pairs_ptr,
    count_ptr,
    N,
    K,
    SLOTS: gl.constexpr,
    FORM: gl.constexpr,
    GATE_UP: gl.constexpr,
    BM: gl.constexpr,
    WARPS: gl.constexpr,
    RT: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Every expert's matrix [N, K] times the rows of its items' pairs (-1: none).

    GATE_UP: x has a row for each token; rows of gate and up in turns of eight, out [pairs, N / 2] = silu(gate) * up.
    Otherwise x has a row for each pair: out [pairs, N]. FORM: "nvfp4" (fragment order), "bf16" or "fp8" (e4m3 with row
    scales, x e4m3 with scales of its rows). The matrices are cut into blocks of WARPS * RT row tiles and these into
    pieces of COLUMNS columns. A program takes every G-th (item, block); its copies never pause between them. Every
    stage is an allocation of its own and the loop is unrolled over them: the compiler then knows that copies into one
    stage do not touch the others, and one barrier a piece orders both directions.
    """
    RN: gl.constexpr = WARPS * RT
    SIZE: gl.constexpr = 16 if FORM == "fp8" else 8
    mma: gl.constexpr = mma_layout(WARPS, BM, 2 * SIZE)
    pair_layout: gl.constexpr = gl.SliceLayout(1, copy_layout(WARPS, BM, COLUMNS, SIZE))
    row_tiles = N // 16
    blocks = (row_tiles + RN - 1) // RN
    rounds = (K + COLUMNS * STAGES - 1) // (COLUMNS * STAGES)
    steps = rounds * STAGES
    program, programs = gl.program_id(0), gl.num_programs(0)
    column = gl.arange(0, BM, pair_layout)
    stages = ()
    for _ in gl.static_range(STAGES):
        stages = stages + (_allocate(FORM, RN, BM, COLUMNS, x_ptr.dtype.element_ty),)  # type: ignore[assignment]  # noqa: RUF005
    if PDL:
        if GATE_UP:
            # The kernel before makes the list, which the kernel after reads before it waits.
            gdc_wait()
        gdc_launch_dependents()
    units = blocks * gl.load(count_ptr, cache_modifier=".cg")
    item = gl.minimum(program, units - 1) // blocks
    expert = gl.load(item_expert_ptr + item, cache_modifier=".cg")
    pairs = gl.load(item_pairs_ptr + item * BM + column, cache_modifier=".cg")
    for ahead in gl.static_range(STAGES - 1):
        _fetch_weights(
            stages[ahead], words_ptr, scales_ptr, expert, program % blocks, ahead, program < units, row_tiles, K,
            FORM, WARPS, RN, COLUMNS,
        )  # fmt: skip
    if PDL and not GATE_UP:
        # The list is older than the kernel before, whose rows are needed from here on.
        gdc_wait()
    x_row = _rows(x_stride, pairs, SLOTS, GATE_UP)
    for ahead in gl.static_range(STAGES - 1):
        fetch_x(
            stages[ahead][2], x_ptr + x_row, (pairs >= 0)[:, None], ahead, program < units, K, WARPS, BM, COLUMNS, SIZE
        )
        async_copy.commit_group()
    for unit in range(program, units, programs):
        # What the next unit's copies need is loaded now, what this one's end needs too.
        block = unit % blocks
        next_unit = unit + programs
        there = next_unit < units
        next_item = gl.minimum(next_unit, units - 1) // blocks
        next_block = next_unit % blocks
        next_expert = gl.load(item_expert_ptr + next_item, cache_modifier=".cg")
        next_pairs = gl.load(item_pairs_ptr + next_item * BM + column, cache_modifier=".cg")
        row = gl.arange(0, RN * 16, gl.SliceLayout(1, mma)) + block * (RN * 16)
        if row_scales_ptr is not None:
            row_scales = gl.load(row_scales_ptr + expert * (row_tiles * 16) + row, mask=row < N, other=0.0)
        next_row = _rows(x_stride, next_pairs, SLOTS, GATE_UP)
        acc = gl.zeros([RN * 16, BM], gl.float32, mma)
        for turn in range(0, rounds):
            for slot in gl.static_range(STAGES):
                arrived(STAGES - 2)
                # The piece that is fetched now may be the next unit's.
                k = turn * STAGES + slot + (STAGES - 1)
                own = k < steps
                alive = own | there
                k = gl.where(own, k, k - steps)
                _fetch_weights(
                    stages[(slot + STAGES - 1) % STAGES], words_ptr, scales_ptr, gl.where(own, expert, next_expert),
                    gl.where(own, block, next_block), k, alive, row_tiles, K, FORM, WARPS, RN, COLUMNS,
                )  # fmt: skip
                fetch_x(
                    stages[(slot + STAGES - 1) % STAGES][2], x_ptr + gl.where(own, x_row, next_row),
                    (gl.where(own, pairs, next_pairs) >= 0)[:, None], k, alive, K, WARPS, BM, COLUMNS, SIZE,
                )  # fmt: skip
                async_copy.commit_group()
                acc = _multiply(acc, stages[slot], mma, FORM, WARPS, RT, COLUMNS)
        if row_scales_ptr is not None:
            acc *= row_scales[:, None]
        _store(acc, x_scales_ptr, out_ptr, item_pairs_ptr + item * BM, block, N, SLOTS, GATE_UP, WARPS, RN, BM)
        item, expert, pairs, x_row = next_item, next_expert, next_pairs, next_row
    async_copy.wait_group(0)


@gluon.jit
def _rows(x_stride, pairs, SLOTS: gl.constexpr, GATE_UP: gl.constexpr):
    """Where the rows of x begin [BM, 1]."""
    source = pairs // SLOTS if GATE_UP else pairs
    return (source.to(gl.int64) * x_stride)[:, None]


@gluon.jit
def _store(
    y, x_scales_ptr, out_ptr, pairs_ptr, block, N,
    SLOTS: gl.constexpr, GATE_UP: gl.constexpr, WARPS: gl.constexpr, RN: gl.constexpr, BM: gl.constexpr,
):  # fmt: skip
    """Scales of x's rows, SwiGLU if asked; a row of bf16 for each pair."""
    layout: gl.constexpr = y.type.layout
    if x_scales_ptr is not None:
        pair = gl.load(pairs_ptr + gl.arange(0, BM, gl.SliceLayout(0, layout)))
        source = pair // SLOTS if GATE_UP else pair
        y *= gl.load(x_scales_ptr + source, mask=pair >= 0, other=0.0)[None, :]
    if GATE_UP:
        # Rows r * 8 + g of a tile: the gates have r = 0, their ups r = 1, both in one thread.
        gate, up = gl.split(y.reshape([RN, 2, 8, BM]).permute([0, 2, 3, 1]))
        y = (gate / (1.0 + gl.exp(-gate)) * up).reshape([RN * 8, BM])
    ROWS: gl.constexpr = RN * 8 if GATE_UP else RN * 16
    z = gl.convert_layout(y.to(gl.bfloat16), _store_layout(WARPS, ROWS, BM))
    row, column = ranges(ROWS, BM, _store_layout(WARPS, ROWS, BM))
    row += block * ROWS
    pair = gl.load(pairs_ptr + column)
    width = N // 2 if GATE_UP else N
    gl.store(out_ptr + pair.to(gl.int64) * width + row, z, mask=(pair >= 0) & (row < width))
