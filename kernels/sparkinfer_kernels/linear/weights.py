"""Weights of projections as the GPU kernels read them, and how they are prepared from a checkpoint's tensors.

Every `prepare_*` takes a list: projections that read the same input are stacked along N in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sparkinfer_kernels.linear import layout

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_BLOCK = 128
PIECE = 1 << 25
"""Elements that preparing handles at once: temporaries stay below about 1 GB."""


class Nvfp4Parts(Protocol):
    """One NVFP4 matrix [N, K] of a checkpoint in ModelOpt's convention: weight = code * scale * global scale.

    (compressed-tensors stores the reciprocal of the global scale; the loader inverts it.)
    """

    @property
    def packed(self) -> torch.Tensor:
        """[N, K / 2] uint8, the even column in the low nibble."""

    @property
    def scales(self) -> torch.Tensor:
        """[N, K / 16] float8_e4m3fn."""

    @property
    def global_scale(self) -> torch.Tensor:
        """[] fp32."""


class _Values:
    """A weight stored as the matrix `values` [N, K]."""

    __slots__ = ()
    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.values.shape[0], self.values.shape[1]


@dataclass(frozen=True, slots=True)
class Fp8RowWeight(_Values):
    """e4m3 with one scale a row: weight[n, k] = values[n, k] * scales[n]."""

    values: torch.Tensor
    """[N, K] float8_e4m3fn."""
    scales: torch.Tensor
    """[N] fp32."""


@dataclass(frozen=True, slots=True)
class Bf16Weight(_Values):
    """A plain weight."""

    values: torch.Tensor
    """[N, K] bf16."""
    fp8: Fp8RowWeight | None = None
    """Copy for many rows, or None to use `values`."""


@dataclass(frozen=True, slots=True)
class Fp8BlockWeight(_Values):
    """e4m3 with one scale for each 128 x 128 block: weight = values * scales of the block."""

    values: torch.Tensor
    """[N, K] float8_e4m3fn."""
    scales: torch.Tensor
    """[ceil(N / 128), ceil(K / 128)] fp32."""
    multiply_fp8: bool = False
    """Many rows: quantise them in groups of 128 columns and multiply in FP8, or (False) expand the weight to bf16."""


@dataclass(frozen=True, slots=True)
class Nvfp4Weight:
    """NVFP4 in fragment order (`layout.py`)."""

    codes: torch.Tensor
    """[ceil(N / 16), Kp / 64, 32, 16] uint8, Kp = K rounded up to 128."""
    scales: torch.Tensor
    """[ceil(N / 16), Kp / 128, 32, 4] uint8; in order "wgmma" [ceil(N / 16), Kp / 64, 8, 8]."""
    row_scales: torch.Tensor
    """[N padded to 16] fp32: each row's global scale times `layout.ROW_FACTOR`."""
    shape: tuple[int, int]
    """(N, K)."""
    gate_up: bool = False
    """Rows are stored as `layout.interleave` orders them; outputs are [gate | up] all the same."""
    order: str = "mma"
    """Of the columns, see `layout.py`."""
    fp8: Fp8RowWeight | None = None
    """Copy for many rows (rows in the order of the outputs), or None: dequantise to bf16 for each product."""


Weight = Bf16Weight | Nvfp4Weight | Fp8BlockWeight | Fp8RowWeight


def prepare_bf16(parts: Sequence[torch.Tensor], fp8: bool = False) -> Bf16Weight:
    """Stack plain projections.

    Args:
        parts: each [N_i, K] float.
        fp8: also keep an e4m3 copy for many rows (left out where N or K is no multiple of 16).

    Raises:
        ValueError: the parts differ in K.
    """
    values = torch.cat([part.to(torch.bfloat16) for part in _same_columns(parts)])
    copy = prepare_fp8_rows([values]) if fp8 and _fits_fp8(*values.shape) else None
    return Bf16Weight(values, copy)


