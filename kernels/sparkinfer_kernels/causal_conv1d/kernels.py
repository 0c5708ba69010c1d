"""Triton kernels of the depthwise causal convolution with SiLU, width 4, channels last."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def conv_prefill_kernel(
    proj, window, slots, cu_seqlens, starts, weight, mixed,
    chunk_sequence, chunk_token, chunk_length, chunk_checkpoint,
    checkpoint_sequence, checkpoint_position, checkpoint_window,
    row_stride, window_stride, checkpoint_stride, checkpoints,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of one head: convolution, SiLU, and for queries and keys length 1 (queries also D**-0.5)."""
    CHANNELS: tl.constexpr = (2 * HK + HV) * D
    PARTS: tl.constexpr = CHUNK // BLOCK
    head = tl.program_id(0)
    chunk = tl.program_id(1) // PARTS
    part = tl.program_id(1) % PARTS
    sequence = tl.load(chunk_sequence + chunk)
    if sequence < 0:
        return
    length = tl.load(chunk_length + chunk)
    if part * BLOCK >= length:
        return
    token = tl.load(chunk_token + chunk)
    first_row = tl.load(cu_seqlens + sequence)
    fresh = tl.load(starts + sequence) == 0
    old = window + tl.load(slots + sequence).to(tl.int64) * window_stride
    channel = head * D + tl.arange(0, D)

    i = part * BLOCK + tl.arange(0, BLOCK)
    real = (i < length)[:, None]
    row = token + i
    before = row - first_row
    y = tl.zeros([BLOCK, D], tl.float32)
    for tap in tl.static_range(4):
        source = before - 3 + tap
        x = tl.load(
            proj + (row - 3 + tap).to(tl.int64)[:, None] * row_stride + channel[None, :],
            mask=real & (source >= 0)[:, None],
            other=0.0,
        ).to(tl.float32)
        if token + part * BLOCK - first_row < 3:
            seen = real & (source < 0)[:, None] & (fresh == 0)
            at = old + (source + 3)[:, None] * CHANNELS + channel[None, :]
            x += tl.load(at, mask=seen, other=0.0).to(tl.float32)
        y += x * tl.load(weight + tap * CHANNELS + channel)[None, :]
    y = silu(y)
    if head < 2 * HK:
        scale = tl.where(head < HK, D**-0.5, 1.0)
        y *= (tl.rsqrt(tl.sum(y * y, 1) + 1e-6) * scale)[:, None]
    tl.store(mixed + row.to(tl.int64)[:, None] * CHANNELS + channel[None, :], y.to(mixed.dtype.element_ty), mask=real)

    if CHECKPOINTS:  # noqa: SIM102 - decided at compile time
        if part == 0:
            n = tl.load(chunk_checkpoint + chunk)
            start = tl.load(starts + sequence)
            stop = start + token + length - first_row
            more = n >= 0
            while more:
                done = tl.load(checkpoint_position + n) - start
                save_window(
                    proj, old, checkpoint_window + n.to(tl.int64) * checkpoint_stride, first_row, done, row_stride,
                    channel, fresh, CHANNELS=CHANNELS,
                )  # fmt: skip
                n += 1
                more = n < checkpoints
                if more:
                    more = tl.load(checkpoint_sequence + n) == sequence
                if more:
                    more = tl.load(checkpoint_position + n) <= stop


@triton.jit
def save_window(proj, old, new, first_row, done, row_stride, channel, fresh, CHANNELS: tl.constexpr):
    """Write at `new` [3, CHANNELS] the last three inputs after the first `done` tokens of a pass."""
    j = tl.arange(0, 4)
    source = done - 3 + j
    wanted = (j < 3)[:, None]
    new_value = tl.load(
        proj + (first_row + source).to(tl.int64)[:, None] * row_stride + channel[None, :],
        mask=wanted & (source >= 0)[:, None],
        other=0.0,
    )
    old_value = tl.load(
        old + (source + 3)[:, None] * CHANNELS + channel[None, :],
        mask=wanted & (source < 0)[:, None] & (fresh == 0),
        other=0.0,
    )
    # `new` may be `old`: no element may be written before all of them are read.
    tl.debug_barrier()
    value = tl.where((source >= 0)[:, None], new_value, old_value)
    tl.store(new + j[:, None] * CHANNELS + channel[None, :], value, mask=wanted)
