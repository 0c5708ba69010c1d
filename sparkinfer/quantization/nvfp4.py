"""NVFP4: e2m1 weights with an e4m3 scale for 16 neighbours and an fp32 scale for the matrix.

Format: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149); layout of ModelOpt. Choice of block
scales: exhaustive over the neighbourhood of amax / 6, which holds the choice of "Four Over Six" (arXiv 2512.02010).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 16
"""Columns under one scale."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
SCALE_TOP = 256.0
"""The largest block scale that amax / 6 may give: 1.5 times as much, for a block that ends at 4, is below 448 then."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0 to 7."""
STEPS = range(-3, 8)
"""Candidates of a block's scale: this many e4m3 numbers beside amax / 6. Below: clipping; above: the top code is 4."""
SMALLEST = torch.finfo(torch.float32).tiny
"""The least fp32 scale, the smallest normal number: less may become zero, and its reciprocal infinite."""
PIECE = 1 << 22
"""Elements handled at once, so that the search needs little memory."""


@dataclass(frozen=True, slots=True)
class Nvfp4Parts:
    """One quantised matrix [N, K]; see the package's docstring for the layout."""

    packed: torch.Tensor
    """[N, K / 2] uint8."""
    scales: torch.Tensor
    """[N, K / 16] float8_e4m3fn."""
    global_scale: torch.Tensor
    """[] fp32."""
    input_scale: torch.Tensor | None = None
    """[] fp32, or None where activations stay in 16 bits."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the matrix that the parts stand for."""
        return self.packed.shape[0], self.packed.shape[1] * 2

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[N, K] in `dtype`, rounded once from fp32."""
        return dequantise(self.packed, self.scales, self.global_scale, dtype)

    def to(self, device: torch.device | str) -> Nvfp4Parts:
        """The same on another device."""
        given = None if self.input_scale is None else self.input_scale.to(device)
        return Nvfp4Parts(self.packed.to(device), self.scales.to(device), self.global_scale.to(device), given)

    def pick_rows(self, rows: torch.Tensor) -> Nvfp4Parts:
        """The matrix of the given rows ([n] int64), in their order."""
        scales = self.scales.view(torch.uint8).index_select(0, rows).view(torch.float8_e4m3fn)
        return Nvfp4Parts(self.packed.index_select(0, rows), scales, self.global_scale, self.input_scale)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """[..., K] uint8 codes below 16 to [..., K / 2] uint8, the even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """[..., K / 2] uint8 to [..., K] codes below 16."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def encode(values: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 codes (uint8) of any float values; ties go to the even code, magnitudes above 6 to 6, -0 to 8."""
    size = values.abs()
    code = (size > 0.25).to(torch.uint8)
    for bound, closed in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += size >= bound if closed else size > bound
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of e2m1 codes below 16."""
    table = torch.tensor(E2M1_VALUES + tuple(-value for value in E2M1_VALUES), device=codes.device)
    return table[codes.to(torch.int32)]


def dequantise(
    packed: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor | float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The matrix [N, K] of packed codes [N, K / 2], e4m3 scales [N, K / 16] and the global scale.

    (code * scale) is exact in fp32; its product with the global scale is rounded to fp32, then to `dtype`.
    """
    rows, columns = packed.shape[0], packed.shape[1] * 2
    out = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    step = max(1, PIECE // max(columns, 1))
    for first in range(0, rows, step):
        piece = slice(first, first + step)
        values = decode(unpack(packed[piece])).unflatten(-1, (-1, BLOCK))
        values *= scales[piece].float().unsqueeze(-1)
        out[piece] = values.flatten(-2).mul_(global_scale).to(dtype)
    return out


def global_scale_for(amax: float) -> float:
    """The global scale for weights up to `amax` in magnitude; 1 for a matrix of zeros."""
    return max(amax / (E2M1_MAX * SCALE_TOP), SMALLEST) if amax > 0 else 1.0


def input_scale_for(amax: float) -> float:
    """ModelOpt's input scale for activations up to `amax` in magnitude."""
    return max(amax / (E2M1_MAX * E4M3_MAX), SMALLEST) if amax > 0 else 1.0


def quantise(
    weight: torch.Tensor,
    global_scale: float | None = None,
    input_scale: float | None = None,
    importance: torch.Tensor | None = None,
    search: bool = True,
) -> Nvfp4Parts:
    """Quantise a matrix.

    Args:
        weight: [N, K] float, K a multiple of 16.
        global_scale: None takes the matrix's own, from its largest magnitude.
        input_scale: handed through.
        importance: [K] fp32 weights of the squared error by column (mean square of the layer's input), None for 1.
        search: choose each block's scale for the least squared error; otherwise amax / 6, rounded.

    Raises:
        ValueError: K is no multiple of 16, or the matrix holds NaN or infinity.
    """
    rows, columns = weight.shape
    if columns % BLOCK:
        raise ValueError(f"{columns} columns are no multiple of {BLOCK}")
    amax = float(weight.abs().max()) if weight.numel() else 0.0
    if not torch.isfinite(torch.tensor(amax)):
        raise ValueError("it holds NaN or infinity")
    scale = global_scale_for(amax) if global_scale is None else global_scale
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, columns // BLOCK, dtype=torch.float8_e4m3fn, device=weight.device)
    factors = None if importance is None else importance.to(weight.device, torch.float32).view(-1, BLOCK)
    step = max(1, PIECE // max(columns, 1))
    for first in range(0, rows, step):
        piece = slice(first, first + step)
        blocks = (weight[piece].float() / scale).unflatten(-1, (-1, BLOCK))
        chosen = _block_scales(blocks, factors, search)
        codes = encode(blocks / chosen.float().unsqueeze(-1))
        packed[piece], scales[piece] = pack(codes.flatten(-2)), chosen
    given = None if input_scale is None else torch.tensor(input_scale, device=weight.device)
    return Nvfp4Parts(packed, scales, torch.tensor(scale, device=weight.device), given)


def _block_scales(blocks: torch.Tensor, importance: torch.Tensor | None, search: bool) -> torch.Tensor:
    """e4m3 scales [rows, K / 16] of blocks [rows, K / 16, 16] that are divided by the global scale already."""
    plain = (blocks.abs().amax(-1) / E2M1_MAX).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    # A zero scale would lose the block; the smallest positive one serves a block of zeros as well as any other.
    plain = plain.clamp(min=1)
    if not search:
        return plain.view(torch.float8_e4m3fn)
    best = plain.clone()
    least = torch.full(plain.shape, torch.inf, device=blocks.device)
    for step in STEPS:
        # Positive e4m3 numbers are in the order of their codes; 0x7e is 448, 0x7f is NaN.
        codes = (plain.to(torch.int16) + step).clamp_(1, 0x7E).to(torch.uint8)
        scale = codes.view(torch.float8_e4m3fn).float().unsqueeze(-1)
        error = (_nearest(blocks / scale) * scale - blocks).square_()
        if importance is not None:
            error *= importance
        total = error.sum(-1)
        better = total < least
        least = torch.where(better, total, least)
        best = torch.where(better, codes, best)
    return best.view(torch.float8_e4m3fn)


def _nearest(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e2m1 value, as `encode` does, without the codes."""
    size = values.abs()
    gap = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((size / gap).round_() * gap).clamp_(max=E2M1_MAX).copysign_(values)
