"""Router, lists of work and the weighted sum of a mixture of experts, in Triton.

A token has SLOTS places: its TOP_K experts and, where the shared expert is stored with them as number E, that one.
Pair t * SLOTS + j stands for token t at its j-th expert. Weights: shares [T, TOP_K + 1] fp32, the last the shared
expert's. Experts of equal logits are taken in the order of their numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparkinfer_kernels.programmatic import wait_for_previous


@triton.jit
def finite(logits):
    """Zero where a logit is no number: padding rows hold anything, and their choice must stay within the experts, since
    the pairs of all rows lie side by side."""
    return tl.where(tl.abs(logits) < float("inf"), logits, 0.0)


@triton.jit
def _choose(
    logits,
    gate,
    token,
    T,
    shares_ptr,
    E: tl.constexpr,
    EP: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """The TOP_K largest of logits [B, EP] (minus infinity beyond E); their shares and the shared expert's are stored.

    Returns slot [B, EP] int32: at which place a token has an expert, TOP_K where it has not.
    """
    column = tl.arange(0, EP)[None, :]
    inside = token < T
    best = tl.max(logits, 1)
    left = logits
    slot = tl.full(logits.shape, TOP_K, tl.int32)
    total = tl.zeros_like(best)
    for j in tl.static_range(TOP_K):
        index = tl.argmax(left, 1, tie_break_left=True)
        picked = column == index[:, None]
        total += tl.sum(tl.where(picked, tl.exp(logits - best[:, None]), 0.0), 1)
        left = tl.where(picked, float("-inf"), left)
        slot = tl.where(picked, j, slot)
    place = shares_ptr + token[:, None] * (TOP_K + 1) + slot
    mask = (slot < TOP_K) & (column < E) & inside[:, None]
    tl.store(place, tl.exp(logits - best[:, None]) / total[:, None], mask=mask)
    tl.store(shares_ptr + token * (TOP_K + 1) + TOP_K, 1.0 / (1.0 + tl.exp(-gate)), mask=inside)
    return tl.where(mask, slot, TOP_K)


@triton.jit
def _lists(
    slot,
    token,
    T,
    item_expert_ptr,
    item_pairs_ptr,
    item_rows_ptr,
    position_ptr,
    count_ptr,
    E: tl.constexpr,
    EP: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BT: tl.constexpr,
    BM: tl.constexpr,
    MAX_ITEMS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):
    """Items (expert, up to BM of its pairs) in the order of the experts, pairs in the order of the tokens.

    BY_TOKEN (T <= BM): an item's column is the token, -1 where that has not chosen the expert. Otherwise pairs come
    first and -1 behind them; item_rows counts them (0 beyond the items), position says where a pair is.
    """
    expert = tl.arange(0, EP)
    member = (slot < TOP_K).to(tl.int32)
    sizes = tl.sum(member, 0)
    items = (sizes + BM - 1) // BM
    if BY_TOKEN:
        items = (sizes > 0).to(tl.int32)
    first = tl.cumsum(items, 0) - items
    count = tl.sum(items, 0)
    pair = token[:, None] * SLOTS + slot
    if BY_TOKEN:
        place = first[None, :] * BM + token[:, None]
        used = (items > 0)[None, :] & (token < BM)[:, None]
        tl.store(item_pairs_ptr + place, tl.where(member > 0, pair, -1), mask=used)
    else:
        rank = tl.cumsum(member, 0) - member
        place = first[None, :] * BM + rank
        tl.store(item_pairs_ptr + place, pair, mask=member > 0)
        tl.store(position_ptr + pair, place, mask=member > 0)
    column = tl.arange(0, BM)
    for chunk in tl.static_range(0, BT, BM):
        there = items > chunk // BM
        tl.store(item_expert_ptr + first + chunk // BM, expert, mask=there)
        if not BY_TOKEN:
            tl.store(item_rows_ptr + first + chunk // BM, tl.minimum(sizes - chunk, BM), mask=there)
            beyond = chunk + column[None, :] >= sizes[:, None]
            place = (first + chunk // BM)[:, None] * BM + column[None, :]
            tl.store(item_pairs_ptr + place, tl.full((EP, BM), -1, tl.int32), mask=there[:, None] & beyond)
    if SLOTS > TOP_K:
        for chunk in tl.static_range(0, BT, BM):
            if chunk < T:
                own = chunk + column
                tl.store(item_expert_ptr + count, E)
                tl.store(item_pairs_ptr + count * BM + column, tl.where(own < T, own * SLOTS + TOP_K, -1))
                if not BY_TOKEN:
                    tl.store(item_rows_ptr + count, tl.minimum(T - chunk, BM))
                    tl.store(position_ptr + own * SLOTS + TOP_K, count * BM + column, mask=own < T)
                count += 1
    tl.store(count_ptr, count)
    if not BY_TOKEN:
        item = tl.arange(0, MAX_ITEMS)
        tl.store(item_rows_ptr + item, tl.zeros((MAX_ITEMS,), tl.int32), mask=item >= count)


@triton.jit
def route_few_kernel(
    x_ptr,
    x_stride,
    router_ptr,
    partials_ptr,
    counter_ptr,
    shares_ptr,
    item_expert_ptr,
    item_pairs_ptr,
    item_rows_ptr,
    position_ptr,
    count_ptr,
    T,
    H,
    E: tl.constexpr,
    EP: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BT: tl.constexpr,
    BM: tl.constexpr,
    MAX_ITEMS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Router of at most BT tokens: every program ROWS logits over a part of K; the last to finish chooses and lists.

    partials: [SPLIT, BT, EP + ROWS] fp32, column E is the shared expert's gate.
    """
    wait_for_previous(PDL)
    width: tl.constexpr = EP + ROWS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, BT)
    part = tl.program_id(1)
    acc = tl.zeros((BT, ROWS), tl.float32)
    for k in range(part * BK, H, SPLIT * BK):
        column = k + tl.arange(0, BK)
        x = tl.load(
            x_ptr + token[:, None] * x_stride + column[None, :],
            mask=(token < T)[:, None] & (column < H)[None, :],
            other=0.0,
        )
        w = tl.load(
            router_ptr + row[None, :] * H + column[:, None], mask=(row <= E)[None, :] & (column < H)[:, None], other=0.0
        )
        acc = tl.dot(x, w, acc)
    place = partials_ptr + (part * BT + token[:, None]) * width + row[None, :]
    tl.store(place, acc, mask=(row <= E)[None, :])
    tl.debug_barrier()
    done = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    if done == tl.num_programs(0) * SPLIT - 1:
        tl.store(counter_ptr, 0)
        column = tl.arange(0, EP)
        logits = tl.zeros((BT, EP), tl.float32)
        gate = tl.zeros((BT,), tl.float32)
        for other in tl.static_range(SPLIT):
            line = partials_ptr + (other * BT + token) * width
            logits += tl.load(
                line[:, None] + column[None, :], mask=(column < E)[None, :], other=0.0, cache_modifier=".cg"
            )
            gate += tl.load(line + E, cache_modifier=".cg")
        logits = tl.where((column < E)[None, :], finite(logits), float("-inf"))
        slot = _choose(logits, gate, token, T, shares_ptr, E, EP, TOP_K)
        _lists(
            slot, token, T, item_expert_ptr, item_pairs_ptr, item_rows_ptr, position_ptr, count_ptr,
            E, EP, TOP_K, SLOTS, BT, BM, MAX_ITEMS, BY_TOKEN,
        )  # fmt: skip


@triton.jit
def combine_kernel(
    y_ptr,
    position_ptr,
    shares_ptr,
    extra_ptr,
    out_ptr,
    H,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t] = sum over j, in order, of share * y of the pair; plus the shared expert's rows where they are apart."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(SLOTS):
        row = token * SLOTS + j
        if position_ptr is not None:
            row = tl.load(position_ptr + row).to(tl.int64)
        share = tl.load(shares_ptr + token * (TOP_K + 1) + j)
        total += share * tl.load(y_ptr + row * H + column, mask=inside, other=0.0).to(tl.float32)
    if extra_ptr is not None:
        share = tl.load(shares_ptr + token * (TOP_K + 1) + TOP_K)
        total += share * tl.load(extra_ptr + token * H + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * H + column, total.to(tl.bfloat16), mask=inside)
