"""Order in which the kernels read NVFP4 weights: the register fragments of matrix instructions, tile after tile.

A tile is 16 rows x 64 columns in 512 bytes: 32 lanes x 16 bytes, so that one 16-byte load of a warp brings each lane
exactly its operands of four matrix instructions. Lane 4g + t holds rows g and g + 8; its 32-bit word s feeds
instruction s. There are two orders of the columns:

* "mma": word s of lane 4g + t holds columns 16t + 4s + 2h + i, one NVFP4 block of each row, so a lane needs no other
  scale. The activations follow that order in registers (`mma.m16n8k16`).
* "wgmma": columns 16s + 8h + 2t + i, the order of the matrix itself, so that Hopper's `wgmma` takes the activations
  from shared memory as they are. A lane then needs the scales of four blocks.

A word's 16-bit half i carries four codes p = 2h + r (r: row g or g + 8). Their bits lie where few instructions move
sign to bit 15 and exponent and mantissa to bits 8..6 of a bfloat16, which then is the e2m1 value times 2^-126:

    p   sign  exponent, mantissa   to their place
    0   15    8..6                 mask
    1   12    5..3                 shift left 3, mask
    2   14    2..0                 mask, multiply by 2 + 64, mask
    3   13    11..9                shift right 3 and left 2, masks

Scales are kept as unsigned 5-bit exponent (bias 9) and 3-bit mantissa, every e4m3 number normalised. Code times scale
is exact in bfloat16 (2 and 4 significant bits); the row scales of `Nvfp4Weight` include the power of two that remains.

* "mma": shifted left by 4 and added to 223 << 7 they are the bfloat16 of scale * 2^105; 2^21 remains. Lane 4g + t holds
  for 128 columns 4 bytes: [64-column half][row g, row g + 8].
* "wgmma": at bits 11..4 of a 16-bit half, under the exponent 0x6000, they are the bfloat16 of scale * 2^74; 2^52
  remains. A tile has for each g two words (s = 0, 1 and s = 2, 3) of the bytes [row g, s], [row g, s + 1],
  [row g + 8, s] and [row g + 8, s + 1], rotated left by 4 bits: a mask gives both rows' scales of instruction s, a
  rotation by 8 and a mask those of s + 1.

`linear_order` and `expert_order` say what weights are packed in. The kernels for "wgmma" need Hopper: they are faster
for experts, and no faster than those for "mma" for up to 64 rows of a projection (`kernels/NOTES.md`, 2026-12-02).
"""

from __future__ import annotations

import os

import torch

TILE_ROWS = 16
TILE_COLUMNS = 64
SCALE_COLUMNS = 128
"""Columns that one load of scales covers; the packed K is padded to a multiple of it."""
BLOCK = 16
ROW_FACTOR = {"mma": 2.0**21, "wgmma": 2.0**52}
"""What code * scale in bfloat16, as the kernels form it, still has to be multiplied with."""
SIGN_BIT = (15, 12, 14, 13)
CODE_BIT = (6, 3, 0, 9)


def _order_from(name: str | None) -> str | None:
    if name is not None and name not in ROW_FACTOR:
        raise ValueError(f"SPARKINFER_NVFP4_ORDER must be one of {', '.join(ROW_FACTOR)}, not {name!r}")
    return name


ORDER = _order_from(os.environ.get("SPARKINFER_NVFP4_ORDER"))
"""One order for all weights, or None: each kind's own."""


def linear_order() -> str:
    """Order of the projections' weights."""
    return ORDER or "mma"


def expert_order(device: torch.device) -> str:
    """Order of the experts' weights on a device."""
    if ORDER is not None:
        return ORDER
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return "wgmma" if hopper else "mma"


