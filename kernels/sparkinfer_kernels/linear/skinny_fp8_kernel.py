"""The few-row product for e4m3 weights with row or 128 x 128 block scales; built like `skinny_kernel.py`.

Weights stay rows of bytes: lane 4g + t of a warp reads 16 bytes, columns 16t .. 16t + 15 of rows g and g + 8, which are
its operands of four matrix instructions in the column order that the activations follow there too.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import constexpr_function

from sparkinfer_kernels.linear.skinny_kernel import (
    _advance,
    _fetch_x,
    _finish,
    _operand,
    _ranges,
    _share,
    _x_copy_layout,
    _x_layout,
)
from sparkinfer_kernels.linear.tiles import bits

# Four e4m3 numbers to two bfloat16 pairs: sign to bit 15, exponent and mantissa to bits 10..4, times 2^120.
DEQUANTISE = gl.constexpr("""
{
.reg .b32 a, b, z, k, t;
mov.b32 z, 0;
mov.b32 k, 0x7B807B80;
prmt.b32 a, $4, z, 0x1404;
prmt.b32 b, $4, z, 0x3424;
shr.u32 t, a, 4;
and.b32 t, t, 0x07F007F0;
lop3.b32 a, a, 0x80008000, t, 0xEA;
shr.u32 t, b, 4;
and.b32 t, t, 0x07F007F0;
lop3.b32 b, b, 0x80008000, t, 0xEA;
mul.rn.bf16x2 a, a, k;
mul.rn.bf16x2 b, b, k;
mov.b32 {$0, $1}, a;
mov.b32 {$2, $3}, b;
}
""")


@constexpr_function
def _words_layout(wk, wn, rt, kb):
    """[WK, WN * RT * 16, KB * 32] words of four numbers, as the matrix instructions take them."""
    regs = [[0, 0, 1], [0, 0, 2], [0, 8, 0]] + [[0, 0, b] for b in bits(16, kb * 32)]
    regs += [[0, b, 0] for b in bits(16 * wn, 16 * wn * rt)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[0, b, 0] for b in bits(16, 16 * wn)] + [[b, 0, 0] for b in bits(1, wk)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [wk, wn * rt * 16, kb * 32])


@constexpr_function
def _copy_layout(wk, wn, rt, kb):
    """The same tensor for copying: 16 bytes per lane, the 128 bytes of a row side by side."""
    rows = [[0, b, 0] for b in bits(4, 16 * wn * rt)]
    rest = rows + [[b, 0, 0] for b in bits(1, wk)] + [[0, 0, b] for b in bits(32, kb * 32)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]]
    count = len(bits(1, wk * wn))
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], *rest[count:]], lanes, rest[:count], [], [wk, wn * rt * 16, kb * 32]
    )


@gluon.jit
def _dequantise(words, WK: gl.constexpr, RN: gl.constexpr, KB: gl.constexpr, layout: gl.constexpr):
    """bf16 [WK, RN * 16, KB * 128] from words [WK, RN * 16, KB * 32]."""
    a0, a1, b0, b1 = gl.inline_asm_elementwise(
        DEQUANTISE, "=h,=h,=h,=h,r", [words], dtype=(gl.bfloat16,) * 4, is_pure=True, pack=1
    )
    # [.., 64-column tile, t, s, h, i] -> columns (tile, s, h, t, i)
    w = gl.join(gl.join(a0, b0), gl.join(a1, b1)).reshape([WK, RN * 16, KB * 2, 4, 4, 2, 2])
    w = w.permute([0, 1, 2, 4, 5, 3, 6]).reshape([WK, RN * 16, KB * 128])
    return gl.convert_layout(w, layout, assert_trivial=True)


@gluon.jit
def _fetch_words(
    alive,
    block,
    k,
    slot,
    buffer,
    words_ptr,
    words_index,
    N,
    K,
    WK: gl.constexpr,
    RN: gl.constexpr,
    KB: gl.constexpr,
):
    """Start the copies of piece `k` of a block's weights; beyond the end of K, or unless `alive`, zeros are written."""
    index_k, index_r, index_w = words_index
    at = (k * WK + index_k) * (KB * 32) + index_w
    row = gl.minimum(block * (RN * 16) + index_r, N - 1)
    async_copy.async_copy_global_to_shared(
        buffer.index(slot),
        words_ptr + (row * (K // 4) + at),
        mask=at < alive.to(gl.int32) * (K // 4),
        eviction_policy="evict_first",
    )


@gluon.jit
def fp8_skinny_kernel(
    x_ptr,
    x_stride,
    words_ptr,
    row_scales_ptr,
    block_scales_ptr,
    out_ptr,
    out_stride,
    partials_ptr,
    counters_ptr,
    M,
    N,
    K,
    BM: gl.constexpr,
    WK: gl.constexpr,
    WN: gl.constexpr,
    RT: gl.constexpr,
    KB: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
    PDL: gl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * weight[n, k]; work is divided as in `nvfp4_skinny_kernel`.

    With BLOCKS (then KB is 1) every 128 x 128 block has a scale, otherwise every row. K is a multiple of 16.
    """
    RN: gl.constexpr = WN * RT
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WK, WN, 1], instr_shape=[1, 16, 8])
    words_layout: gl.constexpr = _words_layout(WK, WN, RT, KB)
    fetch_layout: gl.constexpr = _copy_layout(WK, WN, RT, KB)
    x_layout: gl.constexpr = _x_layout(WK, WN, BM, KB)
    copy_layout: gl.constexpr = _x_copy_layout(WK, WN, BM, KB)
    first_token = gl.program_id(0) * BM
    blocks_k = (K + 127) // 128
    steps = (blocks_k + WK * KB - 1) // (WK * KB)
    blocks = (N + RN * 16 - 1) // (RN * 16)
    first, last = _share(blocks * steps)

    words_index = _ranges(WK, RN * 16, KB * 32, fetch_layout)
    x_k, token, x_c = _ranges(WK, BM, KB * 128, copy_layout)
    token += first_token
    x_row = x_ptr + token.to(gl.int64) * x_stride
    x_at = x_k * (KB * 128) + x_c
    buffer = gl.allocate_shared_memory(
        gl.int32, [STAGES, WK, RN * 16, KB * 32], gl.SwizzledSharedLayout(4, 1, 8, order=[2, 1, 0])
    )
    x_buffer = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, WK, BM, KB * 128], gl.SwizzledSharedLayout(8, 1, 8, order=[2, 1, 0])
    )

    block = first // steps
    k = first - block * steps
    next_block, next_k = block, k
    for ahead in gl.static_range(STAGES - 1):
        _fetch_words(
            first + ahead < last, next_block, next_k, ahead, buffer, words_ptr, words_index, N, K, WK, RN, KB
        )  # fmt: skip
        next_block, next_k = _advance(next_block, next_k, steps)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    next_block, next_k = block, k
    for ahead in gl.static_range(STAGES - 1):
        _fetch_x(first + ahead < last, next_k, ahead, x_buffer, x_row, x_at, token < M, K, WK, KB)
        async_copy.commit_group()
        next_block, next_k = _advance(next_block, next_k, steps)
    acc = gl.zeros([WK, RN * 16, BM], gl.float32, mma)
    scale_row = gl.arange(0, RN * 16, gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :]
    scale_column = gl.arange(0, WK, gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None]
    slot = 0
    for piece in range(first, last):
        async_copy.wait_group(STAGES - 2)
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        alive = piece + STAGES - 1 < last
        _fetch_words(alive, next_block, next_k, free, buffer, words_ptr, words_index, N, K, WK, RN, KB)
        _fetch_x(alive, next_k, free, x_buffer, x_row, x_at, token < M, K, WK, KB)
        async_copy.commit_group()
        words = buffer.index(slot).load(words_layout)
        x = x_buffer.index(slot).load(x_layout)
        next_block, next_k = _advance(next_block, next_k, steps)
        w = _dequantise(words, WK, RN, KB, gl.DotOperandLayout(0, mma, 2))
        x = _operand(x, WK, BM, KB, gl.DotOperandLayout(1, mma, 2))
        if BLOCKS:
            row = gl.minimum(block * (RN * 16) + scale_row, N - 1) // 128
            at = gl.minimum(k * WK + scale_column, blocks_k - 1)
            scale = gl.load(block_scales_ptr + row * blocks_k + at)
            acc += mma_v2(w, x, gl.zeros([WK, RN * 16, BM], gl.float32, mma)) * scale[:, :, None]
        else:
            acc = mma_v2(w, x, acc)
        if (k == steps - 1) | (piece == last - 1):
            _finish(
                gl.sum(acc, 0), row_scales_ptr, out_ptr, out_stride, partials_ptr, counters_ptr, first_token, block,
                blocks, steps, M, N, BM, RN, False, False,
            )  # fmt: skip
            acc = gl.zeros([WK, RN * 16, BM], gl.float32, mma)
        block, k = _advance(block, k, steps)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)
