"""Order in which the skinny kernel reads NVFP4 weights: the register fragments of `mma.m16n8k16`, tile after tile.

A tile is 16 rows x 64 columns in 512 bytes: 32 lanes x 16 bytes, so that one 16-byte load of a warp brings each lane
exactly its operands of four matrix instructions. Lane 4g + t holds rows g and g + 8, columns 16t .. 16t + 15 (one NVFP4
block of each row: a lane needs no other scale); its 32-bit word s feeds instruction s and holds columns
16t + 4s + 2h + i. The column order within an instruction is free as long as the activations follow it.

A word's 16-bit half i carries four codes p = 2h + r (r: row g or g + 8). Their bits lie where few instructions move
sign to bit 15 and exponent and mantissa to bits 8..6 of a bfloat16, which then is the e2m1 value times 2^-126:

    p   sign  exponent, mantissa   to their place
    0   15    8..6                 mask
    1   12    5..3                 shift left 3, mask
    2   14    2..0                 mask, multiply by 2 + 64, mask
    3   13    11..9                shift right 3 and left 2, masks

Scales are kept as unsigned 5-bit exponent (bias 9) and 3-bit mantissa, every e4m3 number normalised: shifted left by 4
and added to 223 << 7 they are the bfloat16 of scale * 2^105. Code times scale is exact in bfloat16 (2 and 4 significant
bits); what remains is the factor 2^21, which the row scales of `Nvfp4Weight` include. Lane 4g + t holds for 128 columns
4 bytes: [64-column half][row g, row g + 8].
"""

from __future__ import annotations

import torch

TILE_ROWS = 16
TILE_COLUMNS = 64
SCALE_COLUMNS = 128
"""Columns that one load of scales covers; the packed K is padded to a multiple of it."""
BLOCK = 16
ROW_FACTOR = 2.0**21
"""What code * scale in bfloat16, as the kernels form it, still has to be multiplied with."""
SIGN_BIT = (15, 12, 14, 13)
CODE_BIT = (6, 3, 0, 9)


def padded(size: int, multiple: int) -> int:
    """`size` rounded up."""
    return -(-size // multiple) * multiple


def pack_codes(packed: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
    """Bring e2m1 codes into fragment order.

    Args:
        packed: [N, K / 2] uint8, the even column in the low nibble; N a multiple of 16, K of 64.
        zero: [N, K / 16] bool, blocks whose codes become 0.

    Returns:
        [N / 16, K / 64, 32, 16] uint8.
    """
    n, k = packed.shape[0], packed.shape[1] * 2
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).view(n, k)
    if zero is not None:
        codes = codes.view(n, -1, BLOCK).masked_fill(zero.unsqueeze(-1), 0).view(n, k)
    # [rows, r, g, columns, t, s, h, i] -> [rows, columns, g, t, s, h, r, i]
    parts = codes.view(n // 16, 2, 8, k // 64, 4, 4, 2, 2).permute(0, 3, 2, 4, 5, 6, 1, 7).to(torch.int32)
    parts = parts.reshape(n // 16, k // 64, 32, 4, 4, 2)
    half = torch.zeros_like(parts[..., 0, :])
    for p, (sign, code) in enumerate(zip(SIGN_BIT, CODE_BIT, strict=True)):
        half |= ((parts[..., p, :] >> 3) << sign) | ((parts[..., p, :] & 7) << code)
    word = half[..., 0] | (half[..., 1] << 16)
    return word.contiguous().view(torch.uint8)


def unpack_codes(tiles: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_codes`: [N, K] uint8 codes below 16."""
    rows, columns = tiles.shape[:2]
    word = tiles.contiguous().view(torch.int32)
    half = torch.stack([word & 0xFFFF, (word >> 16) & 0xFFFF], dim=-1)
    parts = torch.stack(
        [((half >> s & 1) << 3) | (half >> c & 7) for s, c in zip(SIGN_BIT, CODE_BIT, strict=True)], dim=-2
    )
    # [rows, columns, g, t, s, h, r, i] -> [rows, r, g, columns, t, s, h, i]
    parts = parts.view(rows, columns, 8, 4, 4, 2, 2, 2).permute(0, 6, 2, 1, 3, 4, 5, 7)
    return parts.reshape(rows * 16, columns * 64).to(torch.uint8)


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """Bring block scales into fragment order.

    Args:
        scales: [N, K / 16] float8_e4m3fn, not negative; N a multiple of 16, K of 128.

    Returns:
        [N / 16, K / 128, 32, 4] uint8. Of a zero scale the byte is 0, which stands for 2^-9: zero the block's codes.

    Raises:
        ValueError: a scale is negative, infinite or NaN.
    """
    n, blocks = scales.shape
    mantissa, exponent = torch.frexp(scales.float())
    if bool((~(scales.float() >= 0)).any()):
        raise ValueError("a block scale is negative or NaN: the tensor is no NVFP4 weight scale, or it is damaged")
    bits = ((exponent + 8) << 3) | ((mantissa * 16).to(torch.int32) & 7)
    bits = torch.where(mantissa == 0, 0, bits).to(torch.uint8)
    # [rows, r, g, columns, half, t] -> [rows, columns, g, t, half, r]
    bits = bits.view(n // 16, 2, 8, blocks // 8, 2, 4).permute(0, 3, 2, 5, 4, 1)
    return bits.reshape(n // 16, blocks // 8, 32, 4).contiguous()


def unpack_scales(tiles: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_scales`: [N, K / 16] fp32 (2^-9 for a zero scale)."""
    rows, columns = tiles.shape[:2]
    bits = tiles.view(rows, columns, 8, 4, 2, 2).permute(0, 5, 2, 1, 4, 3).reshape(rows * 16, columns * 8)
    value = (bits & 7).float() / 8 + 1
    return torch.ldexp(value, (bits >> 3).to(torch.int32) - 9)


def interleave(part: torch.Tensor) -> torch.Tensor:
    """Rows of [gate; up] so that every tile of 16 holds 8 gates and their 8 ups: one lane then has both of a pair.

    Args:
        part: [2 * I, ...], I a multiple of 8.
    """
    size = part.shape[0] // 2
    return part.view(2, size // 8, 8, *part.shape[1:]).transpose(0, 1).reshape(part.shape)
