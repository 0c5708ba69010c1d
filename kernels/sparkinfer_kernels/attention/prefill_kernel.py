"""Triton kernel of causal prefill attention (FlashAttention-2: Dao 2023, arXiv 2307.08691) over a paged cache.

A program computes one tile: M rows of the query heads of one key head, several tokens of one sequence, against
everything before them or a part of it, cached prefix and new tokens alike, read through the block table. Partial
results are put together by a second kernel, in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparkinfer_kernels.programmatic import wait_for_previous


@triton.jit
def _attend(
    q,
    acc,
    top,
    total,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    begin,
    end,
    context,
    position,
    head,
    scale_log2,
    HKV: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    FP8: tl.constexpr,
    WIDE: tl.constexpr,
    MASK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over the tokens [begin, end) of the context; MASK where causality or the context's end matters."""
    t = tl.arange(0, N)
    c = tl.arange(0, D)
    block = tl.load(table_ptr + (begin + t) // 16, mask=begin + t < context, other=0)
    for at in tl.range(begin, end, N, num_stages=STAGES):
        if WIDE:
            block = block.to(tl.int64)
        place = ((block * 16 + t % 16) * HKV + head) * D
        if MASK:
            seen = at + t < context
            k = tl.load(k_cache_ptr + place[:, None] + c[None, :], mask=seen[:, None], other=0.0)
            v = tl.load(v_cache_ptr + place[:, None] + c[None, :], mask=seen[:, None], other=0.0)
        else:
            k = tl.load(k_cache_ptr + place[:, None] + c[None, :])
            v = tl.load(v_cache_ptr + place[:, None] + c[None, :])
        block = tl.load(table_ptr + (at + N + t) // 16, mask=at + N + t < context, other=0)
        if FP8:
            # Every e4m3 value is exact in fp16, and the hardware converts to nothing else.
            k = k.to(tl.float16)
            v = v.to(tl.float16)
        s = tl.dot(q, tl.trans(k))
        if MASK:
            s = tl.where((at + t)[None, :] <= position[:, None], s * scale_log2, float("-inf"))
            higher = tl.maximum(top, tl.max(s, axis=1))
            # A row may have seen nothing yet where its context is cut.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(s - shift[:, None])
            decay = tl.exp2(top - shift)
        else:
            higher = tl.maximum(top, tl.max(s, axis=1) * scale_log2)
            p = tl.exp2(s * scale_log2 - higher[:, None])
            decay = tl.exp2(top - higher)
        total = total * decay + tl.sum(p, axis=1)
        acc = acc * decay[:, None]
        acc = tl.dot(p.to(q.dtype), v, acc)
        top = higher
    return acc, top, total


@triton.jit
def attention_prefill_kernel(
    q_ptr,
    gate_ptr,
    k_cache_ptr,
    v_cache_ptr,
    scales_ptr,
    table_ptr,
    cu_seqlens_ptr,
    starts_ptr,
    items_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    gate_stride,
    table_stride,
    scale_log2,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    FP8: tl.constexpr,
    WIDE: tl.constexpr,
    SPANS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (Hkv, items). SPANS: items may be parts of a tile's context."""
    GROUP: tl.constexpr = HQ // HKV
    wait_for_previous(PDL)
    head = tl.program_id(0)
    item = tl.program_id(1)
    sequence = tl.load(items_ptr + 4 * item)
    if sequence >= 0:
        within = tl.load(items_ptr + 4 * item + 1) * M
        first = tl.load(cu_seqlens_ptr + sequence)
        length = tl.load(cu_seqlens_ptr + sequence + 1) - first
        start = tl.load(starts_ptr + sequence)
        table_ptr += sequence.to(tl.int64) * table_stride
        row = within + tl.arange(0, M)
        c = tl.arange(0, D)
        live = row < length * GROUP
        place = ((first + row // GROUP).to(tl.int64) * HQ + head * GROUP + row % GROUP) * D
        q = tl.load(q_ptr + place[:, None] + c[None, :], mask=live[:, None], other=0.0)
        if FP8:
            q = q.to(tl.float16)
            scale_log2 *= tl.load(scales_ptr + head)
        position = start + row // GROUP
        context = start + tl.minimum((within + M - 1) // GROUP + 1, length)
        begin = 0
        end = context
        if SPANS:
            begin = tl.load(items_ptr + 4 * item + 2)
            end = tl.load(items_ptr + 4 * item + 3)
        # Tokens before the tile's first one are seen by all its rows.
        free = tl.minimum(tl.maximum((start + within // GROUP) // N * N, begin), end)
        top = tl.full([M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([M], dtype=tl.float32)
        acc = tl.zeros([M, D], dtype=tl.float32)
        acc, top, total = _attend(
            q, acc, top, total, k_cache_ptr, v_cache_ptr, table_ptr, begin, free, context, position, head, scale_log2,
            HKV, D, N, FP8, WIDE, False, STAGES,
        )  # fmt: skip
        acc, top, total = _attend(
            q, acc, top, total, k_cache_ptr, v_cache_ptr, table_ptr, free, end, context, position, head, scale_log2,
            HKV, D, N, FP8, WIDE, True, STAGES,
        )  # fmt: skip
        value = acc / tl.where(total > 0, total, 1.0)[:, None]
        if FP8:
            value *= tl.load(scales_ptr + HKV + head)
        whole = True
        if SPANS:
            whole = (begin == 0) & (end == context)
        if whole:
            at = (first + row // GROUP).to(tl.int64) * gate_stride + (head * GROUP + row % GROUP) * D
            gate = tl.load(gate_ptr + at[:, None] + c[None, :], mask=live[:, None], other=0.0)
            value *= tl.sigmoid(gate.to(tl.float32))
            tl.store(out_ptr + place[:, None] + c[None, :], value.to(out_ptr.dtype.element_ty), mask=live[:, None])
        else:
            base = (item * HKV + head) * M + tl.arange(0, M)
            tl.store(partial_ptr + base[:, None] * D + c[None, :], value, mask=live[:, None])
            tl.store(lse_ptr + base, top + tl.log2(total), mask=live)


@triton.jit
def combine_spans_kernel(
    gate_ptr,
    spans_ptr,
    cu_seqlens_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    gate_stride,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (Hkv * M / ROWS, tiles): weighted sum of the parts of ROWS rows of a tile, in order, PARTS at a time."""
    GROUP: tl.constexpr = HQ // HKV
    wait_for_previous(PDL)
    head = tl.program_id(0) // (M // ROWS)
    tile = tl.program_id(1)
    pieces = tl.load(spans_ptr + 4 * tile + 3)
    sequence = tl.load(spans_ptr + 4 * tile)
    if (sequence >= 0) & (pieces > 1):
        item = tl.load(spans_ptr + 4 * tile + 2)
        first = tl.load(cu_seqlens_ptr + sequence)
        length = tl.load(cu_seqlens_ptr + sequence + 1) - first
        inside = (tl.program_id(0) % (M // ROWS)) * ROWS + tl.arange(0, ROWS)
        row = tl.load(spans_ptr + 4 * tile + 1) * M + inside
        live = row < length * GROUP
        c = tl.arange(0, D)
        top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        acc = tl.zeros([ROWS, D], dtype=tl.float32)
        for at in range(0, pieces, PARTS):
            part = at + tl.arange(0, PARTS)
            base = ((item + part) * HKV + head)[:, None] * M + inside[None, :]
            # Rows beyond the tile's end were not written.
            used = (part < pieces)[:, None] & live[None, :]
            lse = tl.load(lse_ptr + base, mask=used, other=float("-inf"))
            value = tl.load(partial_ptr + base[:, :, None] * D + c[None, None, :], mask=used[:, :, None], other=0.0)
            higher = tl.maximum(top, tl.max(lse, axis=0))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            decay, weight = tl.exp2(top - shift), tl.exp2(lse - shift[None, :])
            total = total * decay + tl.sum(weight, axis=0)
            acc = acc * decay[:, None] + tl.sum(value * weight[:, :, None], axis=0)
            top = higher
        token = (first + row // GROUP).to(tl.int64)
        column = (head * GROUP + row % GROUP) * D
        gate = tl.load(gate_ptr + (token * gate_stride + column)[:, None] + c[None, :], mask=live[:, None], other=0.0)
        value = acc / tl.where(total > 0, total, 1.0)[:, None] * tl.sigmoid(gate.to(tl.float32))
        place = (token * (HQ * D) + column)[:, None] + c[None, :]
        tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit
def gate_kernel(
    x_ptr, gate_ptr, out_ptr, head_stride, token_stride, gate_stride, HQ: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Grid (tokens): out = x * sigmoid(gate) for all heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)
    c = tl.arange(0, D)
    live = (h < HQ)[:, None]
    x = tl.load(x_ptr + token * token_stride + h[:, None] * head_stride + c[None, :], mask=live, other=0.0)
    place = h[:, None] * D + c[None, :]
    gate = tl.load(gate_ptr + token * gate_stride + place, mask=live, other=0.0).to(tl.float32)
    value = x.to(tl.float32) * tl.sigmoid(gate)
    tl.store(out_ptr + token * (HQ * D) + place, value.to(out_ptr.dtype.element_ty), mask=live)
