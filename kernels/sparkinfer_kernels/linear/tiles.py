"""Parts of the Gluon products that use `wgmma`: layouts, copies into shared memory, and the product of one piece.

A program holds an output tile of WARPS * RT * 16 rows of the weight and BM rows of x: the weight is the first operand
of the matrix instruction, so that few rows of x cost few columns. It comes from registers (NVFP4) or shared memory, x
from shared memory. Layouts are given, so that no operand moves between threads: row tile r * WARPS + w belongs to warp
w. A piece is COLUMNS columns of both.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.runtime.jit import constexpr_function

# One word of codes to the four bfloat16 pairs of a matrix instruction's first operand (see layout.py), each multiplied
# with its row's scale. $0..$7 results (low and high half of each pair), $8 word, $9 scales of rows g and g + 8.
DEQUANTISE = gl.constexpr("""
{
.reg .b32 a, b, c, d, t, u, upper, lower;
.reg .b16 first, second;
mov.b32 {first, second}, $9;
mov.b32 upper, {first, first};
mov.b32 lower, {second, second};
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
mul.rn.bf16x2 a, a, upper;
mul.rn.bf16x2 b, b, lower;
mul.rn.bf16x2 c, c, upper;
mul.rn.bf16x2 d, d, lower;
mov.b32 {$0, $1}, a;
mov.b32 {$2, $3}, b;
mov.b32 {$4, $5}, c;
mov.b32 {$6, $7}, d;
}
""")

# One word of scales (see layout.py) to those of two instructions, each a pair of bfloat16.
SCALES = gl.constexpr("""
{
.reg .b32 t;
lop3.b32 $0, $2, 0x0FF00FF0, 0x60006000, 0xEA;
shf.r.wrap.b32 t, $2, $2, 8;
lop3.b32 $1, t, 0x0FF00FF0, 0x60006000, 0xEA;
}
""")


@constexpr_function
def bits(first, last):
    """Powers of two from `first` up to, not including, `last`."""
    out = []
    while first < last:
        out.append(first)
        first *= 2
    return out


@constexpr_function
def mma_layout(warps, bm, k=16):
    """[WARPS * RT * 16, BM] accumulator, all warps along the rows; `k` columns of an instruction."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, bm, k])


