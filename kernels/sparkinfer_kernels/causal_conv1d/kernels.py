"""Triton kernels of the depthwise causal convolution with SiLU, width 4, channels last."""

from __future__ import annotations

import triton
import triton.language as tl

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
"""The interpreter knows no assembly."""


@triton.jit
def silu(x):
    """x * sigmoid(x), fp32, to some 2^-21: a third of the instructions of an exponential and a division that care for
    denormals."""
    if COMPILED:
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * -1.4426950408889634], tl.float32, is_pure=True, pack=1
        )
        return x * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + e], tl.float32, is_pure=True, pack=1
        )
    return x * tl.sigmoid(x)


@triton.jit
def conv_prefill_kernel(
    proj, window, slots, cu_seqlens, starts, weight, mixed,
    chunk_sequence, chunk_token, chunk_length, chunk_checkpoint,
    checkpoint_sequence, checkpoint_position, checkpoint_window,
    row_stride, window_stride, checkpoint_stride, checkpoints,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, CHECKPOINTS: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of HEADS heads: convolution, SiLU, and for queries and keys length 1 (queries also D**-0.5).

    Goes from token to token with the last three inputs in registers, so every input is loaded once.
    """
    CHANNELS: tl.constexpr = (2 * HK + HV) * D
    PARTS: tl.constexpr = CHUNK // BLOCK
    group = tl.program_id(0)
    chunk = tl.program_id(1) // PARTS
    part = tl.program_id(1) % PARTS
    sequence = tl.load(chunk_sequence + chunk)
    if sequence < 0:
        return
    length = tl.load(chunk_length + chunk)
    token = tl.load(chunk_token + chunk)
    first_row = tl.load(cu_seqlens + sequence)
    fresh = tl.load(starts + sequence) == 0
    old = window + tl.load(slots + sequence).to(tl.int64) * window_stride
    head = group * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, D)[None, :]
    channel = head * D + lane
    w0 = tl.load(weight + channel)
    w1 = tl.load(weight + CHANNELS + channel)
    w2 = tl.load(weight + 2 * CHANNELS + channel)
    w3 = tl.load(weight + 3 * CHANNELS + channel)

    row = token + part * BLOCK
    before = row - first_row
    at = proj + row.to(tl.int64) * row_stride + channel
    some = part * BLOCK < length
    x0 = tl.load(at - 3 * row_stride, mask=(channel >= 0) & some & (before >= 3), other=0.0).to(tl.float32)
    x1 = tl.load(at - 2 * row_stride, mask=(channel >= 0) & some & (before >= 2), other=0.0).to(tl.float32)
    x2 = tl.load(at - row_stride, mask=(channel >= 0) & some & (before >= 1), other=0.0).to(tl.float32)
    if some & (before < 3) & (fresh == 0):
        seen = (channel >= 0) & (before <= 2)
        x0 += tl.load(old + before * CHANNELS + channel, mask=seen, other=0.0).to(tl.float32)
        x1 += tl.load(old + (before + 1) * CHANNELS + channel, mask=seen & (before <= 1), other=0.0).to(tl.float32)
        x2 += tl.load(old + (before + 2) * CHANNELS + channel, mask=seen & (before <= 0), other=0.0).to(tl.float32)
    to = mixed + ((chunk.to(tl.int64) * (2 * HK + HV) + head) * CHUNK + part * BLOCK) * D + lane
    scale = tl.where(group * HEADS < HK, D**-0.5, 1.0)
    for t in tl.static_range(BLOCK):
        real = part * BLOCK + t < length
        x3 = tl.load(at + t * row_stride, mask=(channel >= 0) & real, other=0.0).to(tl.float32)
        y = silu(x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3)
        if group * HEADS < 2 * HK:
            y *= (tl.rsqrt(tl.sum(y * y, 1) + 1e-6) * scale)[:, None]
        tl.store(to + t * D, tl.where(real, y, 0.0).to(mixed.dtype.element_ty))
        x0, x1, x2 = x1, x2, x3

    if CHECKPOINTS:  # noqa: SIM102 - decided at compile time
        if part == 0:
            n = tl.load(chunk_checkpoint + chunk)
            start = tl.load(starts + sequence)
            stop = start + token + length - first_row
            more = n >= 0
            while more:
                done = tl.load(checkpoint_position + n) - start
                saved = checkpoint_window + n.to(tl.int64) * checkpoint_stride
                flat = group * (HEADS * D) + tl.arange(0, HEADS * D)
                save_window(proj, old, saved, first_row, done, row_stride, flat, fresh, CHANNELS)
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
