"""Triton kernels that find a row's pivot: the smallest scaled logit that passes top-k, top-p and min-p.

A token of value v passes top-k when fewer than k values are greater than v, and top-p when the values greater than v
hold less than top_p of the mass (of the k most likely tokens). Both conditions are monotone in v, so the pivot is
bracketed by counting and summing above 16 thresholds, twice; what lies inside the last bracket is copied out and the
pivot found there bit by bit. Sums over the copy are integers (2**44 for the mass of the most likely token), so that its
order does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparkinfer_kernels.sampler.kernels import is_filtered, load_slice
from sparkinfer_kernels.sampler.noise_kernel import log

STEPS = tl.constexpr(16)
"""Thresholds of a search level; level 0 also sums the whole row, as number 16 (counted from 0)."""
DEPTH = tl.constexpr(40.0)
"""Level 0 looks this far (natural log) below the most likely token; less mass than e**-40 hides below."""
FEW = tl.constexpr(4096)
"""A bracket of level 0 with no more values than this is not narrowed further (counted for rows with top-k only)."""


@triton.jit
def _row_extremes(value_ptr, lowest_ptr, row, slices, temperature, SLICES: tl.constexpr):
    """(largest, lowest finite) scaled logit of a row."""
    s = tl.arange(0, SLICES)
    top = tl.max(tl.load(value_ptr + row * slices + s, mask=s < slices, other=float("-inf")))
    low = tl.min(tl.load(lowest_ptr + row * slices + s, mask=s < slices, other=float("inf")))
    return tl.math.div_rn(top, temperature), tl.math.div_rn(low, temperature)


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
def _bracket(counts_ptr, masses_ptr, row, slices, top, low, top_k, top_p, LEVELS: tl.constexpr, SLICES: tl.constexpr):
    """The bracket after `LEVELS` levels, the mass of the whole row, and whether level 1 is left out."""
    lo, hi = _first_bracket(top, low)
    count_hi, mass_hi, total, few = 0, 0.0, 0.0, False
    if LEVELS > 0:
        counts, masses = _sums(counts_ptr, masses_ptr, row, slices, 0, SLICES)
        total = tl.sum(tl.where(tl.arange(0, 32) == 16, masses, 0.0))
        lo, hi, count_hi, mass_hi, few = _narrow(
            counts, masses, total, lo, hi, top, low, count_hi, mass_hi, top_k, top_p
        )
    if LEVELS > 1:
        counts, masses = _sums(counts_ptr, masses_ptr, row, slices, 1, SLICES)
        lo_1, hi_1, count_1, mass_1, _few_1 = _narrow(
            counts, masses, total, lo, hi, top, low, count_hi, mass_hi, top_k, top_p
        )
        lo, hi = tl.where(few, lo, lo_1), tl.where(few, hi, hi_1)
        count_hi, mass_hi = tl.where(few, count_hi, count_1), tl.where(few, mass_hi, mass_1)
    return lo, hi, count_hi, mass_hi, total, few


@triton.jit
def count_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    value_ptr,
    lowest_ptr,
    counts_ptr,
    masses_ptr,
    stride,
    vocab,
    slices,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Grid (rows, slices): counts and masses above the 16 thresholds of level 0 or 1."""
    row, part = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    ranked, _filtered = is_filtered(row, temperature, top_k_ptr, top_p_ptr, min_p_ptr, vocab)
    if ranked:
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        top_k = tl.where(top_k < vocab, top_k, 0)
        x, _token = load_slice(logits_ptr, row, stride, vocab, BLOCK)
        top, low = _row_extremes(value_ptr, lowest_ptr, row, slices, temperature, SLICES)
        lo, hi, _count_hi, _mass_hi, _total, few = _bracket(
            counts_ptr, masses_ptr, row, slices, top, low, top_k, top_p, LEVEL, SLICES
        )
        if few == 0:
            x = tl.math.div_rn(x, temperature)
            mass = tl.exp(x - top)
            j = tl.arange(0, 32)
            base = ((LEVEL * tl.num_programs(0) + row) * slices + part) * 32 + j
            # Counts serve top-k, masses serve top-p; what a row does not need is not read either.
            if top_k > 0:
                counts = tl.zeros([32], dtype=tl.int32)
                for number in tl.static_range(16):
                    passes = x >= _threshold(number, lo, hi, top, low)
                    counts = tl.where(j == number, tl.sum(passes.to(tl.int32)), counts)
                tl.store(counts_ptr + base, counts, mask=j < 16)
            if top_p < 1.0:
                masses = tl.zeros([32], dtype=tl.float32)
                for number in tl.static_range(16):
                    passes = x >= _threshold(number, lo, hi, top, low)
                    masses = tl.where(j == number, tl.sum(tl.where(passes, mass, 0.0)), masses)
                masses = tl.where(j == 16, tl.sum(mass), masses)
                tl.store(masses_ptr + base, masses, mask=j <= 16)


