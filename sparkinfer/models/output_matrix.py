"""The output matrix: final hidden states to logits, which are float32 sums that are never rounded to 16 bits.

bfloat16 logits near 16 lie 1/8 apart, so that the two best are often equal and their order says nothing
(`docs/accuracy.md`, with figures).
"""

from __future__ import annotations

import torch
from sparkinfer_kernels.linear.reference import BlockedWeight, linear, pack_blocked

COPY_BYTES = 256 << 20
"""A matrix is kept as a float32 copy of up to so many bytes; of a larger one, a block at a time is converted."""
BLOCK_BYTES = 4 << 20
"""Of a block in float32: what stays in a core's caches between conversion and product."""
SPLIT_SUMS = 1024
"""Of a longer row, oneDNN cuts the sum in parts when it multiplies it alone, not when it multiplies several."""


def float32_bytes(vocab: int, hidden: int) -> int:
    """Memory that the float32 numbers of a [vocab, hidden] matrix take on a CPU: a copy, or one block."""
    whole = 4 * vocab * hidden
    return whole if whole <= COPY_BYTES else min(whole, BLOCK_BYTES)


class OutputMatrix:
    """Logits of hidden states.

    Those of a row do not depend, to the last bit, on how many rows it is computed with, unless the matrix is too large
    to be copied or torch was built without oneDNN.

    Args:
        weight: [V, H], float32 or 16 bits.
        copy_bytes: the largest float32 copy.
    """

    def __init__(self, weight: torch.Tensor, copy_bytes: int = COPY_BYTES) -> None:
        self._rows: torch.Tensor | None = None
        self._packed: torch.Tensor | BlockedWeight | None = None
        if weight.numel() * 4 > copy_bytes:
            self._rows = weight
        elif weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
            self._packed = pack_blocked(weight.float())
        else:
            self._packed = weight.float().t().contiguous()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[m, H] of any float dtype to [m, V] float32."""
        x = hidden.float()
        if self._packed is None:
            return self._in_blocks(x)
        if isinstance(self._packed, BlockedWeight) and x.shape[0] == 1 and x.shape[1] > SPLIT_SUMS:
            # Twice the same row reads the matrix once, which is what a product of one row costs.
            return linear(x.expand(2, -1).contiguous(), self._packed)[:1]
        return linear(x, self._packed)

    def _in_blocks(self, x: torch.Tensor) -> torch.Tensor:
        assert self._rows is not None
        logits = x.new_empty(x.shape[0], self._rows.shape[0])
        step = max(1, BLOCK_BYTES // (4 * x.shape[1]))
        for first in range(0, self._rows.shape[0], step):
            block = self._rows[first : first + step]
            torch.mm(x, block.float().t(), out=logits[:, first : first + step])
        return logits
