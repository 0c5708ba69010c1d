"""Sizes, tiles and scratch memory of the mixture of experts on a GPU; `gpu.py` launches by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import triton

FEW_TOKENS = 32
"""As many tokens as have all logits of the router in one program's registers."""
BY_TOKEN = 4
"""Up to this many tokens (at most 8) the columns of an item are the tokens."""
ITEM = 8
"""Pairs of an item: the smallest number of columns of a matrix instruction."""
NVFP4_TOKENS = 32
"""Up to this many tokens NVFP4 experts are read as they are although there is a bf16 copy, which measured as fast or
faster from 48 tokens on."""
ROUTER_ROWS = 16
ROUTER_SPLIT = 4
ROUTER_TOKENS = 16
"""Tokens of a program of the router for many tokens, and of the sort."""


class MoeConfig(Protocol):
    """What `make_workspace` reads of a model's configuration."""

    num_experts: int
    experts_per_token: int
    hidden_size: int
    moe_intermediate_size: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Parameters of `prefill_kernels.grouped_kernel`: BM tokens, BN rows of the weight, BK columns."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Parameters of `skinny_kernel.nvfp4_experts_kernel`."""

    wk: int
    wn: int
    rt: int
    kb: int
    stages: int
    per_sm: int

    @property
    def rows(self) -> int:
        """Rows of the weight of one block."""
        return self.wn * self.rt * 16


GATE_UP = Pipeline(wk=4, wn=1, rt=2, kb=1, stages=4, per_sm=3)
DOWN = Pipeline(wk=2, wn=2, rt=2, kb=1, stages=5, per_sm=3)
DOWN_SUM = Pipeline(wk=4, wn=1, rt=1, kb=1, stages=7, per_sm=1)
FEW_BF16 = Tile(bm=ITEM, bn=64, bk=128, warps=4, stages=3)


def block_rows(tokens: int, top_k: int, experts: int) -> int:
    """Rows of a block for this many tokens: about the mean number of an expert's tokens, a power of two."""
    mean = tokens * top_k / experts
    return next((rows for rows, limit in ((16, 8), (32, 28), (64, 96)) if mean <= limit), 128)


def tile_for(rows: int, form: str) -> Tile:
    """Parameters for blocks of `rows` tokens and weights in this form; within 99 KB of shared memory."""
    if form == "nvfp4":
        return Tile(rows, 128, 64, 4 if rows < 128 else 8, 3)
    bk = 128 if form == "fp8" else 64
    return Tile(rows, 128, bk, 4 if rows < 128 else 8, 3 if rows == 128 else 4 if rows < 64 else 3)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch memory of one stream, made by `make_workspace`; int32 unless it says otherwise."""

    rows: int
    shares: torch.Tensor
    """[T, TOP_K + 1] fp32: weights of a token's experts; sigmoid of the shared expert's gate."""
    partials: torch.Tensor
    """[ROUTER_SPLIT, FEW_TOKENS, ...] fp32."""
    counters: torch.Tensor
    """[2]: programs that are done, 0 between launches; number of items."""
    chosen: torch.Tensor
    """[T * SLOTS]: a pair's expert."""
    ranks: torch.Tensor
    """[T * SLOTS]: a pair's rank among its token block's pairs of the expert."""
    counts: torch.Tensor
    """[token blocks, E + 1]."""
    before: torch.Tensor
    """[token blocks, E + 1]."""
    totals: torch.Tensor
    """[E + 1]."""
    pairs: torch.Tensor
    """[positions]: the pair at a position; of an item's unused columns -1."""
    positions: torch.Tensor
    """[T * SLOTS]."""
    block_expert: torch.Tensor
    """[blocks]: also the items' experts."""
    block_rows: torch.Tensor
    """[blocks]: rows in use; 0 beyond the last block."""
    inner: torch.Tensor
    """[positions, I] bf16."""
    y: torch.Tensor
    """[positions, H] bf16."""
    inner_fp8: torch.Tensor
    """[positions, I] e4m3."""
    x_fp8: torch.Tensor
    """[T, H] e4m3."""
    scales: torch.Tensor
    """[positions] fp32."""
    x_scales: torch.Tensor
    """[T] fp32."""


def _most_positions(rows: int, slots: int, experts: int, top_k: int) -> tuple[int, int]:
    """Blocks and positions that any number of tokens up to `rows` needs."""
    few = min(rows, FEW_TOKENS)
    blocks = items = few * slots
    positions = items * ITEM
    for tokens in range(FEW_TOKENS + 1, rows + 1):
        bm = block_rows(tokens, top_k, experts)
        needed = max_blocks(tokens * slots, experts + 1, bm)
        blocks, positions = max(blocks, needed), max(positions, needed * bm)
    return blocks, positions


def max_blocks(pairs: int, experts: int, rows: int) -> int:
    return min(pairs, (pairs + experts * (rows - 1)) // rows)


def zeros_on(device: torch.device) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """Two ways to make zeros there: `ints(*size)` int32, `floats(dtype, *size)`."""

    def floats(dtype: torch.dtype, *size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    return partial(floats, torch.int32), floats


def make_workspace(config: MoeConfig, rows: int, device: torch.device) -> Workspace:
    """Allocate what passes of up to `rows` rows need.

    Args:
        config: the model's sizes.
        rows: the largest T.
        device: of the weights.
    """
    experts, top_k, hidden = config.num_experts, config.experts_per_token, config.hidden_size
    inner, slots = config.moe_intermediate_size, config.experts_per_token + 1
    blocks, positions = _most_positions(rows, slots, experts, top_k)
    token_blocks = triton.cdiv(rows, ROUTER_TOKENS)
    width = triton.next_power_of_2(experts) + ROUTER_ROWS
    ints, floats = zeros_on(device)
    return Workspace(
        rows=rows,
        shares=floats(torch.float32, rows, top_k + 1),
        partials=floats(torch.float32, ROUTER_SPLIT * FEW_TOKENS * width),
        counters=ints(2),
        chosen=ints(rows * slots),
        ranks=ints(rows * slots),
        counts=ints(token_blocks, experts + 1),
        before=ints(token_blocks, experts + 1),
        totals=ints(experts + 1),
        pairs=ints(positions),
        positions=ints(rows * slots),
        block_expert=ints(blocks),
        block_rows=ints(max(blocks, triton.next_power_of_2(min(rows, FEW_TOKENS) * slots))),
        inner=floats(torch.bfloat16, positions, inner),
        y=floats(torch.bfloat16, positions, hidden),
        inner_fp8=floats(torch.float8_e4m3fn, positions, inner),
        x_fp8=floats(torch.float8_e4m3fn, rows, hidden),
        scales=floats(torch.float32, positions),
        x_scales=floats(torch.float32, rows),
    )