@triton.jit
def collect_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    value_ptr,
    lowest_ptr,
    counts_ptr,
    masses_ptr,
    inside_ptr,
    found_ptr,
    stride,
    vocab,
    slices,
    BLOCK: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Grid (rows, slices): copy the scaled logits inside the bracket to `inside`, in any order."""
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    ranked, _filtered = is_filtered(row, temperature, top_k_ptr, top_p_ptr, min_p_ptr, vocab)
    if ranked:
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        top_k = tl.where(top_k < vocab, top_k, 0)
        x, token = load_slice(logits_ptr, row, stride, vocab, BLOCK)
        top, low = _row_extremes(value_ptr, lowest_ptr, row, slices, temperature, SLICES)
        lo, hi, _count_hi, _mass_hi, _total, _few = _bracket(
            counts_ptr, masses_ptr, row, slices, top, low, top_k, top_p, 2, SLICES
        )
        x = tl.math.div_rn(x, temperature)
        inside = (x >= lo) & (x < hi) & (token < vocab)
        count = inside.to(tl.int32)
        many = tl.sum(count)
        if many > 0:
            first = tl.atomic_add(found_ptr + row, many, sem="relaxed")
            place = row.to(tl.int64) * vocab + first + tl.cumsum(count, axis=0) - 1
            tl.store(inside_ptr + place, x, mask=inside)


@triton.jit
def _key(x):
    """int32 in the order of the fp32 values (both zeros differ; no NaN)."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mass(x, top):
    """Integer mass: 2**44 for the most likely token."""
    return (tl.exp(x - top) * 17592186044416.0).to(tl.int64)


@triton.jit
def _above(inside_ptr, held, key, found, top, MASS: tl.constexpr, RESIDENT: tl.constexpr, CAPACITY: tl.constexpr):
    """Count (or mass) of the collected values with keys above `key`."""
    if RESIDENT:
        passes = (_key(held) > key) & (tl.arange(0, CAPACITY) < found)
        if MASS:
            return tl.sum(tl.where(passes, _mass(held, top), 0))
        return tl.sum(passes.to(tl.int64))
    total = tl.zeros([CAPACITY], dtype=tl.int64)
    for begin in range(0, found, CAPACITY):
        i = begin + tl.arange(0, CAPACITY)
        x = tl.load(inside_ptr + i, mask=i < found, other=float("-inf"))
        passes = (_key(x) > key) & (i < found)
        if MASS:
            total += tl.where(passes, _mass(x, top), 0)
        else:
            total += passes.to(tl.int64)
    return tl.sum(total)


