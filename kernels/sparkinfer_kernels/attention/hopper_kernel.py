"""Gluon kernel of causal prefill attention for Hopper, after FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608).

The same tiles and work list as `prefill_kernel`. What Triton does not do by itself: the scores of the next keys are
started before weights times values of these, which is left running under the next softmax, so that the matrix units and
the others work at the same time. Keys and values have two buffers each.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

WARPS = 8


@gluon.jit
def _places(table_ptr, at, t, end, head, HKV: gl.constexpr, D: gl.constexpr, WIDE: gl.constexpr):
    """Offsets of the keys of tokens `at` + t in the cache, 0 beyond `end`."""
    block = gl.load(table_ptr + (at + t) // 16, mask=at + t < end, other=0)
    if WIDE:
        block = block.to(gl.int64)
    return ((block * 16 + t % 16) * HKV + head) * D


@gluon.jit
def _fetch(buffer, cache_ptr, place, at, t, c, end):
    mask = (at + t < end)[:, None] & (c >= 0)[None, :]
    async_copy.async_copy_global_to_shared(buffer, cache_ptr + place[:, None] + c[None, :], mask=mask)


@gluon.jit
def _softmax(s, top, total, position, tokens, end, scale_log2, MASK: gl.constexpr, WEIGHTS: gl.constexpr):
    """(weights bf16, decay of what came before, new maximum, new sum) of scores s of `tokens`."""
    s = s * scale_log2
    if MASK:
        # Rows beyond the tile's end see everything, which harms nobody.
        seen = (tokens[None, :] <= position[:, None]) & (tokens < end)[None, :]
        s = gl.where(seen, s, float("-inf"))
    higher = gl.maximum(top, gl.max(s, axis=1))
    shift = higher
    if MASK:
        # A row that has seen nothing yet.
        shift = gl.where(higher == float("-inf"), 0.0, higher)
    p = gl.exp2(s - shift[:, None])
    decay = gl.exp2(top - shift)
    total = total * decay + gl.sum(p, axis=1)
    return gl.convert_layout(p.to(gl.bfloat16), WEIGHTS), decay, higher, total


@gluon.jit
def _step(
    q_s, k_s, v_s, turn, weights, acc, top, total, k_cache_ptr, v_cache_ptr, table_ptr, next_one, after,
    at, t, c, column, position, end, head, scale_log2, zeros,
    HKV: gl.constexpr, D: gl.constexpr, N: gl.constexpr, WIDE: gl.constexpr, MASK: gl.constexpr,
    OUT: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Weights times values of the tile `at`, and the weights of the next one."""
    # Keys of the next tile and values of this one have come; all threads are done with what is fetched over.
    async_copy.wait_group(0)  # and a barrier
    fence_async_shared()
    s = warpgroup_mma(q_s, k_s.index(1 - turn).permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc = warpgroup_mma(weights, v_s.index(turn), acc, is_async=True)
    _fetch(k_s.index(turn), k_cache_ptr, after, at + 2 * N, t, c, end)
    _fetch(v_s.index(1 - turn), v_cache_ptr, next_one, at + N, t, c, end)
    async_copy.commit_group()
    later = _places(table_ptr, at + 3 * N, t, end, head, HKV, D, WIDE)
    s = warpgroup_mma_wait(1, [s])
    weights, decay, top, total = _softmax(
        s, top, total, position, at + N + column, end, scale_log2, MASK, WEIGHTS
    )  # fmt: skip
    acc = warpgroup_mma_wait(0, [acc])
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, OUT))[:, None]
    return 1 - turn, weights, acc, top, total, after, later


