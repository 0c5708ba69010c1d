"""What runs before and after the layers of a captured pass; see `reference` for what each computes."""

from __future__ import annotations

import torch
import triton

from sparkinfer_kernels.step.kernels import keep_kernel, lines_kernel, update_kernel

BLOCK = 256


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
        update_kernel[(triton.cdiv(work, BLOCK),)](
            tokens, slots, last_token, table, update_places, update_blocks, num_decode, updates, BLOCK=BLOCK
        )
    width = table.shape[1]
    lines_kernel[(slots.shape[0], triton.cdiv(width, 1024))](table, slots, block_table, width, BLOCK=1024)


def keep_tokens(chosen: torch.Tensor, output_slots: torch.Tensor, last_token: torch.Tensor) -> None:
    """As `reference.keep_tokens`; one kernel."""
    count = chosen.shape[0]
    keep_kernel[(triton.cdiv(count, BLOCK),)](chosen, output_slots, last_token, count, BLOCK=BLOCK)