def prepare_nvfp4(
    parts: Sequence[Nvfp4Parts], gate_up: bool = False, fp8: bool = False, order: str | None = None
) -> Nvfp4Weight:
    """Stack NVFP4 projections; their global scales may differ.

    Args:
        parts: matrices on the target device, each with any N_i and K a multiple of 16.
        gate_up: `parts` are gate and up of one MLP (N_i multiples of 8): rows are interleaved, so that SwiGLU can be
            applied where they are computed.
        fp8: also keep an e4m3 copy with row scales 1.5 * 2^k for many rows (not where N or K is no multiple of 16).
        order: of the columns; None: `layout.linear_order`.

    Raises:
        ValueError: shapes do not fit together, or a block scale is negative or NaN.
    """
    _same_columns([part.packed for part in parts])
    order = order or layout.linear_order()
    for part in parts:
        n, k = part.packed.shape[0], part.packed.shape[1] * 2
        if tuple(part.scales.shape) != (n, k // layout.BLOCK) or k % layout.BLOCK:
            raise ValueError(
                f"packed codes of shape {tuple(part.packed.shape)} need scales of shape {(n, k // layout.BLOCK)},"
                f" got {tuple(part.scales.shape)} (one for {layout.BLOCK} columns)"
            )
    packed = torch.cat([part.packed for part in parts])
    scales = torch.cat([part.scales.view(torch.uint8) for part in parts])
    factors = torch.cat(
        [part.global_scale.to(packed.device, torch.float32).reshape(1).expand(part.packed.shape[0]) for part in parts]
    )
    n, k = packed.shape[0], packed.shape[1] * 2
    copy = None
    if fp8 and _fits_fp8(n, k):
        copy = _fp8_of_nvfp4(packed, scales.view(FP8), factors)
    if gate_up:
        if len({part.packed.shape[0] for part in parts}) != 1 or len(parts) != 2 or n % 16:
            raise ValueError("gate and up must be two matrices of the same N, a multiple of 8")
        packed, scales, factors = (layout.interleave(one) for one in (packed, scales, factors))
    codes, bits = _pack(packed, scales, order)
    row_scales = factors.new_zeros(layout.padded(n, layout.TILE_ROWS))
    row_scales[:n] = factors * layout.ROW_FACTOR[order]
    return Nvfp4Weight(codes, bits, row_scales, (n, k), gate_up, order, copy)


def prepare_fp8_rows(parts: Sequence[torch.Tensor], mantissa: float | None = None) -> Fp8RowWeight:
    """Quantise plain projections to e4m3 with one scale a row.

    Args:
        parts: each [N_i, K] float.
        mantissa: restrict scales to mantissa * 2^k; None takes amax / 448.
    """
    weight = torch.cat(list(_same_columns(parts)))
    n, k = weight.shape
    values = torch.empty(n, k, dtype=FP8, device=weight.device)
    scales = torch.empty(n, dtype=torch.float32, device=weight.device)
    for piece in _pieces(n, k):
        rows = weight[piece].float()
        scales[piece] = _row_scale(rows.abs().amax(1), mantissa)
        values[piece] = (rows / scales[piece].unsqueeze(1)).to(FP8)
    return Fp8RowWeight(values, scales)


def prepare_fp8_block(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], multiply_fp8: bool = False) -> Fp8BlockWeight:
    """Stack FP8 projections with scales of 128 x 128 blocks.

    Args:
        parts: pairs (values [N_i, K] float8_e4m3fn, scales [ceil(N_i / 128), ceil(K / 128)] float, multiplied with the
            values). All N_i but the last must be multiples of 128.
        multiply_fp8: see `Fp8BlockWeight`.

    Raises:
        ValueError: shapes do not fit together.
    """
    _same_columns([values for values, _ in parts])
    for index, (values, scales) in enumerate(parts):
        n, k = values.shape
        expected = (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK))
        if tuple(scales.shape) != expected:
            raise ValueError(f"FP8 weight of shape {(n, k)} needs block scales {expected}, got {tuple(scales.shape)}")
        if index + 1 < len(parts) and n % FP8_BLOCK:
            raise ValueError(f"only the last of stacked FP8 projections may have N = {n}, no multiple of {FP8_BLOCK}")
    values = torch.cat([values.view(torch.uint8) for values, _ in parts]).view(FP8)
    return Fp8BlockWeight(values, torch.cat([scales.float() for _, scales in parts]).contiguous(), multiply_fp8)


