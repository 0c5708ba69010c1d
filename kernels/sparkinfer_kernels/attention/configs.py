"""Tile sizes of the attention kernels by architecture: measured choices, nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tile sizes and launch parameters of one kernel."""

    tokens: int
    """KV tokens of a tile."""
    warps: int
    stages: int
    rows: int = 16
    """Query rows of a tile (prefill only: decode pads a key head's query heads to 16)."""
    programs: int = 2
    """Programs that one multiprocessor runs at a time (decode only: sets how finely a step is cut)."""
    wgmma: bool = False
    """Prefill with a bf16 cache and heads of 256: the kernel written for Hopper, whose tiles are 128 x 64."""


DECODE: dict[int, TileConfig] = {
    90: TileConfig(tokens=32, warps=4, stages=3, programs=2),
    120: TileConfig(tokens=32, warps=4, stages=2, programs=1),
}
DECODE_MANY: dict[int, TileConfig] = {90: TileConfig(tokens=64, warps=4, stages=3, programs=1)}
"""Of more than `MANY_ROWS` rows, where it differs."""
MANY_ROWS = 16
DECODE_FP8: dict[int, TileConfig] = {
    90: TileConfig(tokens=64, warps=4, stages=3, programs=2),
    120: TileConfig(tokens=32, warps=4, stages=2, programs=1),
}
PREFILL: dict[int, TileConfig] = {
    90: TileConfig(tokens=64, warps=8, stages=2, rows=128, wgmma=True),
    120: TileConfig(tokens=32, warps=8, stages=2, rows=64),
}
MIN_PIECE = 64
"""Fewest tokens worth a piece of their own in split decode."""
FIXED_PIECE = 256
"""Tokens of a piece where rows must not depend on each other."""
MIN_SPAN = 256
"""Fewest context tokens of a prompt's tile worth a program of their own."""
MAX_PIECES = 32
"""Most pieces of one row: what the combine holds in registers."""


def nearest(table: dict[int, TileConfig], arch: int) -> TileConfig:
    """The entry of the newest listed architecture not above `arch` (compute capability times ten)."""
    known = [number for number in table if number <= arch]
    return table[max(known)] if known else table[min(table)]
