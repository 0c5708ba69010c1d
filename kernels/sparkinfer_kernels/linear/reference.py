"""Plain torch projections.

A weight is laid out once, when it is loaded. fp32 on any device, and every dtype on a GPU: [in, out], the order in
which a product with few rows reads memory. bfloat16 on a CPU with bfloat16 instructions: oneDNN's own blocked layout,
which spares the reordering that a product with a plain weight repeats at every call. The operators are those that
torch's own compiler calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

SMALL_WEIGHT = 1 << 18
"""Weights of at most so many numbers are kept in plain layout as well."""
SMALL_PRODUCT = 1 << 19
"""A product that multiplies so many numbers or fewer goes through an embedding bag, a weighted sum of the weight's
rows, whose call costs half of oneDNN's."""


@dataclass(frozen=True, slots=True)
class BlockedWeight:
    """A weight for oneDNN."""

    blocked: torch.Tensor
    """In oneDNN's layout."""
    plain: torch.Tensor | None
    """[in, out], of a small weight."""


def pack_linear(weight: torch.Tensor, steady: bool = False) -> torch.Tensor | BlockedWeight:
    """Lay out the weight of a projection.

    Args:
        weight: [out, in].
        steady: use one product for any number of rows, whose last bits then do not depend on it.

    Returns:
        What `linear` takes.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and bfloat16_instructions():
        plain = None if steady or weight.numel() > SMALL_WEIGHT else weight.t().contiguous()
        return pack_blocked(weight, plain)
    return weight.t().contiguous()


def pack_blocked(weight: torch.Tensor, plain: torch.Tensor | None = None) -> BlockedWeight:
    """Lay out a weight [out, in] on a CPU for oneDNN, in any dtype that it multiplies; `plain`: see `BlockedWeight`."""
    return BlockedWeight(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None), plain)


def linear(x: torch.Tensor, packed: torch.Tensor | BlockedWeight) -> torch.Tensor:
    """x @ weight.T.

    Args:
        x: [T, in] in the weight's dtype.
        packed: from `pack_linear`.

    Returns:
        [T, out] in the dtype of `x`.
    """
    if isinstance(packed, torch.Tensor):
        return x @ packed
    if packed.plain is not None and x.shape[0] * packed.plain.numel() <= SMALL_PRODUCT:
        rows, bags = _all_rows(*x.shape)
        return torch.embedding_bag(packed.plain, rows, bags, False, 0, False, x.reshape(-1), True)[0]
    return torch.ops.mkldnn._linear_pointwise.default(x, packed.blocked, None, "none", [], "")


@cache
def _all_rows(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a weight [size, ...] for each of `count` bags, and where each begins."""
    return torch.arange(size).repeat(count), torch.arange(0, count * size + 1, size)


@cache
def bfloat16_instructions() -> bool:
    """Whether oneDNN is there and this CPU multiplies bfloat16 numbers by itself."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