@triton.jit
def _smallest_key(
    inside_ptr,
    held,
    found,
    top,
    key_lo,
    key_hi,
    limit,
    MASS: tl.constexpr,
    RESIDENT: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Smallest key with less than `limit` above it, between the given ones (at `key_hi` that holds)."""
    lo, hi = key_lo.to(tl.int64), key_hi.to(tl.int64)
    while lo < hi:
        middle = (lo + hi) >> 1
        enough = _above(inside_ptr, held, middle.to(tl.int32), found, top, MASS, RESIDENT, CAPACITY) < limit
        hi = tl.where(enough, middle, hi)
        lo = tl.where(enough, lo, middle + 1)
    return hi.to(tl.int32)


@triton.jit
def _pivot_inside(
    inside_ptr, found, top, top_k, top_p, count_hi, mass_hi, total, RESIDENT: tl.constexpr, CAPACITY: tl.constexpr
):
    """Pivot among the `found` > 0 collected values."""
    i = tl.arange(0, CAPACITY)
    held = tl.load(inside_ptr + i, mask=i < found, other=0.0)
    largest = tl.where(i < found, held, float("-inf"))
    smallest = tl.where(i < found, held, float("inf"))
    if not RESIDENT:
        for begin in range(CAPACITY, found, CAPACITY):
            more = begin + i
            x = tl.load(inside_ptr + more, mask=more < found, other=float("-inf"))
            largest = tl.maximum(largest, x)
            smallest = tl.minimum(smallest, tl.where(more < found, x, float("inf")))
    key_lo, key_hi = _key(tl.min(smallest)), _key(tl.max(largest))
    base = (mass_hi * 17592186044416.0).to(tl.int64)
    if top_k > 0:
        left = (top_k - count_hi).to(tl.int64)
        key_lo = _smallest_key(inside_ptr, held, found, top, key_lo, key_hi, left, False, RESIDENT, CAPACITY)
        if top_p < 1.0:
            ties = left - _above(inside_ptr, held, key_lo, found, top, False, RESIDENT, CAPACITY)
            above = _above(inside_ptr, held, key_lo, found, top, True, RESIDENT, CAPACITY)
            total = (base + above + ties * _mass(_value(key_lo), top)).to(tl.float32) * 2.0**-44
    if top_p < 1.0:
        limit = (top_p * total * 17592186044416.0).to(tl.int64) - base
        key_lo = _smallest_key(inside_ptr, held, found, top, key_lo, key_hi, limit, True, RESIDENT, CAPACITY)
    return _value(key_lo)


@triton.jit
def pivot_kernel(
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    value_ptr,
    lowest_ptr,
    counts_ptr,
    masses_ptr,
    inside_ptr,
    found_ptr,
    pivot_ptr,
    vocab,
    slices,
    SLICES: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Grid (rows): the pivot of each filtered row."""
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    ranked, filtered = is_filtered(row, temperature, top_k_ptr, top_p_ptr, min_p_ptr, vocab)
    if filtered:
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        top_k = tl.where(top_k < vocab, top_k, 0)
        s = tl.arange(0, SLICES)
        top = tl.max(tl.load(value_ptr + row * slices + s, mask=s < slices, other=float("-inf")))
        top = tl.math.div_rn(top, temperature)
        pivot = float("-inf")
        if ranked:
            top, low = _row_extremes(value_ptr, lowest_ptr, row, slices, temperature, SLICES)
            lo, _hi, count_hi, mass_hi, total, _few = _bracket(
                counts_ptr, masses_ptr, row, slices, top, low, top_k, top_p, 2, SLICES
            )
            found = tl.load(found_ptr + row)
            inside_ptr += row.to(tl.int64) * vocab
            if found == 0:
                pivot = lo
            elif found <= CAPACITY:
                pivot = _pivot_inside(inside_ptr, found, top, top_k, top_p, count_hi, mass_hi, total, True, CAPACITY)
            else:
                pivot = _pivot_inside(inside_ptr, found, top, top_k, top_p, count_hi, mass_hi, total, False, CAPACITY)
        if min_p > 0.0:
            pivot = tl.maximum(pivot, top + log(min_p))
        tl.store(pivot_ptr + row, pivot)
