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
def _tiles_of(cu_seqlens_ptr, starts_ptr, place, n, SEQUENCES: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr):
    """The query tile at each `place` of the list: (sequence or -1, tile within it, its context's tokens).

    A tile is M rows of one key head: its GROUP query heads of one token, then those of the next. Within a sequence the
    tiles with the longest context come first.
    """
    sequence = tl.arange(0, SEQUENCES)
    live = sequence < n
    first = tl.load(cu_seqlens_ptr + sequence, mask=live, other=0)
    length = tl.load(cu_seqlens_ptr + sequence + 1, mask=live, other=0) - first
    start = tl.load(starts_ptr + sequence, mask=live, other=0)
    end = tl.cumsum((length * GROUP + M - 1) // M, axis=0)
    begin = end - (length * GROUP + M - 1) // M
    mine = (place[:, None] >= begin[None, :]) & (place[:, None] < end[None, :])
    owner = tl.sum(tl.where(mine, sequence[None, :], 0), axis=1)
    tile = tl.sum(tl.where(mine, end[None, :] - 1 - place[:, None], 0), axis=1)
    new = tl.sum(tl.where(mine, length[None, :], 0), axis=1)
    cached = tl.sum(tl.where(mine, start[None, :], 0), axis=1)
    used = place < tl.max(end)
    context = tl.where(used, cached + tl.minimum((tile * M + M - 1) // GROUP + 1, new), 0)
    return tl.where(used, owner, -1), tile, context


@triton.jit
def plan_tiles_kernel(
    cu_seqlens_ptr,
    starts_ptr,
    items_ptr,
    n,
    max_items,
    TILES: tl.constexpr,
    SEQUENCES: tl.constexpr,
    M: tl.constexpr,
    GROUP: tl.constexpr,
):
    """List the query tiles of all sequences with their whole contexts, TILES of them a program."""
    place = tl.program_id(0) * TILES + tl.arange(0, TILES)
    owner, tile, context = _tiles_of(cu_seqlens_ptr, starts_ptr, place, n, SEQUENCES, M, GROUP)
    item, live = items_ptr + 4 * place, place < max_items
    tl.store(item, owner, mask=live)
    tl.store(item + 1, tile, mask=live)
    tl.store(item + 2, 0, mask=live)
    tl.store(item + 3, context, mask=live)


@triton.jit
def plan_spans_kernel(
    cu_seqlens_ptr,
    starts_ptr,
    items_ptr,
    spans_ptr,
    n,
    max_tiles,
    max_items,
    one_wave,
    TILES: tl.constexpr,
    ITEMS: tl.constexpr,
    N: tl.constexpr,
    MIN_SPAN: tl.constexpr,
    SEQUENCES: tl.constexpr,
    M: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Cut the contexts of few query tiles into up to `one_wave` items of nearly equal length, which all run at a time.

    Candidates of the length grow by eighths; the shortest that gives few enough items wins. A tile of one item is
    finished by it; so is each tile where they are more than half of `one_wave`: a second wave costs more than it saves.
    """
    place = tl.arange(0, TILES)
    owner, tile, context = _tiles_of(cu_seqlens_ptr, starts_ptr, place, n, SEQUENCES, M, GROUP)
    tiles = tl.sum((owner >= 0).to(tl.int32))
    base = (tl.sum(context) + one_wave - 1) // one_wave
    span = tl.maximum((base * (8 + tl.arange(0, 32)) + 7) // 8, MIN_SPAN)
    span = (span + N - 1) // N * N
    count = tl.sum((context[:, None] + span[None, :] - 1) // span[None, :], axis=0)
    longest = tl.maximum(tl.max(context), N)
    chosen = tl.min(tl.where((count <= one_wave) & (2 * tiles <= one_wave), span, longest))
    pieces = (context + chosen - 1) // chosen
    share = (context + tl.maximum(pieces, 1) - 1) // tl.maximum(pieces, 1)
    share = tl.maximum((share + N - 1) // N * N, N)
    pieces = (context + share - 1) // share
    first = tl.cumsum(pieces, axis=0) - pieces
    row, live = spans_ptr + 4 * place, place < max_tiles
    tl.store(row, owner, mask=live)
    tl.store(row + 1, tile, mask=live)
    tl.store(row + 2, first, mask=live)
    tl.store(row + 3, pieces, mask=live)
    for number in range(0, tl.max(pieces)):
        item, has = items_ptr + 4 * (first + number), number < pieces
        tl.store(item, owner, mask=has)
        tl.store(item + 1, tile, mask=has)
        tl.store(item + 2, number * share, mask=has)
        tl.store(item + 3, tl.minimum((number + 1) * share, context), mask=has)
    slot = tl.arange(0, ITEMS)
    tl.store(items_ptr + 4 * slot, -1, mask=(slot >= tl.sum(pieces)) & (slot < max_items))