@gluon.jit
def attention_hopper_kernel(
    q_ptr,
    gate_ptr,
    k_cache_ptr,
    v_cache_ptr,
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
    HQ: gl.constexpr,
    HKV: gl.constexpr,
    D: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    WIDE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid (Hkv, items); D is 256, M 128, N 64. As `attention_prefill_kernel` with SPANS and a bf16 cache."""
    GROUP: gl.constexpr = HQ // HKV
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head = gl.program_id(0)
    item = gl.program_id(1)
    sequence = gl.load(items_ptr + 4 * item)
    if sequence >= 0:
        within = gl.load(items_ptr + 4 * item + 1) * M
        begin = gl.load(items_ptr + 4 * item + 2)
        end = gl.load(items_ptr + 4 * item + 3)
        first = gl.load(cu_seqlens_ptr + sequence)
        length = gl.load(cu_seqlens_ptr + sequence + 1) - first
        start = gl.load(starts_ptr + sequence)
        table_ptr += sequence.to(gl.int64) * table_stride
        context = start + gl.minimum((within + M - 1) // GROUP + 1, length)
        free = start + within // GROUP
        c = gl.arange(0, D, gl.SliceLayout(0, COPY))
        t = gl.arange(0, N, gl.SliceLayout(1, COPY))
        row = within + gl.arange(0, M, gl.SliceLayout(1, COPY))
        live = row < length * GROUP
        place = ((first + row // GROUP).to(gl.int64) * HQ + head * GROUP + row % GROUP) * D

        q_s = gl.allocate_shared_memory(gl.bfloat16, [M, D], TILE)
        k_s = gl.allocate_shared_memory(gl.bfloat16, [2, N, D], TILE)
        v_s = gl.allocate_shared_memory(gl.bfloat16, [2, N, D], TILE)
        mask = live[:, None] & (c >= 0)[None, :]
        async_copy.async_copy_global_to_shared(q_s, q_ptr + place[:, None] + c[None, :], mask=mask)
        here = _places(table_ptr, begin, t, end, head, HKV, D, WIDE)
        _fetch(k_s.index(0), k_cache_ptr, here, begin, t, c, end)
        async_copy.commit_group()
        next_one = _places(table_ptr, begin + N, t, end, head, HKV, D, WIDE)
        _fetch(k_s.index(1), k_cache_ptr, next_one, begin + N, t, c, end)
        _fetch(v_s.index(0), v_cache_ptr, here, begin, t, c, end)
        async_copy.commit_group()
        after = _places(table_ptr, begin + 2 * N, t, end, head, HKV, D, WIDE)

        position = start + (within + gl.arange(0, M, gl.SliceLayout(1, SCORES))) // GROUP
        column = gl.arange(0, N, gl.SliceLayout(0, SCORES))
        zeros = gl.full([M, N], 0.0, gl.float32, SCORES)
        top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.full([M], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.full([M, D], 0.0, gl.float32, OUT)
        async_copy.wait_group(1)
        fence_async_shared()
        s = warpgroup_mma(q_s, k_s.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        weights, _decay, top, total = _softmax(
            s, top, total, position, begin + column, end, scale_log2, True, WEIGHTS
        )  # fmt: skip
        turn = 0
        # Tiles before `free` + 1 are seen by all rows.
        masked = begin + gl.maximum((gl.minimum(free + 1, end) - begin) // N - 1, 0) * N
        for at in range(begin, masked, N):
            turn, weights, acc, top, total, next_one, after = _step(
                q_s, k_s, v_s, turn, weights, acc, top, total, k_cache_ptr, v_cache_ptr, table_ptr, next_one, after,
                at, t, c, column, position, end, head, scale_log2, zeros, HKV, D, N, WIDE, False, OUT, WEIGHTS,
            )  # fmt: skip
        for at in range(masked, end - N, N):
            turn, weights, acc, top, total, next_one, after = _step(
                q_s, k_s, v_s, turn, weights, acc, top, total, k_cache_ptr, v_cache_ptr, table_ptr, next_one, after,
                at, t, c, column, position, end, head, scale_log2, zeros, HKV, D, N, WIDE, True, OUT, WEIGHTS,
            )  # fmt: skip
        async_copy.wait_group(0)
        fence_async_shared()
        acc = warpgroup_mma(weights, v_s.index(turn), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        divisor = gl.where(total > 0, total, 1.0)
        value = acc / gl.convert_layout(divisor, gl.SliceLayout(1, OUT))[:, None]
        value = gl.convert_layout(value, COPY)
        if (begin == 0) & (end == context):
            at_gate = (first + row // GROUP).to(gl.int64) * gate_stride + (head * GROUP + row % GROUP) * D
            gate = gl.load(gate_ptr + at_gate[:, None] + c[None, :], mask=mask, other=0.0).to(gl.float32)
            value = value / (1.0 + gl.exp2(gate * -1.4426950408889634))
            gl.store(out_ptr + place[:, None] + c[None, :], value.to(gl.bfloat16), mask=mask)
        else:
            base = (item * HKV + head) * M
            inside = base + gl.arange(0, M, gl.SliceLayout(1, COPY))
            gl.store(partial_ptr + inside[:, None] * D + c[None, :], value, mask=mask)
            scores_row = gl.arange(0, M, gl.SliceLayout(1, SCORES))
            lse = top + gl.log2(total)
            gl.store(lse_ptr + base + scores_row, lse, mask=within + scores_row < length * GROUP)
