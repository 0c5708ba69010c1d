"""Triton kernel that finds the pivot among the values copied out of a row's last bracket (see `filter_kernels`).

It searches over keys, integers in the order of the values, eight at a time. Sums over the copy are integers (2**44 for
the mass of the most likely token), so that its order does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparkinfer_kernels.sampler.filter_kernels import add8, sum8
from sparkinfer_kernels.sampler.kernels import is_filtered
from sparkinfer_kernels.sampler.noise_kernel import log


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
def _sums_above(x, live, top, key0, step, last, MASS: tl.constexpr):
    """Counts (or masses) of eight sets: values x with keys above key0 + i * step (or above `last`), i = 0 to 7."""
    key = tl.where(live, _key(x), -2147483648)
    weight = 1
    if MASS:
        weight = _mass(x, top)
    return sum8(
        tl.where(key > tl.minimum(key0, last).to(tl.int32), weight, 0),
        tl.where(key > tl.minimum(key0 + step, last).to(tl.int32), weight, 0),
        tl.where(key > tl.minimum(key0 + 2 * step, last).to(tl.int32), weight, 0),
        tl.where(key > tl.minimum(key0 + 3 * step, last).to(tl.int32), weight, 0),
        tl.where(key > tl.minimum(key0 + 4 * step, last).to(tl.int32), weight, 0),
        tl.where(key > tl.minimum(key0 + 5 * step, last).to(tl.int32), weight, 0),
        tl.where(key > tl.minimum(key0 + 6 * step, last).to(tl.int32), weight, 0),
        tl.where(key > tl.minimum(key0 + 7 * step, last).to(tl.int32), weight, 0),
    )


@triton.jit
def _above(
    inside_ptr, held, key0, step, last, found, top, MASS: tl.constexpr, RESIDENT: tl.constexpr, CAPACITY: tl.constexpr
):
    """`_sums_above` of all collected values."""
    i = tl.arange(0, CAPACITY)
    if RESIDENT:
        return _sums_above(held, i < found, top, key0, step, last, MASS)
    s0, s1, s2, s3, s4, s5, s6, s7 = _sums_above(held, i < found, top, key0, step, last, MASS)
    for begin in range(CAPACITY, found, CAPACITY):
        x = tl.load(inside_ptr + begin + i, mask=begin + i < found, other=float("-inf"))
        t0, t1, t2, t3, t4, t5, t6, t7 = _sums_above(x, begin + i < found, top, key0, step, last, MASS)
        s0, s1, s2, s3, s4, s5, s6, s7 = add8(
            s0, s1, s2, s3, s4, s5, s6, s7, t0, t1, t2, t3, t4, t5, t6, t7
        )  # fmt: skip
    return s0, s1, s2, s3, s4, s5, s6, s7


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
        # Eight keys from lo on; those beyond hi count as hi: sums fall from one to the next.
        step = (hi - lo + 7) // 8
        s0, s1, s2, s3, s4, s5, s6, s7 = _above(inside_ptr, held, lo, step, hi, found, top, MASS, RESIDENT, CAPACITY)
        short = (s0 >= limit).to(tl.int64) + (s1 >= limit).to(tl.int64) + (s2 >= limit).to(tl.int64)
        short += (s3 >= limit).to(tl.int64) + (s4 >= limit).to(tl.int64) + (s5 >= limit).to(tl.int64)
        short += (s6 >= limit).to(tl.int64) + (s7 >= limit).to(tl.int64)
        hi = tl.where(short < 8, tl.minimum(hi, lo + short * step), hi)
        lo = tl.where(short > 0, lo + (short - 1) * step + 1, lo)
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
            key = key_lo.to(tl.int64)
            ties = left - _above(inside_ptr, held, key, 0, key, found, top, False, RESIDENT, CAPACITY)[0]
            above = _above(inside_ptr, held, key, 0, key, found, top, True, RESIDENT, CAPACITY)[0]
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
    bracket_ptr,
    above_ptr,
    inside_ptr,
    found_ptr,
    pivot_ptr,
    vocab,
    CAPACITY: tl.constexpr,
):
    """Grid (rows): the pivot of each filtered row."""
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    ranked, filtered = is_filtered(row, temperature, top_k_ptr, top_p_ptr, min_p_ptr, vocab)
    if filtered:
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        top_k = tl.where(top_k < vocab, top_k, 0)
        bracket_ptr += 8 * row
        top = tl.load(bracket_ptr + 4)
        pivot = float("-inf")
        if ranked:
            mass_hi, total = tl.load(bracket_ptr + 2), tl.load(bracket_ptr + 3)
            count_hi = tl.load(above_ptr + 2 * row)
            found = tl.load(found_ptr + row)
            inside_ptr += row.to(tl.int64) * vocab
            if found == 0:
                pivot = tl.load(bracket_ptr)
            elif found <= CAPACITY:
                pivot = _pivot_inside(inside_ptr, found, top, top_k, top_p, count_hi, mass_hi, total, True, CAPACITY)
            else:
                pivot = _pivot_inside(inside_ptr, found, top, top_k, top_p, count_hi, mass_hi, total, False, CAPACITY)
        if min_p > 0.0:
            pivot = tl.maximum(pivot, top + log(min_p))
        tl.store(pivot_ptr + row, pivot)