def padded(size: int, multiple: int) -> int:
    """`size` rounded up."""
    return -(-size // multiple) * multiple


_CODES = {
    # [row tile, r, g, column tile, ...]: extents of a tile's columns, and where t, s, h and i are among them
    "mma": ((4, 4, 2, 2), (4, 5, 6, 7)),
    "wgmma": ((4, 2, 4, 2), (6, 4, 5, 7)),
}


def pack_codes(packed: torch.Tensor, zero: torch.Tensor | None = None, order: str = "mma") -> torch.Tensor:
    """Bring e2m1 codes into fragment order.

    Args:
        packed: [N, K / 2] uint8, the even column in the low nibble; N a multiple of 16, K of 64.
        zero: [N, K / 16] bool, blocks whose codes become 0.
        order: of the columns.

    Returns:
        [N / 16, K / 64, 32, 16] uint8.
    """
    n, k = packed.shape[0], packed.shape[1] * 2
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).view(n, k)
    if zero is not None:
        codes = codes.view(n, -1, BLOCK).masked_fill(zero.unsqueeze(-1), 0).view(n, k)
    extents, (t, s, h, i) = _CODES[order]
    # -> [rows, columns, g, t, s, h, r, i]
    parts = codes.view(n // 16, 2, 8, k // 64, *extents).permute(0, 3, 2, t, s, h, 1, i).to(torch.int32)
    parts = parts.reshape(n // 16, k // 64, 32, 4, 4, 2)
    half = torch.zeros_like(parts[..., 0, :])
    for p, (sign, code) in enumerate(zip(SIGN_BIT, CODE_BIT, strict=True)):
        half |= ((parts[..., p, :] >> 3) << sign) | ((parts[..., p, :] & 7) << code)
    word = half[..., 0] | (half[..., 1] << 16)
    return word.contiguous().view(torch.uint8)


def unpack_codes(tiles: torch.Tensor, order: str = "mma") -> torch.Tensor:
    """The inverse of `pack_codes`: [N, K] uint8 codes below 16."""
    rows, columns = tiles.shape[:2]
    word = tiles.contiguous().view(torch.int32)
    half = torch.stack([word & 0xFFFF, (word >> 16) & 0xFFFF], dim=-1)
    parts = torch.stack(
        [((half >> s & 1) << 3) | (half >> c & 7) for s, c in zip(SIGN_BIT, CODE_BIT, strict=True)], dim=-2
    )
    # [rows, columns, g, t, s, h, r, i] -> [rows, r, g, columns, the columns' dimensions]
    extents, places = _CODES[order]
    inner = [source for _, source in sorted(zip(places, (3, 4, 5, 7), strict=True))]
    parts = parts.view(rows, columns, 8, 4, 4, 2, 2, 2).permute(0, 6, 2, 1, *inner)
    assert tuple(parts.shape[4:]) == extents
    return parts.reshape(rows * 16, columns * 64).to(torch.uint8)


def pack_scales(scales: torch.Tensor, order: str = "mma") -> torch.Tensor:
    """Bring block scales into fragment order.

    Args:
        scales: [N, K / 16] float8_e4m3fn, not negative; N a multiple of 16, K of 128.
        order: of the columns.

    Returns:
        [N / 16, K / 128, 32, 4] uint8; in order "wgmma" [N / 16, K / 64, 8, 8]. Of a zero scale the byte is 0, which
        stands for 2^-9: zero the block's codes.

    Raises:
        ValueError: a scale is negative, infinite or NaN.
    """
    n, blocks = scales.shape
    mantissa, exponent = torch.frexp(scales.float())
    if bool((~(scales.float() >= 0)).any()):
        raise ValueError("a block scale is negative or NaN: the tensor is no NVFP4 weight scale, or it is damaged")
    bits = ((exponent + 8) << 3) | ((mantissa * 16).to(torch.int32) & 7)
    bits = torch.where(mantissa == 0, 0, bits).to(torch.uint8)
    if order == "mma":
        # [rows, r, g, columns, half, t] -> [rows, columns, g, t, half, r]
        bits = bits.view(n // 16, 2, 8, blocks // 8, 2, 4).permute(0, 3, 2, 5, 4, 1)
        return bits.reshape(n // 16, blocks // 8, 32, 4).contiguous()
    # [rows, r, g, columns, pair, s] -> [rows, columns, g, pair, r, s]
    bits = bits.view(n // 16, 2, 8, blocks // 4, 2, 2).permute(0, 3, 2, 4, 1, 5)
    word = bits.reshape(n // 16, blocks // 4, 8, 2, 4).view(torch.int32)
    return ((word << 4) | ((word >> 28) & 0xF)).view(torch.uint8).view(n // 16, blocks // 4, 8, 8)


def unpack_scales(tiles: torch.Tensor, order: str = "mma") -> torch.Tensor:
    """The inverse of `pack_scales`: [N, K / 16] fp32 (2^-9 for a zero scale)."""
    rows, columns = tiles.shape[:2]
    if order == "mma":
        bits = tiles.view(rows, columns, 8, 4, 2, 2).permute(0, 5, 2, 1, 4, 3).reshape(rows * 16, columns * 8)
    else:
        word = tiles.contiguous().view(torch.int32)
        bits = (((word >> 4) & 0x0FFFFFFF) | (word << 28)).view(torch.uint8)
        bits = bits.view(rows, columns, 8, 2, 2, 2).permute(0, 4, 2, 1, 3, 5).reshape(rows * 16, columns * 4)
    value = (bits & 7).float() / 8 + 1
    return torch.ldexp(value, (bits >> 3).to(torch.int32) - 9)


def interleave(part: torch.Tensor) -> torch.Tensor:
    """Rows of [gate; up] so that every tile of 16 holds 8 gates and their 8 ups: one lane then has both of a pair.

    Args:
        part: [2 * I, ...], I a multiple of 8.
    """
    size = part.shape[0] // 2
    return part.view(2, size // 8, 8, *part.shape[1:]).transpose(0, 1).reshape(part.shape)
