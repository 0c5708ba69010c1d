"""Triton kernels of sampling without a sort. A program reads one slice of one row once, SUB logits at a time.

`first_kernel` serves greedy rows and rows with a temperature only, and finds the extremes of the others; the kernels of
`filter_kernels.py` find a filtered row's pivot; `draw_kernel` draws among what passes; `pick_kernel` takes the best
slice. Equal values: the lowest token wins.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparkinfer_kernels.sampler.noise_kernel import gumbel_noise


@triton.jit
def best(value, token):
    """(largest value, the lowest token that has it)."""
    top = tl.max(value, axis=0)
    return top, tl.min(tl.where(value == top, token, 2147483647), axis=0)


@triton.jit
def is_filtered(row, temperature, top_k_ptr, top_p_ptr, min_p_ptr, vocab):
    """(by rank or mass, by anything) for a row."""
    top_k = tl.load(top_k_ptr + row)
    ranked = ((top_k > 0) & (top_k < vocab)) | (tl.load(top_p_ptr + row) < 1.0)
    ranked = ranked & (temperature > 0.0)
    return ranked, ranked | ((tl.load(min_p_ptr + row) > 0.0) & (temperature > 0.0))


@triton.jit
def load_part(logits_ptr, row, stride, vocab, number, BLOCK: tl.constexpr, SUB: tl.constexpr):
    """As `load_slice`, the SUB logits number `number` of this program's slice."""
    token = tl.program_id(1) * BLOCK + number * SUB + tl.arange(0, SUB)
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + token, mask=token < vocab, other=float("-inf"))
    return x.to(tl.float32), token


@triton.jit
def better_of(x, token, best_x, best_token):
    """Element by element the larger value with its token; the earlier one where they are equal."""
    better = (x > best_x) | (best_x != best_x)
    return tl.where(better, x, best_x), tl.where(better, token, best_token)


@triton.jit
def load_slice(logits_ptr, row, stride, vocab, BLOCK: tl.constexpr):
    """(fp32 logits with -inf beyond the vocabulary, their tokens) of this program's slice."""
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + token, mask=token < vocab, other=float("-inf"))
    return x.to(tl.float32), token


@triton.jit
def ban_kernel(logits_ptr, rows_ptr, tokens_ptr, saved_ptr, stride, count, RESTORE: tl.constexpr, BLOCK: tl.constexpr):
    """Put banned entries at -inf and keep what was there, or put it back. Rows of -1 are padding."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + i, mask=i < count, other=-1)
    live = row >= 0
    place = logits_ptr + row.to(tl.int64) * stride + tl.load(tokens_ptr + i, mask=live, other=0)
    if RESTORE:
        old = tl.load(saved_ptr + i, mask=live, other=0.0)
        tl.store(place, old.to(logits_ptr.dtype.element_ty), mask=live)
    else:
        tl.store(saved_ptr + i, tl.load(place, mask=live, other=0.0).to(tl.float32), mask=live)
        tl.store(place, tl.full([BLOCK], float("-inf"), tl.float32).to(logits_ptr.dtype.element_ty), mask=live)


@triton.jit
def first_kernel(
    logits_ptr,
    temperature_ptr,
    keys_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    value_ptr,
    token_ptr,
    lowest_ptr,
    found_ptr,
    stride,
    vocab,
    slices,
    SAMPLE: tl.constexpr,
    FILTER: tl.constexpr,
    BLOCK: tl.constexpr,
    SUB: tl.constexpr,
):
    """Grid (rows, slices). Greedy and filtered rows: largest logit; rows with a temperature only: the draw itself."""
    row, part = tl.program_id(0), tl.program_id(1)
    temperature = 0.0
    ranked, draws = False, False
    key0, key1 = 0, 0
    if SAMPLE:
        temperature = tl.load(temperature_ptr + row)
        draws = temperature > 0.0
        if FILTER:
            ranked, filtered = is_filtered(row, temperature, top_k_ptr, top_p_ptr, min_p_ptr, vocab)
            draws = draws & (filtered == 0)
        key0, key1 = tl.load(keys_ptr + 2 * row), tl.load(keys_ptr + 2 * row + 1)
    best_x = tl.full([SUB], float("-inf"), tl.float32)
    best_token = part * BLOCK + tl.arange(0, SUB)
    lowest = tl.full([SUB], float("inf"), tl.float32)
    for number in range(BLOCK // SUB):
        x, token = load_part(logits_ptr, row, stride, vocab, number, BLOCK, SUB)
        if FILTER:
            lowest = tl.minimum(lowest, tl.where(x == float("-inf"), float("inf"), x))
        if SAMPLE:  # noqa: SIM102 - decided at compile time
            if draws:
                x = tl.math.div_rn(x, temperature) + gumbel_noise(token, key0, key1)
        best_x, best_token = better_of(x, token, best_x, best_token)
    if FILTER:  # noqa: SIM102
        if ranked:
            tl.store(lowest_ptr + row * slices + part, tl.min(lowest))
            if part == 0:
                tl.store(found_ptr + row, 0)
    top, winner = best(best_x, best_token)
    tl.store(value_ptr + row * slices + part, top)
    tl.store(token_ptr + row * slices + part, winner)


@triton.jit
def draw_kernel(
    logits_ptr,
    temperature_ptr,
    keys_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    pivot_ptr,
    value_ptr,
    token_ptr,
    stride,
    vocab,
    slices,
    BLOCK: tl.constexpr,
    SUB: tl.constexpr,
):
    """Grid (rows, slices). Filtered rows: the draw among the tokens at or above the row's pivot."""
    row, part = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    _ranked, filtered = is_filtered(row, temperature, top_k_ptr, top_p_ptr, min_p_ptr, vocab)
    if filtered:
        pivot = tl.load(pivot_ptr + row)
        key0, key1 = tl.load(keys_ptr + 2 * row), tl.load(keys_ptr + 2 * row + 1)
        best_x = tl.full([SUB], float("-inf"), tl.float32)
        best_token = tl.full([SUB], 2147483647, tl.int32)
        for number in range(BLOCK // SUB):
            x, token = load_part(logits_ptr, row, stride, vocab, number, BLOCK, SUB)
            x = tl.math.div_rn(x, temperature)
            passes = (x >= pivot) & (token < vocab)
            if tl.max(passes.to(tl.int32)) > 0:
                x = tl.where(passes, x + gumbel_noise(token, key0, key1), float("-inf"))
                best_x, best_token = better_of(x, token, best_x, best_token)
        top, winner = best(best_x, best_token)
        tl.store(value_ptr + row * slices + part, top)
        tl.store(token_ptr + row * slices + part, winner)


@triton.jit
def pick_kernel(value_ptr, token_ptr, out_ptr, vocab, slices, SLICES: tl.constexpr):
    """Grid (rows): the best of a row's slices. A row without a finite value (NaN logits) takes the last token."""
    row = tl.program_id(0)
    s = tl.arange(0, SLICES)
    value = tl.load(value_ptr + row * slices + s, mask=s < slices, other=float("-inf"))
    token = tl.load(token_ptr + row * slices + s, mask=s < slices, other=2147483647)
    _top, winner = best(value, token)
    tl.store(out_ptr + row, tl.minimum(winner, vocab - 1).to(out_ptr.dtype.element_ty))
