"""Chunk tables of a prefill pass, made on the device."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def plan_kernel(
    cu_seqlens, starts, checkpoint_sequence, checkpoint_position,
    chunk_sequence, chunk_token, chunk_length, chunk_checkpoint, first_chunk, active,
    tokens, sequences, chunks, checkpoints,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, SEQUENCES: tl.constexpr, CHECKPOINTS: tl.constexpr,
):  # fmt: skip
    """Chunk tables of a pass; each program fills BLOCK entries. SEQUENCES, CHECKPOINTS: powers of two that hold all."""
    r = tl.arange(0, SEQUENCES)
    real = r < sequences
    begin_row = tl.load(cu_seqlens + r, mask=real, other=0)
    end_row = tl.load(cu_seqlens + r + 1, mask=real, other=0)
    length = end_row - begin_row
    start = tl.load(starts + r, mask=real, other=0)
    count = tl.where(length > 0, (start + length - 1) // CHUNK - start // CHUNK + 1, 0)
    stop = tl.cumsum(count, 0)
    used_chunks = tl.sum(count, 0)
    used_rows = tl.max(end_row, 0)
    if tl.program_id(0) == 0:
        tl.store(first_chunk + r, stop - count, mask=real)
        tl.store(first_chunk + sequences, used_chunks)
        tl.store(active, used_chunks + (tokens - used_rows + CHUNK - 1) // CHUNK)
        tl.store(active + 1, tl.sum((length > 0).to(tl.int32), 0))

    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = (c[:, None] >= (stop - count)[None, :]) & (c[:, None] < stop[None, :])
    s = tl.sum(tl.where(mine, r[None, :], 0), 1)
    first = tl.sum(tl.where(mine, (stop - count)[None, :], 0), 1)
    seq_start = tl.sum(tl.where(mine, start[None, :], 0), 1)
    seq_row = tl.sum(tl.where(mine, begin_row[None, :], 0), 1)
    seq_length = tl.sum(tl.where(mine, length[None, :], 0), 1)
    edge = (seq_start // CHUNK + c - first) * CHUNK
    begin = tl.maximum(seq_start, edge)
    end = tl.minimum(seq_start + seq_length, edge + CHUNK)
    used = c < used_chunks
    spare_row = tl.minimum(used_rows + (c - used_chunks) * CHUNK, tokens)
    spare_length = tl.minimum(tokens - spare_row, CHUNK)
    inside = c < chunks
    tl.store(chunk_sequence + c, tl.where(used, s, -1), mask=inside)
    tl.store(chunk_token + c, tl.where(used, seq_row + begin - seq_start, spare_row), mask=inside)
    tl.store(chunk_length + c, tl.where(used, end - begin, spare_length), mask=inside)
    if CHECKPOINTS > 0:
        n = tl.arange(0, CHECKPOINTS)
        owner = tl.load(checkpoint_sequence + n, mask=n < checkpoints, other=-1)
        position = tl.load(checkpoint_position + n, mask=n < checkpoints, other=0)
        here = (owner[None, :] == s[:, None]) & used[:, None]
        here = here & (position[None, :] > begin[:, None]) & (position[None, :] <= end[:, None])
        lowest = tl.min(tl.where(here, n[None, :], CHECKPOINTS), 1)
        tl.store(chunk_checkpoint + c, tl.where(lowest < CHECKPOINTS, lowest, -1), mask=inside)
    else:
        tl.store(chunk_checkpoint + c, tl.full([BLOCK], -1, tl.int32), mask=inside)
