"""Sizes, parameters and scratch memory of `items.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparkinfer_kernels.moe.workspace import FEW_TOKENS, ITEM, MoeConfig, Workspace, block_rows, zeros_on

ITEM_TOKENS = {"nvfp4": 2048, "bf16": 2048, "fp8": 1024}
"""Up to this many tokens items are faster than the blocks of `prefill_kernels.py`, by what those would multiply (nvfp4:
there is no copy, which leaves all passes to the items); measured, `kernels/NOTES.md`, 2026-12-02."""
NVFP4_TOKENS = 2048
"""Up to this many tokens NVFP4 experts are preferred to a bf16 copy: reading that takes longer than expanding."""
ROUTER_FEW = 32
"""Up to this many tokens the router's product is cut into many small programs."""
ROUTER_SPLIT_TOKENS = 2048
"""Up to this many tokens K is split in the router's product."""
PLACED_TOKENS = 16
"""Tokens whose pairs a program of the list places."""
PLACED_ITEMS = 16
"""Items that a program of the list describes."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Parameters of `experts_kernel.experts_kernel`."""

    warps: int
    rt: int
    columns: int
    stages: int
    per_sm: int
    """Programs for each multiprocessor."""

    @property
    def rows(self) -> int:
        """Rows of the weight of one block."""
        return self.warps * self.rt * 16


GATE_UP: dict[tuple[str, int], Pipeline] = {
    ("nvfp4", 8): Pipeline(4, 4, 128, 2, 3),
    ("nvfp4", 16): Pipeline(4, 2, 256, 2, 2),
    ("nvfp4", 32): Pipeline(4, 2, 128, 4, 2),
    ("nvfp4", 64): Pipeline(4, 2, 128, 4, 2),
    ("nvfp4", 128): Pipeline(8, 1, 128, 2, 2),
    ("bf16", 8): Pipeline(4, 2, 64, 4, 3),
    ("bf16", 16): Pipeline(4, 2, 64, 4, 3),
    ("bf16", 32): Pipeline(4, 2, 64, 4, 2),
    ("bf16", 64): Pipeline(4, 2, 64, 4, 2),
    ("bf16", 128): Pipeline(8, 1, 64, 3, 2),
    ("fp8", 8): Pipeline(4, 2, 128, 4, 3),
    ("fp8", 16): Pipeline(4, 2, 128, 4, 3),
    ("fp8", 32): Pipeline(4, 2, 128, 4, 2),
    ("fp8", 64): Pipeline(4, 2, 128, 4, 2),
    ("fp8", 128): Pipeline(8, 1, 128, 3, 2),
}
"""By form of the weights and pairs of an item."""
DOWN = {**GATE_UP, ("nvfp4", 8): Pipeline(4, 2, 128, 2, 6)}
FEWEST_ITEMS = 40
"""Up to this many items (4 tokens of top-8) NVFP4 experts have small blocks, so that most multiprocessors get one."""
FEWEST = Pipeline(4, 1, 256, 2, 6)


def item_pairs(tokens: int, top_k: int, experts: int) -> int:
    """Pairs of an item for this many tokens: about the mean number of an expert's tokens, a power of two."""
    if tokens <= FEW_TOKENS:
        return ITEM
    return block_rows(tokens, top_k, experts)


@dataclass(frozen=True, slots=True)
class ItemWorkspace:
    """Scratch memory of one stream, made by `make_item_workspace`; int32 unless it says otherwise."""

    rows: int
    blocks: Workspace
    """For passes that go through blocks; what both have is the same memory."""
    shares: torch.Tensor
    """[T, TOP_K + 1] fp32: weights of a token's experts; sigmoid of the shared expert's gate."""
    partials: torch.Tensor
    """[split * T * width] fp32: logits, a part of K each."""
    chosen: torch.Tensor
    """[T * SLOTS]: a pair's expert."""
    ranks: torch.Tensor
    """[T * SLOTS]: a pair's rank among the expert's pairs."""
    counts: torch.Tensor
    """[E + 1]: pairs of each expert."""
    items: torch.Tensor
    """[1]: their number."""
    pairs: torch.Tensor
    """[items * their columns]: the pair of a column, -1 of an unused one."""
    block_expert: torch.Tensor
    """[items]: their experts."""
    inner: torch.Tensor
    """[T * SLOTS or more, I] bf16."""
    y: torch.Tensor
    """[T * SLOTS or more, H] bf16."""
    inner_fp8: torch.Tensor
    """[T * SLOTS or more, I] e4m3."""
    x_fp8: torch.Tensor
    """[T, H] e4m3."""
    scales: torch.Tensor
    """[T * SLOTS or more] fp32."""
    x_scales: torch.Tensor
    """[T] fp32."""


def pipeline_for(form: str, bm: int, items: int, gate_up: bool) -> Pipeline:
    """Parameters of a product.

    Args:
        form: of the weights.
        bm: pairs of an item.
        items: the most there can be.
        gate_up: of gate and up; otherwise of down.
    """
    if form == "nvfp4" and items <= FEWEST_ITEMS:
        return FEWEST
    return (GATE_UP if gate_up else DOWN)[form, bm]


def router_width(experts: int) -> int:
    """Columns of a row of logits in memory, with the shared expert's gate."""
    return -(-(experts + 1) // 16) * 16


def max_items(tokens: int, top_k: int, slots: int, experts: int, rows: int) -> int:
    """The most items of up to `rows` pairs that any choice of experts gives."""
    pairs = tokens * top_k
    routed = min(pairs, (pairs + min(experts, pairs) * (rows - 1)) // rows)
    return routed + (slots - top_k) * -(-tokens // rows)


def _most_places(rows: int, slots: int, experts: int, top_k: int) -> tuple[int, int]:
    """Items and their places that any number of tokens up to `rows` needs."""
    items = places = 0
    for tokens in range(1, rows + 1):
        bm = item_pairs(tokens, top_k, experts)
        needed = max_items(tokens, top_k, slots, experts, bm)
        items, places = max(items, needed), max(places, needed * bm)
    return items, places


def make_item_workspace(config: MoeConfig, blocks: Workspace) -> ItemWorkspace:
    """Allocate what passes of up to `blocks.rows` rows need besides.

    Args:
        config: the model's sizes.
        blocks: whose memory is used where one pass needs only one of them.
    """
    experts, top_k, slots = config.num_experts, config.experts_per_token, config.experts_per_token + 1
    rows = blocks.rows
    items, places = _most_places(rows, slots, experts, top_k)
    logits = max(min(rows, ROUTER_FEW) * 8, min(rows, ROUTER_SPLIT_TOKENS) * 4, rows) * router_width(experts)
    ints, floats = zeros_on(blocks.shares.device)
    return ItemWorkspace(
        rows=rows,
        blocks=blocks,
        shares=blocks.shares,
        partials=floats(torch.float32, logits),
        chosen=blocks.chosen,
        ranks=blocks.ranks,
        counts=ints(experts + 1),
        items=ints(1),
        pairs=ints(places),
        block_expert=ints(items),
        inner=blocks.inner,
        y=blocks.y,
        inner_fp8=blocks.inner_fp8,
        x_fp8=blocks.x_fp8,
        scales=blocks.scales,
        x_scales=blocks.x_scales,
    )
