"""Triton kernels that find a row's pivot: the smallest scaled logit that passes top-k, top-p and min-p.

A token of value v passes top-k when fewer than k values are greater than v, and top-p when the values greater than v
hold less than top_p of the mass (of the k most likely tokens). Both conditions are monotone in v, so the pivot is
bracketed by counting and summing above 16 thresholds, twice; what lies inside the last bracket is copied out, and
`pivot_kernel` searches there.

Slices are read as tiles [.., LANES * VEC] whose columns t * VEC on belong to thread t, so that a thread adds up its own
elements before anything crosses threads; sums of eight thresholds cross together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparkinfer_kernels.sampler.kernels import is_filtered

STEPS = tl.constexpr(16)
"""Thresholds of a search level; level 0 also sums the whole row, as number 16 (counted from 0)."""
DEPTH = tl.constexpr(40.0)
"""Level 0 looks this far (natural log) below the most likely token; less mass than e**-40 hides below."""
FEW = tl.constexpr(4096)
"""A bracket of level 0 with no more values than this is not narrowed further (counted for rows with top-k only)."""

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
"""The interpreter takes minutes for a reduction of several vectors at once."""
LANES = tl.constexpr(128)
"""Threads of the programs that read slices."""


@triton.jit
def _load_tile(logits_ptr, row, stride, vocab, BLOCK: tl.constexpr, VEC: tl.constexpr):
    """(fp32 logits with -inf beyond the vocabulary, their tokens) of this program's slice as a tile."""
    WIDTH: tl.constexpr = LANES * VEC
    token = tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    token += tl.program_id(1) * BLOCK
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + token, mask=token < vocab, other=float("-inf"))
    return x.to(tl.float32), token


@triton.jit
def _lanes(values, VEC: tl.constexpr):
    """Each thread's own sum [LANES] of a tile."""
    return tl.sum(tl.reshape(tl.sum(values, axis=0), [LANES, VEC]), axis=1)


@triton.jit
def add8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def sum8(a0, a1, a2, a3, a4, a5, a6, a7):
    """Sums of eight vectors; compiled, they cross threads together."""
    if COMPILED:
        return tl.reduce((a0, a1, a2, a3, a4, a5, a6, a7), 0, add8)
    return tl.sum(a0), tl.sum(a1), tl.sum(a2), tl.sum(a3), tl.sum(a4), tl.sum(a5), tl.sum(a6), tl.sum(a7)


@triton.jit
def _store_above(to, x, weight, first: tl.constexpr, lo, hi, top, low, VEC: tl.constexpr):
    """Store at `to` the weights above thresholds first to first + 7, added up."""
    sums = sum8(
        _lanes(tl.where(x >= _threshold(first, lo, hi, top, low), weight, 0), VEC),
        _lanes(tl.where(x >= _threshold(first + 1, lo, hi, top, low), weight, 0), VEC),
        _lanes(tl.where(x >= _threshold(first + 2, lo, hi, top, low), weight, 0), VEC),
        _lanes(tl.where(x >= _threshold(first + 3, lo, hi, top, low), weight, 0), VEC),
        _lanes(tl.where(x >= _threshold(first + 4, lo, hi, top, low), weight, 0), VEC),
        _lanes(tl.where(x >= _threshold(first + 5, lo, hi, top, low), weight, 0), VEC),
        _lanes(tl.where(x >= _threshold(first + 6, lo, hi, top, low), weight, 0), VEC),
        _lanes(tl.where(x >= _threshold(first + 7, lo, hi, top, low), weight, 0), VEC),
    )
    for number in tl.static_range(8):
        tl.store(to + first + number, sums[number])


@triton.jit
def _threshold(number, lo, hi, top, low):
    """Threshold `number` (0 to 15; a scalar or a tensor) of the bracket [lo, hi): the last one is `lo` itself.

    An open end is replaced by the row's extreme."""
    upper = tl.minimum(hi, top)
    lower = tl.maximum(lo, tl.minimum(low, upper))
    step = (upper - lower) * (1.0 / 16.0)
    return tl.where(number == 15, lo, upper - (number + 1) * step)


