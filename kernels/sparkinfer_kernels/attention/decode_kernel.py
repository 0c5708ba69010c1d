"""Triton kernel of split-KV decode attention (flash-decoding: Dao et al. 2023; online softmax: Milakov and
Gimelshein 2018, arXiv 1805.02867) over a paged cache.

A program attends the query heads of one key head, padded to 16 rows, to one piece of a row's context. A row of one
piece is finished there; the pieces of the others are combined by a second kernel, in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparkinfer_kernels.programmatic import wait_for_previous


@triton.jit
def _finish(
    value,
    gate_ptr,
    out_ptr,
    row,
    gate_stride,
    head,
    HQ: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gate and store the GROUP real rows of a value [ROWS, D]."""
    r = tl.arange(0, ROWS)
    c = tl.arange(0, D)
    place = (head * GROUP + r)[:, None] * D + c[None, :]
    live = (r < GROUP)[:, None]
    gate = tl.load(gate_ptr + row * gate_stride + place, mask=live, other=0.0).to(tl.float32)
    value = value * tl.sigmoid(gate)
    tl.store(out_ptr + row * (HQ * D) + place, value.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def combine_kernel(
    gate_ptr,
    pieces_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    gate_stride,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (Hq, rows): weighted sum of a row's pieces in order, for one query head; nothing to do for one piece."""
    GROUP: tl.constexpr = HQ // HKV
    wait_for_previous(PDL)
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    pieces = tl.load(pieces_ptr + 2 * row + 1)
    if pieces > 1:
        first = tl.load(pieces_ptr + 2 * row)
        p = tl.arange(0, MAX_PIECES)
        c = tl.arange(0, D)
        live = p < pieces
        place = ((first + p) * HKV + head // GROUP) * GROUP + head % GROUP
        part = tl.load(partial_ptr + place[:, None] * D + c[None, :], mask=live[:, None], other=0.0)
        gate = tl.load(gate_ptr + row * gate_stride + head * D + c).to(tl.float32)
        lse = tl.load(lse_ptr + place, mask=live, other=float("-inf"))
        weight = tl.exp2(lse - tl.max(lse))
        value = tl.sum(part * weight[:, None], axis=0) / tl.sum(weight)
        value *= tl.sigmoid(gate)
        tl.store(out_ptr + (row * HQ + head) * D + c, value.to(out_ptr.dtype.element_ty))


@triton.jit
def attention_decode_kernel(
    q_ptr,
    gate_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    scales_ptr,
    items_ptr,
    pieces_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    gate_stride,
    table_stride,
    scale_log2,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    FP8: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (Hkv, items)."""
    GROUP: tl.constexpr = HQ // HKV
    wait_for_previous(PDL)
    head = tl.program_id(0)
    item = tl.program_id(1)
    row = tl.load(items_ptr + 4 * item).to(tl.int64)
    if row >= 0:
        begin = tl.load(items_ptr + 4 * item + 1)
        end = tl.load(items_ptr + 4 * item + 2)
        pieces = tl.load(pieces_ptr + 2 * row + 1)
        r = tl.arange(0, 16)
        c = tl.arange(0, D)
        t = tl.arange(0, TOKENS)
        live = r < GROUP
        q = tl.load(
            q_ptr + row * (HQ * D) + (head * GROUP + r)[:, None] * D + c[None, :], mask=live[:, None], other=0.0
        )
        if FP8:
            q = q.to(tl.float16)
            scale_log2 *= tl.load(scales_ptr + head)
        table_ptr += row * table_stride
        top = tl.full([16], float("-inf"), dtype=tl.float32)
        total = tl.zeros([16], dtype=tl.float32)
        acc = tl.zeros([16, D], dtype=tl.float32)
        block = tl.load(table_ptr + (begin + t) // 16, mask=begin + t < end, other=0)
        for at in tl.range(begin, end, TOKENS, num_stages=STAGES):
            seen = at + t < end
            if WIDE:
                block = block.to(tl.int64)
            place = ((block * 16 + t % 16) * HKV + head) * D
            k = tl.load(k_cache_ptr + place[:, None] + c[None, :], mask=seen[:, None], other=0.0)
            v = tl.load(v_cache_ptr + place[:, None] + c[None, :], mask=seen[:, None], other=0.0)
            block = tl.load(table_ptr + (at + TOKENS + t) // 16, mask=at + TOKENS + t < end, other=0)
            if FP8:
                # Every e4m3 value is exact in fp16, and the hardware converts to nothing else.
                k = k.to(tl.float16)
                v = v.to(tl.float16)
            s = tl.dot(q, tl.trans(k)) * scale_log2
            s = tl.where(seen[None, :], s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, axis=1))
            p = tl.exp2(s - higher[:, None])
            decay = tl.exp2(top - higher)
            total = total * decay + tl.sum(p, axis=1)
            acc = tl.dot(p.to(q.dtype), v, acc * decay[:, None])
            top = higher
        value = acc / total[:, None]
        if FP8:
            value *= tl.load(scales_ptr + HKV + head)
        if pieces == 1:
            _finish(value, gate_ptr, out_ptr, row, gate_stride, head, HQ, D, GROUP, 16)
        else:
            base = (item * HKV + head) * GROUP
            tl.store(partial_ptr + (base + r)[:, None] * D + c[None, :], value, mask=live[:, None])
            tl.store(lse_ptr + base + r, top + tl.log2(total), mask=live)
