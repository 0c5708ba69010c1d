"""Triton kernel of causal prefill attention (FlashAttention-2: Dao 2023, arXiv 2307.08691) over a paged cache.

A program computes one tile of one query head: M query tokens of one sequence against everything before them, cached
prefix and new tokens alike, read through the block table.
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
            p = tl.exp2(s - higher[:, None])
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
    table_ptr,
    scales_ptr,
    cu_seqlens_ptr,
    starts_ptr,
    tiles_ptr,
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
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (Hq, tiles): the query heads of a key head run side by side and share its keys in the second-level cache."""
    wait_for_previous(PDL)
    head = tl.program_id(0)
    tile = tl.program_id(1)
    sequence = tl.load(tiles_ptr + 2 * tile)
    if sequence >= 0:
        within = tl.load(tiles_ptr + 2 * tile + 1) * M
        first = tl.load(cu_seqlens_ptr + sequence)
        length = tl.load(cu_seqlens_ptr + sequence + 1) - first
        start = tl.load(starts_ptr + sequence)
        table_ptr += sequence.to(tl.int64) * table_stride
        kv_head = head // (HQ // HKV)
        m = tl.arange(0, M)
        c = tl.arange(0, D)
        live = within + m < length
        token = (first + within + m).to(tl.int64)
        q = tl.load(q_ptr + (token * HQ + head)[:, None] * D + c[None, :], mask=live[:, None], other=0.0)
        if FP8:
            q = q.to(tl.float16)
            scale_log2 *= tl.load(scales_ptr + kv_head)
        position = start + within + m
        context = start + tl.minimum(within + M, length)
        # Tokens before the tile's first one are seen by all its rows.
        free = (start + within) // N * N
        top = tl.full([M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([M], dtype=tl.float32)
        acc = tl.zeros([M, D], dtype=tl.float32)
        acc, top, total = _attend(
            q, acc, top, total, k_cache_ptr, v_cache_ptr, table_ptr, 0, free, context, position, kv_head, scale_log2,
            HKV, D, N, FP8, WIDE, False, STAGES,
        )  # fmt: skip
        acc, top, total = _attend(
            q, acc, top, total, k_cache_ptr, v_cache_ptr, table_ptr, free, context, context, position, kv_head,
            scale_log2, HKV, D, N, FP8, WIDE, True, STAGES,
        )  # fmt: skip
        value = acc / total[:, None]
        if FP8:
            value *= tl.load(scales_ptr + HKV + kv_head)
        gate = tl.load(gate_ptr + (token * gate_stride + head * D)[:, None] + c[None, :], mask=live[:, None], other=0.0)
        value *= tl.sigmoid(gate.to(tl.float32))
        tl.store(
            out_ptr + (token * HQ + head)[:, None] * D + c[None, :],
            value.to(out_ptr.dtype.element_ty),
            mask=live[:, None],
        )


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
