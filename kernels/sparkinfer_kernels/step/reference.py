"""Plain torch twins of the step kernels."""

from __future__ import annotations

import torch


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
    """Input tokens from the last-token table, changes into the block table, the pass's lines out of it.

    Args:
        tokens: [T] int32; of the first `num_decode`, a negative one is replaced by its slot's last token.
        slots: [Q] int32, of the decode rows and then the prompts.
        num_decode: decode rows of the pass.
        last_token: [slots] int32.
        table: [slots, max_blocks] int32, every slot's KV blocks.
        update_places: [U] int32, flat places in `table`; several may be equal when their blocks are.
        update_blocks: [U] int32, what to store there.
        block_table: [Q, max_blocks] int32, written: the lines of `slots`.
    """
    table.view(-1)[update_places.long()] = update_blocks
    decode = tokens[:num_decode]
    decode.copy_(torch.where(decode < 0, last_token[slots[:num_decode].long()], decode))
    block_table.copy_(table[slots.long()])


def keep_tokens(chosen: torch.Tensor, output_slots: torch.Tensor, last_token: torch.Tensor) -> None:
    """Store the chosen tokens by slot.

    Args:
        chosen: [m] int32.
        output_slots: [m] int32; rows of padding share the dummy slot.
        last_token: [slots] int32, written.
    """
    last_token[output_slots.long()] = chosen
