"""The kernel of `skinny.py`, in Gluon: layouts are given, so that no operand is moved between threads."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import constexpr_function

from sparkinfer_kernels.linear.tiles import bits

# One word of codes to the four bfloat16 pairs of a matrix instruction's first operand (see layout.py), each multiplied
# with its row's scale. $0..$7 results (low and high half of each pair), $8 word, $9 and $10 scale pairs of g and g + 8.
DEQUANTISE = gl.constexpr("""
{
.reg .b32 a, b, c, d, t, u;
and.b32 a, $8, 0x81C081C0;
shl.b32 b, $8, 3;
and.b32 b, b, 0x81C081C0;
and.b32 c, $8, 0x40074007;
mul.lo.u32 c, c, 66;
and.b32 c, c, 0x81C081C0;
shl.b32 t, $8, 2;
and.b32 t, t, 0x80008000;
shr.u32 u, $8, 3;
lop3.b32 d, u, 0x01C001C0, t, 0xEA;
mul.rn.bf16x2 a, a, $9;
mul.rn.bf16x2 b, b, $10;
mul.rn.bf16x2 c, c, $9;
mul.rn.bf16x2 d, d, $10;
mov.b32 {$0, $1}, a;
mov.b32 {$2, $3}, b;
mov.b32 {$4, $5}, c;
mov.b32 {$6, $7}, d;
}
""")


@constexpr_function
def _codes_layout(wk, wn, rt, kb):
    """[WK, WN * RT, KB * 256] words: 4 of a tile per lane; tiles of a row tile and row tiles in registers."""
    regs = [[0, 0, b] for b in bits(1, 4) + bits(128, kb * 256)] + [[0, b, 0] for b in bits(wn, wn * rt)]
    lanes = [[0, 0, b] for b in bits(4, 128)]
    warps = [[0, b, 0] for b in bits(1, wn)] + [[b, 0, 0] for b in bits(1, wk)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [wk, wn * rt, kb * 256])


@constexpr_function
def _scales_layout(wk, wn, rt, kb):
    """[WK, WN * RT, KB * 32] words: one per lane for 128 columns."""
    regs = [[0, 0, b] for b in bits(32, kb * 32)] + [[0, b, 0] for b in bits(wn, wn * rt)]
    lanes = [[0, 0, b] for b in bits(1, 32)]
    warps = [[0, b, 0] for b in bits(1, wn)] + [[b, 0, 0] for b in bits(1, wk)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [wk, wn * rt, kb * 32])


@constexpr_function
def _x_layout(wk, wn, bm, kb):
    """[WK, BM, KB * 128] activations: 16 columns side by side per lane; the same for all warps along N."""
    regs = [[0, 0, b] for b in bits(1, 16) + bits(64, kb * 128)] + [[0, b, 0] for b in bits(8, bm)]
    lanes = [[0, 0, 16], [0, 0, 32], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[0, 0, 0] for _ in bits(1, wn)] + [[b, 0, 0] for b in bits(1, wk)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [wk, bm, kb * 128])


@constexpr_function
def _x_copy_layout(wk, wn, bm, kb):
    """[WK, BM, KB * 128] activations for copying: 16 bytes per lane, a row of 128 columns for 16 lanes."""
    regs, lanes, warps = (
        [[0, 0, 1], [0, 0, 2], [0, 0, 4]],
        [[0, 0, b] for b in bits(8, 128)] + [[0, 1, 0]],
        [],
    )
    rest = (
        [[0, b, 0] for b in bits(2, bm)] + [[b, 0, 0] for b in bits(1, wk)] + [[0, 0, b] for b in bits(128, kb * 128)]
    )
    while len(warps) < len(bits(1, wk * wn)):
        warps.append(rest.pop(0) if rest else [0, 0, 0])
    return gl.DistributedLinearLayout(regs + rest, lanes, warps, [], [wk, bm, kb * 128])


@gluon.jit
def _pairs(
    first,
    second,
    WK: gl.constexpr,
    RN: gl.constexpr,
    KB: gl.constexpr,
    layout: gl.constexpr,
):
    """Scale bytes of both 64-column halves [WK, RN, KB * 32] as bf16 pairs, repeated for the words that each covers."""
    pair = gl.join(first, second) * 0x00100010 + 0x6F806F80
    pair = pair.reshape([WK, RN, KB, 32, 2]).permute([0, 1, 2, 4, 3])
    for _ in gl.static_range(2):
        pair = gl.join(pair, pair)
    return gl.convert_layout(pair.reshape([WK, RN, KB * 256]), layout, assert_trivial=True)


@gluon.jit
def _dequantise(
    codes,
    scales,
    WK: gl.constexpr,
    RN: gl.constexpr,
    KB: gl.constexpr,
    layout: gl.constexpr,
):
    """bf16 [WK, RN * 16, KB * 128] from words of codes [WK, RN, KB * 256] and of scales [WK, RN, KB * 32]."""
    words_layout: gl.constexpr = codes.type.layout
    upper = _pairs(scales & 0xFF, (scales >> 16) & 0xFF, WK, RN, KB, words_layout)
    lower = _pairs((scales >> 8) & 0xFF, (scales >> 24) & 0xFF, WK, RN, KB, words_layout)
    a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
        DEQUANTISE,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
        [codes, upper, lower],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
    # [.., 64-column tile, g, t, s, h, r, i] -> rows (r, g), columns (tile, s, h, t, i)
    w = gl.join(
        gl.join(gl.join(a0, c0), gl.join(b0, d0)),
        gl.join(gl.join(a1, c1), gl.join(b1, d1)),
    )
    w = w.reshape([WK, RN, KB * 2, 8, 4, 4, 2, 2, 2])
    w = w.permute([0, 1, 7, 3, 2, 5, 6, 4, 8]).reshape([WK, RN * 16, KB * 128])
    return gl.convert_layout(w, layout, assert_trivial=True)


@gluon.jit
def _operand(x, WK: gl.constexpr, BM: gl.constexpr, KB: gl.constexpr, layout: gl.constexpr):
    """Activations [WK, BM, KB * 128] as second operand [WK, KB * 128, BM], columns in the order of the codes."""
    x = x.reshape([WK, BM, KB * 2, 4, 4, 2, 2]).permute([0, 2, 4, 5, 3, 6, 1]).reshape([WK, KB * 128, BM])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _ranges(A: gl.constexpr, B: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """Indices along the three dimensions of a [A, B, C] tensor of this layout."""
    a = gl.arange(0, A, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    b = gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    c = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return a, b, c


@gluon.jit
def _fetch_codes(
    alive,
    block,
    k,
    slot,
    codes_buffer,
    scales_buffer,
    codes_ptr,
    scales_ptr,
    codes_index,
    scales_index,
    row_tiles,
    blocks_k,
    WK: gl.constexpr,
    RN: gl.constexpr,
    KB: gl.constexpr,
    EVEN: gl.constexpr,
):
    """Start the copies of piece `k` of a block's weights; beyond the end of K, or unless `alive`, zeros are written."""
    limit = alive.to(gl.int32) * blocks_k
    index_k, index_r, index_w = codes_index
    at_k = (k * WK + index_k) * KB
    at = (gl.minimum(block * RN + index_r, row_tiles - 1) * blocks_k + at_k) * 256 + index_w
    mask = at_k + gl.zeros_like(at) < limit if EVEN else at_k * 256 + index_w < limit * 256
    async_copy.async_copy_global_to_shared(
        codes_buffer.index(slot), codes_ptr + at, mask=mask, eviction_policy="evict_first"
    )
    index_k, index_r, index_w = scales_index
    at_k = (k * WK + index_k) * KB
    at = (gl.minimum(block * RN + index_r, row_tiles - 1) * blocks_k + at_k) * 32 + index_w
    mask = at_k + gl.zeros_like(at) < limit if EVEN else at_k * 32 + index_w < limit * 32
    async_copy.async_copy_global_to_shared(
        scales_buffer.index(slot), scales_ptr + at, mask=mask, eviction_policy="evict_first"
    )