@triton.jit
def _first_bracket(top, low):
    return tl.maximum(tl.minimum(low, top), top - DEPTH), float("inf")


@triton.jit
def _sums(counts_ptr, masses_ptr, row, slices, level, SLICES: tl.constexpr):
    """Counts [16] and masses [32] above the thresholds of a level, added up over a row's slices in order."""
    s = tl.arange(0, SLICES)
    j = tl.arange(0, 32)
    base = ((level * tl.num_programs(0) + row) * slices + s)[:, None] * 32 + j[None, :]
    live = (s < slices)[:, None] & (j <= 16)[None, :]
    return tl.sum(tl.load(counts_ptr + base, mask=live, other=0), axis=0), tl.sum(
        tl.load(masses_ptr + base, mask=live, other=0.0), axis=0
    )


@triton.jit
def _narrow(counts, masses, total, lo, hi, top, low, count_hi, mass_hi, top_k, top_p):
    """The bracket that holds the pivot (and the k-th value, which top-p needs), by the sums above the thresholds.

    Returns (lo, hi, count at or above hi, mass at or above hi, whether top-k knows that little is inside)."""
    j = tl.arange(0, 32)
    step = j < 16
    # Numbers of the first threshold with enough above it; 16 when even the last has too little.
    by_count = tl.min(tl.where(step & (counts >= top_k), j, 16))
    if top_k > 0:
        # The mass of the k most likely lies between what is above this bracket's upper and lower end.
        total = tl.sum(tl.where(j == by_count - 1, masses, 0.0))
        total = tl.where(by_count == 0, mass_hi, total)
    by_mass = tl.min(tl.where(step & (masses >= top_p * total), j, 16))
    upper = by_mass
    lower = by_mass
    if top_k > 0:
        lower = by_count
        upper = tl.where(top_p < 1.0, tl.minimum(by_mass, by_count), by_count)
    new_lo = tl.where(lower == 16, float("-inf"), _threshold(lower, lo, hi, top, low))
    new_hi = tl.where(upper == 0, hi, _threshold(upper - 1, lo, hi, top, low))
    above = tl.sum(tl.where(j == upper - 1, counts, 0))
    mass_above = tl.sum(tl.where(j == upper - 1, masses, 0.0))
    above = tl.where(upper == 0, count_hi, above)
    mass_above = tl.where(upper == 0, mass_hi, mass_above)
    few = (top_k > 0) & (lower < 16) & (tl.sum(tl.where(j == lower, counts, 0)) - above <= FEW)
    return new_lo, new_hi, above, mass_above, few


