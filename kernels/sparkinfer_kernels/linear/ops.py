"""The product of activations with a prepared weight: which kernel runs for how many rows, and the memory they share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from sparkinfer_kernels.linear import dequantise, layout, skinny
from sparkinfer_kernels.linear.weights import FP8, Bf16Weight, Fp8BlockWeight, Fp8RowWeight, Nvfp4Weight, Weight
from sparkinfer_kernels.rms_norm.gpu import quantise_rows, swiglu

SKINNY_ROWS = 64
"""Up to this many rows the quantised weight is read once and dequantised in registers."""
SLICED_ROWS = 192
"""Up to this many rows an NVFP4 weight without an FP8 copy is used so, once for every 64 rows (128 in order "wgmma"):
dequantising it into memory first would take longer."""

OUT_DTYPES = (torch.bfloat16, torch.float32)
"""Of a product's result: fp32 for logits."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch memory of the products on one stream; made once by `make_workspace`."""

    partials: torch.Tensor
    """[...] fp32: partial sums where several blocks share an output tile."""
    counters: torch.Tensor
    """[...] int32, zero between launches: blocks that have delivered their partial sum."""
    dequantised: torch.Tensor
    """[largest N * K] bf16, empty if no weight needs it."""
    gate_up: torch.Tensor
    """[rows * largest N of a gate/up weight] bf16."""
    x_fp8: torch.Tensor
    """[rows * largest K of a weight with an FP8 copy] float8_e4m3fn."""
    x_scale: torch.Tensor
    """[rows] fp32."""


def make_workspace(weights: Iterable[Weight], rows: int) -> Workspace:
    """Allocate what products with `weights` of up to `rows` rows need.

    Args:
        weights: all weights that will be used with this workspace, on one device.
        rows: the largest M.

    Raises:
        ValueError: `weights` is empty.
    """
    given = list(weights)
    if not given:
        raise ValueError("make_workspace needs the weights that it is for")
    device = _device(given[0])
    nvfp4 = [weight for weight in given if isinstance(weight, Nvfp4Weight)]
    many = rows > SKINNY_ROWS
    expanded: list[Weight] = [w for w in nvfp4 if rows > SLICED_ROWS and w.fp8 is None]
    expanded += [w for w in given if many and isinstance(w, Fp8BlockWeight) and not w.multiply_fp8]
    scratch = max((w.shape[0] * w.shape[1] for w in expanded), default=0)
    gate_up = max((w.shape[0] for w in nvfp4 if many and w.gate_up), default=0)
    fp8 = max((w.shape[1] for w in given if many and _fp8_copy(w) is not None), default=0)
    return Workspace(
        partials=torch.empty(skinny.PARTIALS[layout.linear_order()], dtype=torch.float32, device=device),
        counters=torch.zeros(skinny.COUNTERS, dtype=torch.int32, device=device),
        dequantised=torch.empty(scratch, dtype=torch.bfloat16, device=device),
        gate_up=torch.empty(rows * gate_up, dtype=torch.bfloat16, device=device),
        x_fp8=torch.empty(rows * fp8, dtype=FP8, device=device),
        x_scale=torch.empty(rows if fp8 else 0, dtype=torch.float32, device=device),
    )