@gluon.jit
def _fetch_x(alive, k, slot, x_buffer, x_row, x_at, tokens, K, WK: gl.constexpr, KB: gl.constexpr):
    """Start the copies of piece `k` of the activations."""
    at = x_at + k * (WK * KB * 128)
    async_copy.async_copy_global_to_shared(
        x_buffer.index(slot), x_row + at, mask=tokens & (at < alive.to(gl.int32) * K)
    )


@gluon.jit
def _advance(block, k, steps):
    """The piece after piece `k` of `block`."""
    turn = k == steps - 1
    return gl.where(turn, block + 1, block), gl.where(turn, 0, k + 1)


@gluon.jit
def nvfp4_skinny_kernel(
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
    row_tiles,
    BM: gl.constexpr,
    WK: gl.constexpr,
    WN: gl.constexpr,
    RT: gl.constexpr,
    KB: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN: gl.constexpr,
    GATE_UP: gl.constexpr,
    ACTIVATE: gl.constexpr,
    PDL: gl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * weight[n, k] for BM tokens and one share of the weight.

    The weight is cut into blocks of WN * RT row tiles and these into pieces of WK * KB * 128 columns (EVEN: they fit
    into K). Program i of G takes the i-th of G equal shares of all pieces, in order, so its copies never pause; a block
    that several programs share is summed by the one that finishes last, in the order of the programs (Stream-K: Osama
    et al. 2023, arXiv 2301.03598). WK warps share each output tile, taking turns along K.
    """
    RN: gl.constexpr = WN * RT
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WK, WN, 1], instr_shape=[1, 16, 8])
    codes_layout: gl.constexpr = _codes_layout(WK, WN, RT, KB)
    scales_layout: gl.constexpr = _scales_layout(WK, WN, RT, KB)
    x_layout: gl.constexpr = _x_layout(WK, WN, BM, KB)
    copy_layout: gl.constexpr = _x_copy_layout(WK, WN, BM, KB)
    first_token = gl.program_id(0) * BM
    blocks_k = (K + 127) // 128
    steps = (blocks_k + WK * KB - 1) // (WK * KB)
    blocks = (row_tiles + RN - 1) // RN
    first, last = _share(blocks * steps)

    codes_index = _ranges(WK, RN, KB * 256, codes_layout)
    scales_index = _ranges(WK, RN, KB * 32, scales_layout)
    x_k, token, x_c = _ranges(WK, BM, KB * 128, copy_layout)
    token += first_token
    x_row = x_ptr + token.to(gl.int64) * x_stride
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

    block = first // steps
    k = first - block * steps
    # The weights do not depend on the kernel before: their first pieces come while it still runs.
    next_block, next_k = block, k
    for ahead in gl.static_range(STAGES - 1):
        _fetch_codes(
            first + ahead < last, next_block, next_k, ahead, codes_buffer, scales_buffer, codes_ptr, scales_ptr,
            codes_index, scales_index, row_tiles, blocks_k, WK, RN, KB, EVEN,
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
    slot = 0
    for piece in range(first, last):
        async_copy.wait_group(STAGES - 2)
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        alive = piece + STAGES - 1 < last
        _fetch_codes(
            alive, next_block, next_k, free, codes_buffer, scales_buffer, codes_ptr, scales_ptr,
            codes_index, scales_index, row_tiles, blocks_k, WK, RN, KB, EVEN,
        )  # fmt: skip
        _fetch_x(alive, next_k, free, x_buffer, x_row, x_at, token < M, K, WK, KB)
        async_copy.commit_group()
        codes = codes_buffer.index(slot).load(codes_layout)
        scales = scales_buffer.index(slot).load(scales_layout)
        x = x_buffer.index(slot).load(x_layout)
        next_block, next_k = _advance(next_block, next_k, steps)
        w = _dequantise(codes, scales, WK, RN, KB, gl.DotOperandLayout(0, mma, 2))
        acc = mma_v2(w, _operand(x, WK, BM, KB, gl.DotOperandLayout(1, mma, 2)), acc)
        if (k == steps - 1) | (piece == last - 1):
            _finish(
                gl.sum(acc, 0), row_scales_ptr, out_ptr, out_stride, partials_ptr, counters_ptr, first_token, block,
                blocks, steps, M, N, BM, RN, GATE_UP, ACTIVATE,
            )  # fmt: skip
            acc = gl.zeros([WK, RN * 16, BM], gl.float32, mma)
        block, k = _advance(block, k, steps)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)


@gluon.jit
def _share(total):
    """First and last + 1 of this program's pieces."""
    program, programs = gl.program_id(1), gl.num_programs(1)
    return total * program // programs, total * (program + 1) // programs


@gluon.jit
def _finish(
    y,
    row_scales_ptr,
    out_ptr,
    out_stride,
    partials_ptr,
    counters_ptr,
    first_token,
    block,
    blocks,
    steps,
    M,
    N,
    BM: gl.constexpr,
    RN: gl.constexpr,
    GATE_UP: gl.constexpr,
    ACTIVATE: gl.constexpr,
):
    """Deliver this program's sum of a block; the program that delivers last adds those of all and stores the result."""
    layout: gl.constexpr = y.type.layout
    program, programs = gl.program_id(1), gl.num_programs(1)
    total = blocks * steps
    # Program p begins at total * p // programs: the program that has piece i is ((i + 1) * programs - 1) // total.
    head = ((block * steps + 1) * programs - 1) // total
    tail = ((block + 1) * steps * programs - 1) // total
    row = gl.arange(0, RN * 16, gl.SliceLayout(1, layout))
    column = gl.arange(0, BM, gl.SliceLayout(0, layout))[None, :]
    valid = column + first_token < M
    done = head == tail
    if head != tail:
        # Two places a program: for the block that it begins and for the one that another has begun.
        size: gl.constexpr = RN * 16 * BM
        places = partials_ptr + gl.program_id(0).to(gl.int64) * programs * (2 * size) + row[:, None] * BM + column
        gl.store(places + (program * 2 + (head == program).to(gl.int32)) * size, y, mask=valid)
        gl.thread_barrier()
        counter = counters_ptr + gl.program_id(0) * blocks + block
        before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        done = before == tail - head
        if done:
            gl.store(counter, 0)
            y = gl.load(places + (head * 2 + 1) * size, mask=valid, other=0.0, cache_modifier=".cg")
            for other in range(head + 1, tail + 1):
                y += gl.load(places + other * 2 * size, mask=valid, other=0.0, cache_modifier=".cg")
    if done:
        _store(y, row_scales_ptr, out_ptr, out_stride, first_token, block, M, N, BM, RN, GATE_UP, ACTIVATE)


@gluon.jit
def _store(
    y,
    row_scales_ptr,
    out_ptr,
    out_stride,
    first_token,
    block,
    M,
    N,
    BM: gl.constexpr,
    RN: gl.constexpr,
    GATE_UP: gl.constexpr,
    ACTIVATE: gl.constexpr,
):
    """Scale the rows and write them in the dtype of `out_ptr`; with SwiGLU, if asked for, in bf16."""
    layout: gl.constexpr = y.type.layout
    row = gl.arange(0, RN * 16, gl.SliceLayout(1, layout)) + block * (RN * 16)
    token = gl.arange(0, BM, gl.SliceLayout(0, layout))[None, :] + first_token
    if row_scales_ptr is not None:
        y *= gl.load(row_scales_ptr + row, mask=row < N, other=0.0)[:, None]
    if ACTIVATE:
        # Rows r * 8 + g of a tile: the gates have r = 0, their ups r = 1, both in one thread.
        gate, up = gl.split(y.reshape([RN, 2, 8, BM]).permute([0, 2, 3, 1]))
        z = gate / (1.0 + gl.exp(-gate)) * up
        zl: gl.constexpr = z.type.layout
        tile, inner, m = _ranges(RN, 8, BM, zl)
        m += first_token
        n = (block * RN + tile) * 8 + inner
        gl.store(out_ptr + m.to(gl.int64) * out_stride + n, z.to(gl.bfloat16), mask=(m < M) & (n < N // 2))
    else:
        n = row
        if GATE_UP:
            n = row // 16 * 8 + row % 8 + (row // 8 % 2) * (N // 2)
        mask = (token < M) & (row[:, None] < N)
        gl.store(out_ptr + token.to(gl.int64) * out_stride + n[:, None], y.to(out_ptr.dtype.element_ty), mask=mask)
