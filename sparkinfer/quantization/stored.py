"""The tensors in which a quantised module lies in a file, and their content from its parts."""

from __future__ import annotations

import torch

from sparkinfer.models.safetensors_file import NewTensor
from sparkinfer.quantization import fp8, nvfp4
from sparkinfer.quantization.fp8 import Fp8BlockParts
from sparkinfer.quantization.nvfp4 import Nvfp4Parts
from sparkinfer.quantization.schemes import Format


def stored_tensors(module: str, shape: tuple[int, ...], choice: Format, modelopt_fp8: bool = False) -> list[NewTensor]:
    """The tensors of a module [N, K]: weight, block scales, global scale, input scale, as far as the format has them.

    `modelopt_fp8`: as ModelOpt's FP8_PB_WO (`weight_scale` [N / 128, 1, K / 128, 1]), not `weight_scale_inv`.
    """
    rows, columns = shape
    if choice is Format.NVFP4:
        return [
            NewTensor(f"{module}.weight", "U8", (rows, columns // 2)),
            NewTensor(f"{module}.weight_scale", "F8_E4M3", (rows, columns // nvfp4.BLOCK)),
            NewTensor(f"{module}.weight_scale_2", "F32", ()),
            NewTensor(f"{module}.input_scale", "F32", ()),
        ]
    blocks = fp8.blocks_of(rows), fp8.blocks_of(columns)
    scale = (
        NewTensor(f"{module}.weight_scale", "F32", (blocks[0], 1, blocks[1], 1))
        if modelopt_fp8
        else NewTensor(f"{module}.weight_scale_inv", "F32", blocks)
    )
    return [NewTensor(f"{module}.weight", "F8_E4M3", (rows, columns)), scale]


def values(parts: Nvfp4Parts | Fp8BlockParts) -> list[torch.Tensor]:
    """The content of `stored_tensors`, in its order. Raises ValueError for NVFP4 without an input scale."""
    if isinstance(parts, Fp8BlockParts):
        return [parts.weight, parts.scales]
    if parts.input_scale is None:
        raise ValueError("ModelOpt's NVFP4 stores an input scale, but none was calibrated")
    return [parts.packed, parts.scales, parts.global_scale, parts.input_scale]