@constexpr_function
def operand_layout(element_bits):
    """Rows in shared memory as the tensor core reads them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=element_bits, rank=2)


@constexpr_function
def words_layout():
    """Words in shared memory in the order in which they are used."""
    return gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])


@constexpr_function
def copy_layout(warps, rows, columns, per_lane):
    """[ROWS, COLUMNS] for copying: `per_lane` (16 bytes) for a lane, a row's side by side, then the next row's."""
    order = [[0, b] for b in bits(per_lane, columns)] + [[b, 0] for b in bits(1, rows)]
    count = 5 + len(bits(1, warps))
    threads = order[:count] + [[0, 0]] * (count - len(order))
    registers = [[0, b] for b in bits(1, per_lane)] + order[count:]
    return gl.DistributedLinearLayout(registers, threads[:5], threads[5:], [], [rows, columns])


@constexpr_function
def codes_layout(warps, rt):
    """[WARPS * RT, 128] words of a 64-column tile: 4 for a lane."""
    regs = [[0, 1], [0, 2]] + [[b, 0] for b in bits(warps, warps * rt)]
    rows = [[b, 0] for b in bits(1, warps)]
    return gl.DistributedLinearLayout(regs, [[0, b] for b in bits(4, 128)], rows, [], [warps * rt, 128])


@constexpr_function
def scales_layout(warps, rt):
    """[WARPS * RT, 16] words of a 64-column tile: 2 for the four lanes of a row."""
    regs = [[0, 1]] + [[b, 0] for b in bits(warps, warps * rt)]
    lanes = [[0, 0], [0, 0], [0, 2], [0, 4], [0, 8]]
    return gl.DistributedLinearLayout(regs, lanes, [[b, 0] for b in bits(1, warps)], [], [warps * rt, 16])


@gluon.jit
def ranges(A: gl.constexpr, B: gl.constexpr, layout: gl.constexpr):
    """Indices along both dimensions of an [A, B] tensor of this layout."""
    a = gl.arange(0, A, gl.SliceLayout(1, layout))[:, None]
    b = gl.arange(0, B, gl.SliceLayout(0, layout))[None, :]
    return a, b


@gluon.jit
def fetch_words(
    buffer, ptr, first_row, rows, row_words, k, alive, WARPS: gl.constexpr, ROWS: gl.constexpr, WORDS: gl.constexpr
):
    """Start the copy of a piece's words [ROWS, WORDS] from rows of `row_words` words, of which there are `rows`.

    Beyond a row's end, or unless `alive`, zeros are written; beyond the last row, the last.
    """
    row, word = ranges(ROWS, WORDS, copy_layout(WARPS, ROWS, WORDS, 4))
    row = gl.minimum(first_row + row, rows - 1)
    at = k * WORDS + word
    async_copy.async_copy_global_to_shared(
        buffer,
        ptr + (row * row_words + at),
        mask=(at < alive.to(gl.int32) * row_words) & (row >= 0),
        eviction_policy="evict_first",
    )


@gluon.jit
def fetch_x(
    buffer, x_row, there, k, alive, K, WARPS: gl.constexpr, BM: gl.constexpr, COLUMNS: gl.constexpr, SIZE: gl.constexpr
):
    """Start the copy of a piece of x [BM, COLUMNS]; `x_row` points at rows, `there` says which are.

    SIZE elements are 16 bytes.
    """
    _, column = ranges(BM, COLUMNS, copy_layout(WARPS, BM, COLUMNS, SIZE))
    at = k * COLUMNS + column
    async_copy.async_copy_global_to_shared(buffer, x_row + at, mask=there & (at < alive.to(gl.int32) * K))


@gluon.jit
def arrived(OUTSTANDING: gl.constexpr):
    """Wait until all but the last OUTSTANDING groups of copies are there for all warps and for the tensor core."""
    async_copy.wait_group(OUTSTANDING)
    fence_async_shared()


@gluon.jit
def dequantise(codes, scales, RN: gl.constexpr, layout: gl.constexpr):
    """bf16 [RN * 16, 64] from words of codes [RN, 128] and of scales [RN, 16]."""
    codes = codes.reshape([RN, 8, 4, 4])
    words: gl.constexpr = codes.type.layout
    even, odd = gl.inline_asm_elementwise(SCALES, "=r,=r,r", [scales], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    pairs = gl.join(even, odd).reshape([RN, 8, 4])
    pairs = gl.convert_layout(pairs, gl.SliceLayout(2, words), assert_trivial=True)
    a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
        DEQUANTISE,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [codes, pairs.expand_dims(2)],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
    w = gl.join(
        gl.join(gl.join(a0, c0), gl.join(b0, d0)),
        gl.join(gl.join(a1, c1), gl.join(b1, d1)),
    )
    # [row tile, g, t, s, h, r, i] -> rows (row tile, r, g), columns (s, h, t, i)
    w = w.reshape([RN, 8, 4, 4, 2, 2, 2]).permute([0, 5, 1, 3, 4, 2, 6]).reshape([RN * 16, 64])
    return gl.convert_layout(w, layout, assert_trivial=True)


@gluon.jit
def multiply_nvfp4(
    acc, codes, scales, x, mma: gl.constexpr, WARPS: gl.constexpr, RT: gl.constexpr, COLUMNS: gl.constexpr
):
    """acc + weight @ x.T of a piece whose codes, scales and x are in shared memory.

    While the tensor core multiplies 64 columns, the next ones are expanded.
    """
    for tile in gl.static_range(COLUMNS // 64):
        w = dequantise(
            codes.slice(tile * 128, 128, 1).load(codes_layout(WARPS, RT)),
            scales.slice(tile * 16, 16, 1).load(scales_layout(WARPS, RT)),
            WARPS * RT,
            gl.DotOperandLayout(0, mma, 2),
        )
        acc = warpgroup_mma(w, x.slice(tile * 64, 64, 1).permute([1, 0]), acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])
