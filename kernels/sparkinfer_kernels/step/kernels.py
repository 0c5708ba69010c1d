"""Triton kernels around a captured pass."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def update_kernel(
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
def lines_kernel(table, slots, block_table, width, BLOCK: tl.constexpr):
    """One piece of one line of the block table."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    inside = at < width
    entry = tl.load(table + slot * width + at, mask=inside, other=0)
    tl.store(block_table + row.to(tl.int64) * width + at, entry, mask=inside)


@triton.jit
def keep_kernel(chosen, output_slots, last_token, count, BLOCK: tl.constexpr):
    """Chosen tokens by slot."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    token = tl.load(chosen + at, mask=inside, other=0)
    slot = tl.load(output_slots + at, mask=inside, other=0)
    tl.store(last_token + slot, token, mask=inside)