def linear(
    x: torch.Tensor,
    weight: Weight,
    workspace: Workspace,
    out: torch.Tensor | None = None,
    x_fp8: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T.

    Args:
        x: [M, K] bf16, rows contiguous (stride 1 along K). Only its shape is read where `x_fp8` is used.
        weight: a prepared weight [N, K].
        workspace: of `make_workspace` for this weight and at least M rows.
        out: [M, N] bf16 or fp32, rows contiguous (it may be columns of a wider tensor); bf16 is made if None. Products
            are fp32 sums: in fp32 they are not rounded, but for those with an FP8 copy, whose kernel writes bf16.
        x_fp8: [M, K] float8_e4m3fn and
        x_scale: [M] fp32, x = x_fp8 * x_scale: used by weights with an FP8 copy when M > `SKINNY_ROWS`. Without them
            `x` is quantised here.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes or the size of the workspace do not fit.
    """
    m, (n, k) = x.shape[0], weight.shape
    if x.ndim != 2 or x.shape[1] != k or x.dtype != torch.bfloat16 or x.stride(1) != 1:
        raise ValueError(f"x must be bf16 rows of {k} values side by side, got {x.dtype} {tuple(x.shape)} {x.stride()}")
    if out is None:
        out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    elif out.shape != (m, n) or out.dtype not in OUT_DTYPES or out.stride(1) != 1:
        raise ValueError(
            f"out must be bf16 or fp32 [{m}, {n}] with rows side by side,"
            f" got {out.dtype} {tuple(out.shape)} {out.stride()}"
        )
    if m == 0:
        return out
    if not isinstance(weight, Bf16Weight) and _in_registers(weight, m):
        skinny.product(x, weight, workspace.partials, workspace.counters, out)
        return out
    copy = _fp8_copy(weight) if m > SKINNY_ROWS else None
    if copy is not None:
        if x_fp8 is None or x_scale is None:
            x_fp8, x_scale = _scratch(workspace.x_fp8, m, k), _scratch(workspace.x_scale, m)
            quantise_rows(x, x_fp8, x_scale)
        return _product_fp8(x_fp8, x_scale, copy, out)
    if isinstance(weight, Fp8BlockWeight) and weight.multiply_fp8:
        return dequantise.product_fp8_block(x, weight, out)
    return _product_plain(x, _plain(weight, workspace), out)


def linear_swiglu(
    x: torch.Tensor,
    weight: Nvfp4Weight,
    workspace: Workspace,
    out: torch.Tensor | None = None,
    x_fp8: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    fp8: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T) for a weight prepared with `gate_up=True`.

    Args:
        x, weight, workspace, x_fp8, x_scale: as in `linear`.
        out: [M, N / 2] bf16, rows contiguous; made if None.
        fp8: (values [M, N / 2] float8_e4m3fn, row scales [M] fp32): written when given and M > `SKINNY_ROWS`, and `out`
            then is not.

    Returns:
        `out`.
    """
    if not weight.gate_up:
        raise ValueError("linear_swiglu needs a weight prepared with gate_up=True")
    m, n = x.shape[0], weight.shape[0]
    if out is None:
        out = torch.empty(m, n // 2, dtype=torch.bfloat16, device=x.device)
    if m == 0:
        return out
    if _in_registers(weight, m) and (fp8 is None or m <= SKINNY_ROWS):
        skinny.product(x, weight, workspace.partials, workspace.counters, out, activate=True)
        return out
    both = linear(x, weight, workspace, _scratch(workspace.gate_up, m, n), x_fp8, x_scale)
    swiglu(both, out=None if fp8 is not None else out, fp8=fp8)
    return out


def _in_registers(weight: Weight, m: int) -> bool:
    """Whether `m` rows of a quantised weight go through the kernels that dequantise in registers."""
    if isinstance(weight, Nvfp4Weight) and weight.fp8 is None:
        return m <= SLICED_ROWS
    return m <= SKINNY_ROWS


def _product_plain(x: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if out.dtype == x.dtype:
        return torch.mm(x, values.t(), out=out)
    if x.is_cuda:
        return torch.mm(x, values.t(), out_dtype=out.dtype, out=out)
    # `out_dtype` exists on CUDA only.
    return torch.mm(x.float(), values.float().t(), out=out)


def _product_fp8(x: torch.Tensor, x_scale: torch.Tensor, weight: Fp8RowWeight, out: torch.Tensor) -> torch.Tensor:
    # Scaled by row it writes bf16 only.
    whole = out.is_contiguous() and out.dtype == torch.bfloat16
    y = torch._scaled_mm(
        x,
        weight.values.t(),
        scale_a=x_scale.unsqueeze(1),
        scale_b=weight.scales.unsqueeze(0),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
        out=out if whole else None,
    )
    return y if whole else out.copy_(y)


def _plain(weight: Weight, workspace: Workspace) -> torch.Tensor:
    if isinstance(weight, Bf16Weight):
        return weight.values
    assert isinstance(weight, Nvfp4Weight | Fp8BlockWeight)
    values = _scratch(workspace.dequantised, *weight.shape)
    expand = dequantise.nvfp4_to_bf16 if isinstance(weight, Nvfp4Weight) else dequantise.fp8_block_to_bf16
    expand(weight, values)  # type: ignore[arg-type]
    return values


def _fp8_copy(weight: Weight) -> Fp8RowWeight | None:
    if isinstance(weight, Fp8RowWeight):
        return weight
    return weight.fp8 if isinstance(weight, Bf16Weight | Nvfp4Weight) else None


def _scratch(flat: torch.Tensor, *shape: int) -> torch.Tensor:
    size = 1
    for extent in shape:
        size *= extent
    if size > flat.numel():
        raise ValueError(
            f"the workspace has {flat.numel()} elements of {flat.dtype} where {shape} needs {size}: make it with this"
            " weight and at least this number of rows"
        )
    return flat[:size].view(shape)


def _device(weight: Weight) -> torch.device:
    return weight.codes.device if isinstance(weight, Nvfp4Weight) else weight.values.device


__all__ = ["SKINNY_ROWS", "Workspace", "linear", "linear_swiglu", "make_workspace", "quantise_rows"]
