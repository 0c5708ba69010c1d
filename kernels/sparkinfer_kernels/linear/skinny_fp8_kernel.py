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
    _bits,
    _fetch_x,
    _finish,
    _operand,
    _ranges,
    _x_copy_layout,
    _x_layout,
)

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
    regs = [[0, 0, 1], [0, 0, 2], [0, 8, 0]] + [[0, 0, b] for b in _bits(16, kb * 32)]
    regs += [[0, b, 0] for b in _bits(16 * wn, 16 * wn * rt)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[0, b, 0] for b in _bits(16, 16 * wn)] + [[b, 0, 0] for b in _bits(1, wk)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [wk, wn * rt * 16, kb * 32])


@constexpr_function
def _copy_layout(wk, wn, rt, kb):
    """The same tensor for copying: 16 bytes per lane, the 128 bytes of a row side by side."""
    rows = [[0, b, 0] for b in _bits(4, 16 * wn * rt)]
    rest = rows + [[b, 0, 0] for b in _bits(1, wk)] + [[0, 0, b] for b in _bits(32, kb * 32)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]]
    count = len(_bits(1, wk * wn))
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
def _fetch_words(step, last, slot, buffer, words_row, words_at, words_k, WK: gl.constexpr, KB: gl.constexpr):
    """Start the copies of one step's weights; beyond the end of K or of this block's part zeros are written."""
    alive = (step < last).to(gl.int32)
    at = words_at + step * (WK * KB * 32)
    async_copy.async_copy_global_to_shared(
        buffer.index(slot), words_row + at, mask=at < alive * words_k, eviction_policy="evict_first"
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
    SPLIT: gl.constexpr,
    BLOCKS: gl.constexpr,
    PDL: gl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * weight[n, k]; parameters as in `nvfp4_skinny_kernel`.

    With BLOCKS (then KB is 1) every 128 x 128 block has a scale, otherwise every row. K is a multiple of 16.
    """
    RN: gl.constexpr = WN * RT
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WK, WN, 1], instr_shape=[1, 16, 8])
    words_layout: gl.constexpr = _words_layout(WK, WN, RT, KB)
    fetch_layout: gl.constexpr = _copy_layout(WK, WN, RT, KB)
    x_layout: gl.constexpr = _x_layout(WK, WN, BM, KB)
    copy_layout: gl.constexpr = _x_copy_layout(WK, WN, BM, KB)
    w_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    y_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    first_token = gl.program_id(0) * BM
    block = gl.program_id(1)
    part = gl.program_id(2)
    blocks_k = (K + 127) // 128
    steps = (blocks_k + WK * KB - 1) // (WK * KB)
    parts = gl.num_programs(2)
    first = steps * part // parts
    last = steps * (part + 1) // parts

    words_k, words_r, words_w = _ranges(WK, RN * 16, KB * 32, fetch_layout)
    row = gl.minimum(block * (RN * 16) + words_r, N - 1).to(gl.int64)
    words_row = words_ptr + row * (K // 4)
    words_at = words_k * (KB * 32) + words_w
    x_k, token, x_c = _ranges(WK, BM, KB * 128, copy_layout)
    token += first_token
    x_row = x_ptr + token.to(gl.int64) * x_stride
    x_at = x_k * (KB * 128) + x_c
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, order=[2, 1, 0])
    buffer = gl.allocate_shared_memory(gl.int32, [STAGES, WK, RN * 16, KB * 32], swizzled)
    x_buffer = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, WK, BM, KB * 128], gl.SwizzledSharedLayout(8, 1, 8, order=[2, 1, 0])
    )

    acc = gl.zeros([WK, RN * 16, BM], gl.float32, mma)
    scale_row = gl.arange(0, RN * 16, gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :]
    scale_row = gl.minimum(block * (RN * 16) + scale_row, N - 1) // 128 * blocks_k
    scale_column = gl.arange(0, WK, gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None]
    for ahead in gl.static_range(STAGES - 1):
        _fetch_words(first + ahead, last, ahead, buffer, words_row, words_at, K // 4, WK, KB)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for ahead in gl.static_range(STAGES - 1):
        _fetch_x(first + ahead, last, ahead, x_buffer, x_row, x_at, token < M, K, WK, KB)
        async_copy.commit_group()
    slot = 0
    for step in range(first, last):
        async_copy.wait_group(STAGES - 2)
        words = buffer.index(slot).load(words_layout)
        x = x_buffer.index(slot).load(x_layout)
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        _fetch_words(step + STAGES - 1, last, free, buffer, words_row, words_at, K // 4, WK, KB)
        _fetch_x(step + STAGES - 1, last, free, x_buffer, x_row, x_at, token < M, K, WK, KB)
        async_copy.commit_group()
        w = _dequantise(words, WK, RN, KB, w_layout)
        if BLOCKS:
            at = gl.minimum(step * WK + scale_column, blocks_k - 1)
            scale = gl.load(block_scales_ptr + scale_row + at)
            product = mma_v2(w, _operand(x, WK, BM, KB, y_layout), gl.zeros([WK, RN * 16, BM], gl.float32, mma))
            acc += product * scale[:, :, None]
        else:
            acc = mma_v2(w, _operand(x, WK, BM, KB, y_layout), acc)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)

    _finish(
        gl.sum(acc, 0), row_scales_ptr, out_ptr, out_stride, partials_ptr, counters_ptr, first_token, block, part, M, N,
        BM, RN, SPLIT, False, False,
    )  # fmt: skip
