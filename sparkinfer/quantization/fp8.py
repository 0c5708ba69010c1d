"""FP8 with a scale for each block of 128 x 128 weights, as published with DeepSeek-V3 (arXiv 2412.19437)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 128
E4M3_MAX = 448.0
SMALLEST = torch.finfo(torch.float32).tiny
"""The least scale, the smallest normal number: less may become zero."""


@dataclass(frozen=True, slots=True)
class Fp8BlockParts:
    """One quantised matrix [N, K], or experts' matrices [E, N, K]; see the package's docstring for the layout."""

    weight: torch.Tensor
    """[..., N, K] float8_e4m3fn."""
    scales: torch.Tensor
    """[..., ceil(N / 128), ceil(K / 128)] fp32; multiply by it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix that the parts stand for."""
        return tuple(self.weight.shape)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The matrix in `dtype`, rounded once from fp32."""
        return dequantise(self.weight, self.scales, dtype)

    def to(self, device: torch.device | str) -> Fp8BlockParts:
        """The same on another device."""
        return Fp8BlockParts(self.weight.to(device), self.scales.to(device))

    def pick_rows(self, rows: torch.Tensor) -> Fp8BlockParts:
        """The matrix [n, K] of the given rows ([n] int64), in their order.

        Raises:
            ValueError: the rows do not come in whole blocks, so that no block of 128 x 128 would have one scale.
        """
        blocks = rows.view(-1, BLOCK) if rows.shape[0] % BLOCK == 0 else rows.new_zeros(1, 2)
        first = blocks[:, :1]
        whole = blocks.shape[1] == BLOCK and bool((first % BLOCK == 0).all())
        if not whole or not torch.equal(blocks, first + torch.arange(BLOCK, device=rows.device)):
            raise ValueError(f"rows of an FP8 matrix can be picked in whole blocks of {BLOCK} only")
        weight = self.weight.view(torch.uint8).index_select(0, rows).view(torch.float8_e4m3fn)
        return Fp8BlockParts(weight, self.scales.index_select(0, first.squeeze(1) // BLOCK))


def blocks_of(size: int) -> int:
    """Blocks along a dimension, the last of which may be smaller."""
    return -(-size // BLOCK)


def dequantise(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[..., N, K] of e4m3 weights and fp32 scales [..., ceil(N / 128), ceil(K / 128)]."""
    rows, columns = weight.shape[-2:]
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for number in range(scales.shape[-2]):
        piece = slice(number * BLOCK, min(rows, (number + 1) * BLOCK))
        factors = scales[..., number : number + 1, :].float().repeat_interleave(BLOCK, -1)[..., :columns]
        out[..., piece, :] = (weight[..., piece, :].float() * factors).to(dtype)
    return out


def quantise(weight: torch.Tensor) -> Fp8BlockParts:
    """Quantise [N, K] with amax / 448 of each block.

    Eight significant bits of scale would not change what three of weight lose, so the scale is not searched.

    Raises:
        ValueError: the matrix holds NaN or infinity.
    """
    rows, columns = weight.shape
    scales = torch.empty(blocks_of(rows), blocks_of(columns), device=weight.device)
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    for number in range(scales.shape[0]):
        piece = slice(number * BLOCK, min(rows, (number + 1) * BLOCK))
        values = weight[piece].float()
        edge = torch.nn.functional.pad(values.abs().amax(0), (0, scales.shape[1] * BLOCK - columns))
        amax = edge.view(-1, BLOCK).amax(1)
        if not torch.isfinite(amax).all():
            raise ValueError("it holds NaN or infinity")
        scales[number] = torch.where(amax > 0, (amax / E4M3_MAX).clamp(min=SMALLEST), 1.0)
        factors = scales[number].repeat_interleave(BLOCK)[:columns]
        out[piece] = (values / factors).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return Fp8BlockParts(out, scales)
