"""Triton kernels of log-probabilities: the normaliser, the chosen token's rank and the most likely tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from sparkinfer_kernels.sampler.kernels import best, load_slice
from sparkinfer_kernels.sampler.noise_kernel import log


@triton.jit
def logprob_slice_kernel(
    logits_ptr,
    tokens_ptr,
    top_ptr,
    sum_ptr,
    greater_ptr,
    values_ptr,
    ids_ptr,
    stride,
    vocab,
    slices,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows, slices): a slice's maximum, sum of exponentials, tokens above the chosen one, COUNT largest."""
    row, part = tl.program_id(0), tl.program_id(1)
    x, token = load_slice(logits_ptr, row, stride, vocab, BLOCK)
    chosen = tl.load(logits_ptr + row.to(tl.int64) * stride + tl.load(tokens_ptr + row)).to(tl.float32)
    place = row * slices + part
    top = tl.max(x)
    tl.store(top_ptr + place, top)
    tl.store(sum_ptr + place, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top))))
    tl.store(greater_ptr + place, tl.sum((x > chosen).to(tl.int32)))
    for number in range(COUNT):
        value, winner = best(x, token)
        tl.store(values_ptr + place * COUNT + number, value)
        tl.store(ids_ptr + place * COUNT + number, winner)
        x = tl.where(token == winner, float("-inf"), x)


@triton.jit
def logprob_row_kernel(
    logits_ptr,
    tokens_ptr,
    top_ptr,
    sum_ptr,
    greater_ptr,
    values_ptr,
    ids_ptr,
    chosen_ptr,
    rank_ptr,
    out_ids_ptr,
    out_values_ptr,
    stride,
    slices,
    COUNT: tl.constexpr,
    SLICES: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Grid (rows): a row's slices together."""
    row = tl.program_id(0)
    s = tl.arange(0, SLICES)
    live = s < slices
    tops = tl.load(top_ptr + row * slices + s, mask=live, other=float("-inf"))
    sums = tl.load(sum_ptr + row * slices + s, mask=live, other=0.0)
    top = tl.max(tops)
    normaliser = top + log(tl.sum(sums * tl.exp(tops - top)))
    chosen = tl.load(logits_ptr + row.to(tl.int64) * stride + tl.load(tokens_ptr + row)).to(tl.float32)
    tl.store(chosen_ptr + row, chosen - normaliser)
    tl.store(rank_ptr + row, tl.sum(tl.load(greater_ptr + row * slices + s, mask=live, other=0)) + 1)
    if COUNT:
        c = tl.arange(0, CANDIDATES)
        here = c < slices * COUNT
        value = tl.load(values_ptr + row * slices * COUNT + c, mask=here, other=float("-inf"))
        token = tl.load(ids_ptr + row * slices * COUNT + c, mask=here, other=2147483647)
        for number in range(COUNT):
            largest, winner = best(value, token)
            tl.store(out_values_ptr + row * COUNT + number, largest - normaliser)
            tl.store(out_ids_ptr + row * COUNT + number, winner)
            # A slice's entries beyond its own tokens repeat a token at -inf: strike this one out only.
            value = tl.where((token == winner) & (value == largest), float("-inf"), value)
            token = tl.where((token == winner) & (value == float("-inf")), 2147483647, token)
