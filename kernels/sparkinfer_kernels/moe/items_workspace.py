"""Sizes, parameters and scratch memory of `items.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparkinfer_kernels.moe.workspace import FEW_TOKENS, ITEM, MoeConfig, block_rows, zeros_on

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
    ("nvfp4", 8): Pipeline(4, 1, 128, 4, 4),
    ("nvfp4", 16): Pipeline(4, 2, 128, 4, 3),
    ("nvfp4", 32): Pipeline(4, 2, 128, 4, 2),
    ("nvfp4", 64): Pipeline(4, 2, 128, 4, 2),
    ("nvfp4", 128): Pipeline(8, 1, 128, 4, 1),
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
DOWN = dict(GATE_UP)


def item_pairs(tokens: int, top_k: int, experts: int) -> int:
    """Pairs of an item for this many tokens: about the mean number of an expert's tokens, a power of two."""
    if tokens <= FEW_TOKENS:
        return ITEM
    return block_rows(tokens, top_k, experts)


@dataclass(frozen=True, slots=True)
class ItemWorkspace:
    """Scratch memory of one stream, made by `make_item_workspace`; int32 unless it says otherwise."""

    rows: int
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
    """[T * SLOTS, I] bf16."""
    y: torch.Tensor
    """[T * SLOTS, H] bf16."""
    inner_fp8: torch.Tensor
    """[T * SLOTS, I] e4m3."""
    x_fp8: torch.Tensor
    """[T, H] e4m3."""
    scales: torch.Tensor
    """[T * SLOTS] fp32."""
    x_scales: torch.Tensor
    """[T] fp32."""


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


def make_item_workspace(config: MoeConfig, rows: int, device: torch.device) -> ItemWorkspace:
    """Allocate what passes of up to `rows` rows need.

    Args:
        config: the model's sizes.
        rows: the largest T.
        device: of the weights.
    """
    experts, top_k, hidden = config.num_experts, config.experts_per_token, config.hidden_size
    inner, slots = config.moe_intermediate_size, config.experts_per_token + 1
    items, places = _most_places(rows, slots, experts, top_k)
    logits = max(min(rows, ROUTER_FEW) * 8, min(rows, ROUTER_SPLIT_TOKENS) * 4, rows) * router_width(experts)
    ints, floats = zeros_on(device)
    return ItemWorkspace(
        rows=rows,
        shares=floats(torch.float32, rows, top_k + 1),
        partials=floats(torch.float32, logits),
        chosen=ints(rows * slots),
        ranks=ints(rows * slots),
        counts=ints(experts + 1),
        items=ints(1),
        pairs=ints(places),
        block_expert=ints(items),
        inner=floats(torch.bfloat16, rows * slots, inner),
        y=floats(torch.bfloat16, rows * slots, hidden),
        inner_fp8=floats(torch.float8_e4m3fn, rows * slots, inner),
        x_fp8=floats(torch.float8_e4m3fn, rows, hidden),
        scales=floats(torch.float32, rows * slots),
        x_scales=floats(torch.float32, rows),
    )
