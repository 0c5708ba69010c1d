"""The few-row product with NVFP4 weights on Hopper's `wgmma`, in Gluon (weights in order "wgmma", see `layout.py`)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparkinfer_kernels.linear.skinny_kernel import _advance, _finish, _share
from sparkinfer_kernels.linear.tiles import (
    arrived,
    copy_layout,
    fetch_words,
    fetch_x,
    mma_layout,
    multiply_nvfp4,
    operand_layout,
    ranges,
    words_layout,
)


@gluon.jit
def _fetch(
    alive, block, k, codes, scales, codes_ptr, scales_ptr, row_tiles, K,
    WARPS: gl.constexpr, RN: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Start the copies of piece `k` of a block's weights."""
    pieces = (K + 127) // 128
    fetch_words(codes, codes_ptr, block * RN, row_tiles, pieces * 256, k, alive, WARPS, RN, COLUMNS * 2)
    fetch_words(scales, scales_ptr, block * RN, row_tiles, pieces * 32, k, alive, WARPS, RN, COLUMNS // 4)


@gluon.jit(do_not_specialize=["M", "N"])
def nvfp4_wgmma_kernel(
    x_ptr,
    x_stride,
    codes_ptr,
    scales_ptr,
    row_scales_ptr,
    out_ptr,
    out_stride,
    partials_ptr,
    counters_ptr,
    M,
    N,
    K,
    BM: gl.constexpr,
    WARPS: gl.constexpr,
    RT: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    GATE_UP: gl.constexpr,
    ACTIVATE: gl.constexpr,
    PDL: gl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * weight[n, k] for BM rows of x and one share of the weight.

    The weight is cut into blocks of WARPS * RT row tiles and these into pieces of COLUMNS columns; work is divided as
    in `nvfp4_skinny_kernel`.
    """
    RN: gl.constexpr = WARPS * RT
    mma: gl.constexpr = mma_layout(WARPS, BM)
    first_token = gl.program_id(0) * BM
    row_tiles = (N + 15) // 16
    steps = (K + COLUMNS - 1) // COLUMNS
    blocks = (row_tiles + RN - 1) // RN
    first, last = _share(blocks * steps)

    token, _ = ranges(BM, COLUMNS, copy_layout(WARPS, BM, COLUMNS, 8))
    token += first_token
    x_row = x_ptr + token.to(gl.int64) * x_stride
    codes_buffer = gl.allocate_shared_memory(gl.int32, [STAGES, RN, COLUMNS * 2], words_layout())
    scales_buffer = gl.allocate_shared_memory(gl.int32, [STAGES, RN, COLUMNS // 4], words_layout())
    x_buffer = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, COLUMNS], operand_layout(16))

    block = first // steps
    k = first - block * steps
    # The weights do not depend on the kernel before: their first pieces come while it still runs.
    next_block, next_k = block, k
    for ahead in gl.static_range(STAGES - 1):
        _fetch(
            first + ahead < last, next_block, next_k, codes_buffer.index(ahead), scales_buffer.index(ahead),
            codes_ptr, scales_ptr, row_tiles, K, WARPS, RN, COLUMNS,
        )  # fmt: skip
        next_block, next_k = _advance(next_block, next_k, steps)
    if PDL:
        # The next kernel reads nothing but weights before this one has ended.
        gdc_launch_dependents()
        gdc_wait()
    next_block, next_k = block, k
    for ahead in gl.static_range(STAGES - 1):
        fetch_x(x_buffer.index(ahead), x_row, token < M, next_k, first + ahead < last, K, WARPS, BM, COLUMNS, 8)
        async_copy.commit_group()
        next_block, next_k = _advance(next_block, next_k, steps)
    acc = gl.zeros([RN * 16, BM], gl.float32, mma)
    slot = 0
    for piece in range(first, last):
        arrived(STAGES - 2)
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        alive = piece + STAGES - 1 < last
        _fetch(
            alive, next_block, next_k, codes_buffer.index(free), scales_buffer.index(free),
            codes_ptr, scales_ptr, row_tiles, K, WARPS, RN, COLUMNS,
        )  # fmt: skip
        fetch_x(x_buffer.index(free), x_row, token < M, next_k, alive, K, WARPS, BM, COLUMNS, 8)
        async_copy.commit_group()
        next_block, next_k = _advance(next_block, next_k, steps)
        acc = multiply_nvfp4(
            acc, codes_buffer.index(slot), scales_buffer.index(slot), x_buffer.index(slot), mma, WARPS, RT, COLUMNS
        )
        if (k == steps - 1) | (piece == last - 1):
            _finish(
                acc, row_scales_ptr, out_ptr, out_stride, partials_ptr, counters_ptr, first_token, block,
                blocks, steps, M, N, BM, RN, GATE_UP, ACTIVATE,
            )  # fmt: skip
            acc = gl.zeros([RN * 16, BM], gl.float32, mma)
        block, k = _advance(block, k, steps)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)
