"""Triton kernels around a captured pass; see `reference` for what each computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def _update_kernel(
    tokens, slots, last_token, table, update_places, update_blocks,
    num_decode, num_updates,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Pending input tokens and changed table entries, BLOCK of each per program."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    decode = at < num_decode
    token = tl.load(tokens + at, mask=decode, other=0)
    slot = tl.load(slots + at, mask=decode, other=0)
    last = tl.load(last_token + slot, mask=decode & (token < 0), other=0)
    tl.store(tokens + at, last, mask=decode & (token < 0))
    updated = at < num_updates
    place = tl.load(update_places + at, mask=updated, other=0)
    block = tl.load(update_blocks + at, mask=updated, other=0)
    tl.store(table + place, block, mask=updated)


@triton.jit
def _lines_kernel(table, slots, block_table, width, BLOCK: tl.constexpr):
    """One piece of one line of the block table."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    inside = at < width
    entry = tl.load(table + slot * width + at, mask=inside, other=0)
    tl.store(block_table + row.to(tl.int64) * width + at, entry, mask=inside)


@triton.jit
def _keep_kernel(chosen, output_slots, last_token, count, BLOCK: tl.constexpr):
    """Chosen tokens by slot."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    token = tl.load(chosen + at, mask=inside, other=0)
    slot = tl.load(output_slots + at, mask=inside, other=0)
    tl.store(last_token + slot, token, mask=inside)


def prepare_step(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    num_decode: int,
    last_token: torch.Tensor,
    table: torch.Tensor,
    update_places: torch.Tensor,
    update_blocks: torch.Tensor,
    block_table: torch.Tensor,
) -> None:
    """As `reference.prepare_step`; two kernels."""
    updates = update_places.shape[0]
    work = max(num_decode, updates)
    if work:
        _update_kernel[(triton.cdiv(work, BLOCK),)](
            tokens, slots, last_token, table, update_places, update_blocks, num_decode, updates, BLOCK=BLOCK
        )
    width = table.shape[1]
    _lines_kernel[(slots.shape[0], triton.cdiv(width, 1024))](table, slots, block_table, width, BLOCK=1024)


def keep_tokens(chosen: torch.Tensor, output_slots: torch.Tensor, last_token: torch.Tensor) -> None:
    """As `reference.keep_tokens`; one kernel."""
    count = chosen.shape[0]
    _keep_kernel[(triton.cdiv(count, BLOCK),)](chosen, output_slots, last_token, count, BLOCK=BLOCK)
