"""Projections on a GPU: what the model's runner imports.

A weight is prepared once, at load, from the tensors of a checkpoint (`prepare_bf16`, `prepare_nvfp4`, `prepare_fp8`);
several projections that read the same input are stacked along N by giving them as one list. `linear` then picks, by the
number of rows M (fixed when a CUDA graph is captured), the kernel:

* M <= `SKINNY_ROWS`: memory-bound; the stored weight is read once and dequantised in registers
  (`skinny.py`; bf16 weights go to cuBLAS, which reaches the memory's rate).
* more rows, exact: the weight is dequantised to bf16 (exactly, up to one rounding of the product with the global scale)
  into a scratch matrix of the workspace, then cuBLAS.
* more rows, fast (`Nvfp4Weight.fp8`): a second copy in e4m3 with one scale a row, through `torch._scaled_mm`.

All functions write to `out` if it is given, never synchronise and may be captured into a CUDA graph.
"""

from __future__ import annotations

from sparkinfer_kernels.linear.ops import SKINNY_ROWS, Workspace, linear, linear_swiglu, make_workspace, quantise_rows
from sparkinfer_kernels.linear.weights import (
    Bf16Weight,
    Fp8BlockWeight,
    Fp8RowWeight,
    Nvfp4Weight,
    Weight,
    prepare_bf16,
    prepare_fp8_block,
    prepare_fp8_rows,
    prepare_nvfp4,
)

__all__ = [
    "SKINNY_ROWS",
    "Bf16Weight",
    "Fp8BlockWeight",
    "Fp8RowWeight",
    "Nvfp4Weight",
    "Weight",
    "Workspace",
    "linear",
    "linear_swiglu",
    "make_workspace",
    "prepare_bf16",
    "prepare_fp8_block",
    "prepare_fp8_rows",
    "prepare_nvfp4",
    "quantise_rows",
]
