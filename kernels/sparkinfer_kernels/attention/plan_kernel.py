"""Triton kernels that turn a step's lengths into work lists, once for all attention layers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _shortest_piece(length, floor, max_items, MIN_PIECE: tl.constexpr):
    """The shortest candidate length with which all rows together have at most `max_items` pieces."""
    base = (tl.sum(length) + max_items - 1) // max_items
    factor = tl.arange(0, 32)
    piece = tl.maximum((base * (8 + factor) + 7) // 8, MIN_PIECE)
    each = tl.maximum(piece[:, None], floor[None, :])
    count = tl.sum((length[None, :] + each - 1) // each, axis=1)
    return tl.maximum(tl.min(tl.where(count <= max_items, piece, tl.max(length))), 1)


@triton.jit
def plan_decode_kernel(
    positions_ptr,
    items_ptr,
    pieces_ptr,
    n,
    max_items,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    MIN_PIECE: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Cut all rows' contexts into at most `max_items` (at least n) pieces of nearly equal length.

    Candidates of the piece length grow by eighths of total / max_items; the shortest one that fits wins, and each row
    then spreads its tokens evenly over its pieces, in whole blocks of 16. PIECE > 0 fixes the piece length instead: a
    row is then cut by its own length only.
    """
    row = tl.arange(0, ROWS)
    length = tl.load(positions_ptr + row, mask=row < n, other=-1) + 1
    floor = (length + MAX_PIECES - 1) // MAX_PIECES
    if PIECE:  # noqa: SIM108 - decided at compilation
        chosen = PIECE
    else:
        chosen = _shortest_piece(length, floor, max_items, MIN_PIECE)
    pieces = (length + tl.maximum(chosen, floor) - 1) // tl.maximum(tl.maximum(chosen, floor), 1)
    share = (length + tl.maximum(pieces, 1) - 1) // tl.maximum(pieces, 1)
    share = tl.maximum((share + 15) // 16 * 16, 16)
    pieces = (length + share - 1) // share
    end = tl.cumsum(pieces, axis=0)
    first = end - pieces
    tl.store(pieces_ptr + 2 * row, first, mask=row < n)
    tl.store(pieces_ptr + 2 * row + 1, pieces, mask=row < n)
    for number in range(0, tl.max(pieces)):
        item = items_ptr + 4 * (first + number)
        live = number < pieces
        tl.store(item, row, mask=live)
        tl.store(item + 1, number * share, mask=live)
        tl.store(item + 2, tl.minimum((number + 1) * share, length), mask=live)
        tl.store(item + 3, number, mask=live)
    slot = tl.arange(0, ITEMS)
    tl.store(items_ptr + 4 * slot, -1, mask=(slot >= tl.sum(pieces)) & (slot < max_items))


@triton.jit
def plan_prefill_kernel(
    cu_seqlens_ptr, tiles_ptr, n, max_tiles, SEQUENCES: tl.constexpr, TILES: tl.constexpr, M: tl.constexpr
):
    """List the query tiles of all sequences, tiles with the longest context first within a sequence."""
    sequence = tl.arange(0, SEQUENCES)
    live = sequence < n
    first = tl.load(cu_seqlens_ptr + sequence, mask=live, other=0)
    length = tl.load(cu_seqlens_ptr + sequence + 1, mask=live, other=0) - first
    tiles = (length + M - 1) // M
    end = tl.cumsum(tiles, axis=0)
    for number in range(0, tl.max(tiles)):
        place = tiles_ptr + 2 * (end - 1 - number)
        mask = number < tiles
        tl.store(place, sequence, mask=mask)
        tl.store(place + 1, number, mask=mask)
    slot = tl.arange(0, TILES)
    tl.store(tiles_ptr + 2 * slot, -1, mask=(slot >= tl.sum(tiles)) & (slot < max_tiles))
