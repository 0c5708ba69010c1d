"""Router and list of items for `experts_kernel.py`, in Triton; the same three kernels for any number of tokens.

Places, pairs and shares as in `kernels.py`; experts of equal logits are taken in the order of their numbers. An item is
an expert with up to BM of its pairs; which of them stand where in it is open (ranks come from atomic counters), and no
result depends on it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparkinfer_kernels.moe.kernels import finite
from sparkinfer_kernels.programmatic import wait_for_previous


@triton.jit
def logits_kernel(
    x_ptr,
    x_stride,
    router_ptr,
    partials_ptr,
    counts_ptr,
    T,
    H,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    BT: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of K of ROWS logits of BT tokens: partials [SPLIT, T, WIDTH] fp32, column E the shared expert's gate.

    Also sets the counters of the experts' pairs to zero.
    """
    wait_for_previous(PDL)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    x_row = x_ptr + tl.minimum(token, T - 1).to(tl.int64)[:, None] * x_stride
    acc = tl.zeros((BT, ROWS), tl.float32)
    for k in range(part * BK, H, SPLIT * BK):
        column = k + tl.arange(0, BK)
        x = tl.load(x_row + column[None, :], mask=(column < H)[None, :], other=0.0)
        mask = (row <= E)[None, :] & (column < H)[:, None]
        acc = tl.dot(x, tl.load(router_ptr + row[None, :] * H + column[:, None], mask=mask, other=0.0), acc)
    place = partials_ptr + (part * T + token[:, None]).to(tl.int64) * WIDTH + row[None, :]
    tl.store(place, acc, mask=(token < T)[:, None] & (row <= E)[None, :])
    if (tl.program_id(0) == 0) & (part == 0):
        tl.store(counts_ptr + row, tl.zeros((ROWS,), tl.int32), mask=row <= E)


@triton.jit
def choose_kernel(
    partials_ptr,
    shares_ptr,
    chosen_ptr,
    ranks_ptr,
    counts_ptr,
    T,
    E: tl.constexpr,
    EP: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_KP: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The TOP_K experts of TOKENS tokens, their shares, and each pair's rank among its expert's pairs.

    One warp, so that no reduction crosses warps.
    """
    wait_for_previous(PDL)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < T
    column = tl.arange(0, EP)[None, :]
    left = tl.zeros((TOKENS, EP), tl.float32)
    gate = tl.zeros((TOKENS,), tl.float32)
    for part in tl.static_range(SPLIT):
        line = partials_ptr + (part * T + tl.minimum(token, T - 1)).to(tl.int64) * WIDTH
        left += tl.load(line[:, None] + column, mask=column < E, other=0.0)
        gate += tl.load(line + E)
    left = tl.where(column < E, finite(left), float("-inf"))
    slot = tl.arange(0, TOP_KP)[None, :]
    chosen = tl.zeros((TOKENS, TOP_KP), tl.int32)
    share = tl.zeros((TOKENS, TOP_KP), tl.float32)
    best = tl.max(left, 1)
    for j in tl.static_range(TOP_K):
        value = tl.max(left, 1)
        index = tl.min(tl.where(left == value[:, None], column, EP), 1)
        left = tl.where(column == index[:, None], float("-inf"), left)
        chosen = tl.where(slot == j, index[:, None], chosen)
        share = tl.where(slot == j, tl.exp(value - best)[:, None], share)
    share = share / tl.sum(share, 1)[:, None]
    mask = inside[:, None] & (slot < TOP_K)
    tl.store(shares_ptr + token[:, None] * (TOP_K + 1) + slot, share, mask=mask)
    tl.store(shares_ptr + token * (TOP_K + 1) + TOP_K, 1.0 / (1.0 + tl.exp(-gate)), mask=inside)
    rank = tl.atomic_add(counts_ptr + chosen, tl.full((TOKENS, TOP_KP), 1, tl.int32), mask=mask, sem="relaxed")
    pair = token[:, None] * SLOTS + slot
    tl.store(chosen_ptr + pair, chosen, mask=mask)
    tl.store(ranks_ptr + pair, rank, mask=mask)
    if SLOTS > TOP_K:
        tl.store(chosen_ptr + token * SLOTS + TOP_K, tl.full((TOKENS,), E, tl.int32), mask=inside)
        tl.store(ranks_ptr + token * SLOTS + TOP_K, token, mask=inside)
        if tl.program_id(0) == 0:
            tl.store(counts_ptr + E, T)


@triton.jit
def place_kernel(
    chosen_ptr,
    ranks_ptr,
    counts_ptr,
    pairs_ptr,
    item_expert_ptr,
    items_ptr,
    T,
    E: tl.constexpr,
    E1P: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_P: tl.constexpr,
    BT: tl.constexpr,
    BM: tl.constexpr,
    ITEMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Where the pairs of BT tokens go; whose ITEMS items are, and -1 for their unused places; the number of items."""
    wait_for_previous(PDL)
    program = tl.program_id(0)
    expert = tl.arange(0, E1P)
    size = tl.load(counts_ptr + expert, mask=expert <= E, other=0)
    needed = (size + BM - 1) // BM
    last = tl.cumsum(needed, 0)

    flat = tl.arange(0, BT * SLOTS_P)
    token, slot = program * BT + flat // SLOTS_P, flat % SLOTS_P
    inside = (token < T) & (slot < SLOTS)
    pair = token * SLOTS + slot
    chosen = tl.load(chosen_ptr + pair, mask=inside, other=0)
    at = tl.load(ranks_ptr + pair, mask=inside, other=0)
    at += BM * tl.gather(last - needed, chosen, 0)
    tl.store(pairs_ptr + at, pair, mask=inside)

    item = program * ITEMS + tl.arange(0, ITEMS)
    owner = tl.sum((last[None, :] <= item[:, None]).to(tl.int32), 1)
    first = tl.gather(last - needed, tl.minimum(owner, E), 0)
    there = owner <= E
    rows = tl.load(counts_ptr + owner, mask=there, other=0) - (item - first) * BM
    tl.store(item_expert_ptr + item, owner, mask=there)
    row = tl.arange(0, BM)[None, :]
    unused = there[:, None] & (row >= rows[:, None])
    tl.store(pairs_ptr + item[:, None] * BM + row, tl.full((ITEMS, BM), -1, tl.int32), mask=unused)
    if program == 0:
        tl.store(items_ptr, tl.sum(needed, 0))