@triton.jit
def bracket_kernel(
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    value_ptr,
    lowest_ptr,
    counts_ptr,
    masses_ptr,
    bracket_ptr,
    above_ptr,
    vocab,
    slices,
    LEVELS: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Grid (rows): what is known of a filtered row's pivot after LEVELS levels.

    `bracket` [rows, 8]: lower end, upper end, mass at or above it, mass of the row, largest and smallest scaled logit.
    `above` [rows, 2]: count at or above the upper end, whether the bracket is narrow enough.
    """
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    ranked, filtered = is_filtered(row, temperature, top_k_ptr, top_p_ptr, min_p_ptr, vocab)
    bracket_ptr += 8 * row
    above_ptr += 2 * row
    if LEVELS == 0:
        if filtered:
            s = tl.arange(0, SLICES)
            top = tl.max(tl.load(value_ptr + row * slices + s, mask=s < slices, other=float("-inf")))
            low = tl.min(tl.load(lowest_ptr + row * slices + s, mask=s < slices, other=float("inf")))
            top, low = tl.math.div_rn(top, temperature), tl.math.div_rn(low, temperature)
            lo, hi = _first_bracket(top, low)
            tl.store(bracket_ptr, lo)
            tl.store(bracket_ptr + 1, hi)
            tl.store(bracket_ptr + 2, 0.0)
            tl.store(bracket_ptr + 4, top)
            tl.store(bracket_ptr + 5, low)
            tl.store(above_ptr, 0)
            tl.store(above_ptr + 1, 0)
    else:
        if ranked & (tl.load(above_ptr + 1) == 0):
            top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
            top_k = tl.where(top_k < vocab, top_k, 0)
            lo, hi, mass_hi = tl.load(bracket_ptr), tl.load(bracket_ptr + 1), tl.load(bracket_ptr + 2)
            top, low = tl.load(bracket_ptr + 4), tl.load(bracket_ptr + 5)
            counts, masses = _sums(counts_ptr, masses_ptr, row, slices, LEVELS - 1, SLICES)
            if LEVELS == 1:
                total = tl.sum(tl.where(tl.arange(0, 32) == 16, masses, 0.0))
                tl.store(bracket_ptr + 3, total)
            else:
                total = tl.load(bracket_ptr + 3)
            count_hi = tl.load(above_ptr)
            lo, hi, count_hi, mass_hi, few = _narrow(
                counts, masses, total, lo, hi, top, low, count_hi, mass_hi, top_k, top_p
            )
            tl.store(bracket_ptr, lo)
            tl.store(bracket_ptr + 1, hi)
            tl.store(bracket_ptr + 2, mass_hi)
            tl.store(above_ptr, count_hi)
            tl.store(above_ptr + 1, few.to(tl.int32))


@triton.jit
def count_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    counts_ptr,
    masses_ptr,
    bracket_ptr,
    above_ptr,
    stride,
    vocab,
    slices,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
):
    """Grid (rows, slices): counts and masses above the 16 thresholds of level 0 or 1."""
    row, part = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    ranked, _filtered = is_filtered(row, temperature, top_k_ptr, top_p_ptr, min_p_ptr, vocab)
    if ranked & (tl.load(above_ptr + 2 * row + 1) == 0):
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        lo, hi = tl.load(bracket_ptr + 8 * row), tl.load(bracket_ptr + 8 * row + 1)
        top, low = tl.load(bracket_ptr + 8 * row + 4), tl.load(bracket_ptr + 8 * row + 5)
        x, _token = _load_tile(logits_ptr, row, stride, vocab, BLOCK, VEC)
        x = tl.math.div_rn(x, temperature)
        to = ((LEVEL * tl.num_programs(0) + row) * slices + part) * 32
        # Counts serve top-k, masses serve top-p; what a row does not need is not read either.
        if (top_k > 0) & (top_k < vocab):
            _store_above(counts_ptr + to, x, 1, 0, lo, hi, top, low, VEC)
            _store_above(counts_ptr + to, x, 1, 8, lo, hi, top, low, VEC)
        if top_p < 1.0:
            mass = tl.exp(x - top)
            _store_above(masses_ptr + to, x, mass, 0, lo, hi, top, low, VEC)
            _store_above(masses_ptr + to, x, mass, 8, lo, hi, top, low, VEC)
            tl.store(masses_ptr + to + 16, tl.sum(_lanes(mass, VEC)))


@triton.jit
def collect_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    bracket_ptr,
    inside_ptr,
    found_ptr,
    stride,
    vocab,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
):
    """Grid (rows, slices): copy the scaled logits inside the bracket to `inside`, in any order."""
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    ranked, _filtered = is_filtered(row, temperature, top_k_ptr, top_p_ptr, min_p_ptr, vocab)
    if ranked:
        lo, hi = tl.load(bracket_ptr + 8 * row), tl.load(bracket_ptr + 8 * row + 1)
        x, token = _load_tile(logits_ptr, row, stride, vocab, BLOCK, VEC)
        x = tl.math.div_rn(x, temperature)
        inside = (x >= lo) & (x < hi) & (token < vocab)
        count = inside.to(tl.int32)
        columns = tl.reshape(tl.sum(count, axis=0), [LANES, VEC])
        mine = tl.sum(columns, axis=1)
        many = tl.sum(mine)
        if many > 0:
            first = tl.atomic_add(found_ptr + row, many, sem="relaxed")
            # What comes before: other threads' elements, this thread's columns before, the column's rows before.
            before = first + tl.cumsum(mine, axis=0) - mine
            column = before[:, None] + tl.cumsum(columns, axis=1) - columns
            place = tl.reshape(column, [LANES * VEC])[None, :] + tl.cumsum(count, axis=0) - 1
            tl.store(inside_ptr + row.to(tl.int64) * vocab + place, x, mask=inside)