def _same_columns(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if not parts or len({part.shape[1] for part in parts}) != 1:
        raise ValueError(f"stacked projections must agree in K, got shapes {[tuple(part.shape) for part in parts]}")
    return parts


def _fits_fp8(n: int, k: int) -> bool:
    return n % 16 == 0 and k % 16 == 0


def _pieces(n: int, k: int) -> list[slice]:
    step = max(layout.TILE_ROWS, PIECE // max(k, 1) // layout.TILE_ROWS * layout.TILE_ROWS)
    return [slice(first, min(first + step, n)) for first in range(0, n, step)]


def _row_scale(amax: torch.Tensor, mantissa: float | None) -> torch.Tensor:
    """Smallest scale with which a row of this magnitude stays within e4m3; 1 for a row of zeros."""
    least = amax / FP8_MAX
    if mantissa is not None:
        least = torch.exp2(torch.ceil(torch.log2(least / mantissa))) * mantissa
    return torch.where(amax > 0, least, torch.ones_like(least))


def _fp8_of_nvfp4(packed: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor) -> Fp8RowWeight:
    # Row scales 1.5 * 2^k: the codes 1.5, 3 and 6 times an e4m3 block scale then are e4m3 numbers.
    n, k = packed.shape[0], packed.shape[1] * 2
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=packed.device)
    table = torch.cat([table, -table])
    values = torch.empty(n, k, dtype=FP8, device=packed.device)
    row_scales = torch.empty(n, dtype=torch.float32, device=packed.device)
    for piece in _pieces(n, k):
        codes = torch.stack([packed[piece] & 0xF, packed[piece] >> 4], dim=-1).flatten(-2)
        rows = table[codes.to(torch.int32)].unflatten(-1, (-1, layout.BLOCK)) * scales[piece].float().unsqueeze(-1)
        rows = rows.flatten(-2)
        scale = _row_scale(rows.abs().amax(1), 1.5)
        values[piece] = (rows / scale.unsqueeze(1)).to(FP8)
        row_scales[piece] = scale * factors[piece]
    return Fp8RowWeight(values, row_scales)


def _pack(packed: torch.Tensor, scales: torch.Tensor, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Fragment order of codes [N, K / 2] and scale bytes [N, K / 16], padded with zeros."""
    n, k = packed.shape[0], packed.shape[1] * 2
    rows, columns = layout.padded(n, layout.TILE_ROWS), layout.padded(k, layout.SCALE_COLUMNS)
    tiles = rows // layout.TILE_ROWS
    codes = packed.new_empty(tiles, columns // layout.TILE_COLUMNS, 32, 16)
    shape = (columns // layout.SCALE_COLUMNS, 32, 4) if order == "mma" else (columns // layout.TILE_COLUMNS, 8, 8)
    bits = packed.new_empty(tiles, *shape)
    for piece in _pieces(n, k):
        size = layout.padded(piece.stop - piece.start, layout.TILE_ROWS)
        code = packed.new_zeros(size, columns // 2)
        scale = packed.new_zeros(size, columns // layout.BLOCK)
        code[: piece.stop - piece.start, : k // 2] = packed[piece]
        scale[: piece.stop - piece.start, : k // layout.BLOCK] = scales[piece]
        target = slice(piece.start // layout.TILE_ROWS, piece.start // layout.TILE_ROWS + size // layout.TILE_ROWS)
        codes[target] = layout.pack_codes(code, scale == 0, order)
        bits[target] = layout.pack_scales(scale.view(FP8), order)
    return codes, bits
