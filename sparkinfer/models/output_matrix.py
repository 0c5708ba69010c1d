"""The output matrix: final hidden states to logits, which are float32 sums that are never rounded to 16 bits.

bfloat16 logits near 16 lie 1/8 apart, so that the two best are often equal and their order says nothing
(`docs/accuracy.md`, with figures).
"""

from __future__ import annotations

import torch

COPY_BYTES = 256 << 20
"""A 16-bit matrix is kept as a float32 copy of up to so many bytes; of a larger one, a block at a time is converted."""
BLOCK_BYTES = 4 << 20
"""Of a block in float32: what stays in a core's caches between conversion and product."""


class OutputMatrix:
    """Logits of hidden states.

    Args:
        weight: [V, H], float32 or 16 bits.
        copy_bytes: the largest float32 copy.
    """

    def __init__(self, weight: torch.Tensor, copy_bytes: int = COPY_BYTES) -> None:
        self._rows: torch.Tensor | None = None
        self._columns: torch.Tensor | None = None
        if weight.dtype == torch.float32 or weight.numel() * 4 <= copy_bytes:
            # [H, V]: the order in which a product with few rows reads memory.
            self._columns = weight.float().t().contiguous()
        else:
            self._rows = weight

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[m, H] of any float dtype to [m, V] float32."""
        x = hidden.float()
        if self._columns is not None:
            return x @ self._columns
        assert self._rows is not None
        logits = x.new_empty(x.shape[0], self._rows.shape[0])
        step = max(1, BLOCK_BYTES // (4 * x.shape[1]))
        for first in range(0, self._rows.shape[0], step):
            block = self._rows[first : first + step]
            torch.mm(x, block.float().t(), out=logits[:, first : first + step])
        return logits
