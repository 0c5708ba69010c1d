"""Plain torch projections.

A weight is laid out once, when it is loaded. fp32 on any device, and every dtype on a GPU: [in, out], the order in
which a product with few rows reads memory. bfloat16 on a CPU with bfloat16 instructions: oneDNN's own blocked layout,
which spares the reordering that a product with a plain weight repeats at every call. The operators are those that
torch's own compiler calls.
"""

from __future__ import annotations

from functools import cache

import torch


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """Lay out the weight of a projection.

    Args:
        weight: [out, in].

    Returns:
        A tensor for `linear`; of what shape and layout is its own affair.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and bfloat16_instructions():
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return weight.t().contiguous()


def linear(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """x @ weight.T.

    Args:
        x: [T, in] in the weight's dtype.
        packed: from `pack_linear`.

    Returns:
        [T, out] in the dtype of `x`.
    """
    if packed.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
    return x @ packed


@cache
def bfloat16_instructions() -> bool:
    """Whether oneDNN is there and this CPU multiplies bfloat16 numbers by itself."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
