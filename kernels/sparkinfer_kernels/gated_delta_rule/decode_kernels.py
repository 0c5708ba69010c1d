"""The decode step of a Gated DeltaNet layer as one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparkinfer_kernels.causal_conv1d.kernels import silu
from sparkinfer_kernels.gated_delta_rule.layout import HEAD_DIM, Heads
from sparkinfer_kernels.gated_delta_rule.tuned import Launch


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact to fp32 rounding also for very negative x."""
    e = tl.exp(tl.minimum(x, 20.0))
    return tl.where(x > 20.0, x, tl.where(e < 0.01, e * (1.0 - e * (0.5 - e * 0.3333333)), tl.log(1.0 + e)))


@triton.jit
def past_inputs(window, channel, CHANNELS: tl.constexpr):
    """The three inputs of `channel` before this one, oldest first."""
    return (
        tl.load(window + channel),
        tl.load(window + CHANNELS + channel),
        tl.load(window + 2 * CHANNELS + channel),
    )


@triton.jit
def convolved(oldest, middle, newest, x, weight, channel, CHANNELS: tl.constexpr):
    """Convolution and SiLU at x, fp32."""
    y = oldest.to(tl.float32) * tl.load(weight + channel)
    y += middle.to(tl.float32) * tl.load(weight + CHANNELS + channel)
    y += newest.to(tl.float32) * tl.load(weight + 2 * CHANNELS + channel)
    y += x.to(tl.float32) * tl.load(weight + 3 * CHANNELS + channel)
    return silu(y)


@triton.jit
def move_window(window, middle, newest, x, channel, mask, CHANNELS: tl.constexpr):
    tl.store(window + channel, middle, mask=mask)
    tl.store(window + CHANNELS + channel, newest, mask=mask)
    tl.store(window + 2 * CHANNELS + channel, x, mask=mask)


@triton.jit
def add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def advance_columns(
    state, s, x, window, weight, k, q, agreement, decay, beta, column, channel, CHANNELS: tl.constexpr
):  # fmt: skip
    """The rule on some columns of the state, s [D, columns] at `state`; moves the values' window. Returns the output.

    One pass over s reads S^T k and S^T q; the output follows without reading the new state:
    o = exp(g) S^T q + (k . q) delta.
    """
    v_channel = channel + column
    x_v = tl.load(x + v_channel)
    v0, v1, v2 = past_inputs(window, v_channel, CHANNELS)
    v = convolved(v0, v1, v2, x_v, weight, v_channel, CHANNELS)
    s = s.to(tl.float32)
    delta = (v - decay * tl.sum(s * k[:, None], 0)) * beta
    o = decay * tl.sum(s * q[:, None], 0) + agreement * delta
    tl.store(state, (s * decay + k[:, None] * delta[None, :]).to(state.dtype.element_ty))
    tl.debug_barrier()  # several threads hold a channel: all have read it before one writes
    move_window(window, v1, v2, x_v, v_channel, column >= 0, CHANNELS)
    return o


@triton.jit
def gdn_decode_kernel(
    proj, window, state, slots, tickets, conv_weight, neg_exp_a_log, dt_bias, norm_weight, out,
    row_stride, window_stride, state_stride, out_stride, dummy_slot, eps,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One value head of one row. The state passes through registers once, COLUMNS (D or D / 2) columns at a time.

    The value heads of a group read the same windows of queries and keys. Whoever reads a channel last moves it on:
    `tickets` counts its readers. The count is taken after the values read have gone through a sum over the whole block,
    so the reads are over; it needs no fence, and nothing waits for it before the end.
    """
    CHANNELS: tl.constexpr = (2 * HK + HV) * D
    GROUP: tl.constexpr = HV // HK
    head = tl.program_id(0)
    row = tl.program_id(1)
    lane = tl.arange(0, D)
    column = tl.arange(0, COLUMNS)
    slot = tl.load(slots + row)
    to = out + row.to(tl.int64) * out_stride + head * D
    if slot == dummy_slot:
        tl.store(to + lane, tl.zeros([D], out.dtype.element_ty))
        return
    tile = state + slot.to(tl.int64) * state_stride + head * D * D + lane[:, None] * D + column[None, :]
    s = tl.load(tile)

    x = proj + row.to(tl.int64) * row_stride
    past = window + slot.to(tl.int64) * window_stride
    q_channel = (head // GROUP) * D + lane
    k_channel = q_channel + HK * D
    x_q, x_k = tl.load(x + q_channel), tl.load(x + k_channel)
    q0, q1, q2 = past_inputs(past, q_channel, CHANNELS)
    k0, k1, k2 = past_inputs(past, k_channel, CHANNELS)
    z = x + CHANNELS + head * D
    b = tl.load(x + CHANNELS + HV * D + head).to(tl.float32)
    a = tl.load(x + CHANNELS + HV * D + HV + head).to(tl.float32)
    q = convolved(q0, q1, q2, x_q, conv_weight, q_channel, CHANNELS)
    k = convolved(k0, k1, k2, x_k, conv_weight, k_channel, CHANNELS)
    q_square, k_square, agreement = tl.reduce((q * q, k * k, q * k), 0, add_three)
    ticket = tickets + row * (HK * D) + q_channel
    last = lane >= 0
    if GROUP > 1:
        # Neither sum is ever negative; the compiler does not know, so the count waits for them.
        one = tl.where((q_square < 0.0) | (k_square < 0.0), 2, 1)
        last = tl.atomic_add(ticket, tl.zeros([D], tl.int32) + one, sem="relaxed") == GROUP - 1
    q_scale = tl.rsqrt(q_square + 1e-6) * (D**-0.5)
    k_scale = tl.rsqrt(k_square + 1e-6)
    q *= q_scale
    k *= k_scale
    agreement *= q_scale * k_scale
    decay = tl.exp(tl.load(neg_exp_a_log + head) * softplus(a + tl.load(dt_bias + head)))
    beta = tl.sigmoid(b)
    channel = (2 * HK + head) * D
    o = advance_columns(tile, s, x, past, conv_weight, k, q, agreement, decay, beta, column, channel, CHANNELS)
    square = tl.sum(o * o, 0)
    if COLUMNS == D:
        write_gated(o * tl.rsqrt(square / D + eps), z, norm_weight, to, column)
    else:
        right = column + COLUMNS
        s = tl.load(tile + COLUMNS)
        p = advance_columns(
            tile + COLUMNS, s, x, past, conv_weight, k, q, agreement, decay, beta, right, channel, CHANNELS
        )
        scale = tl.rsqrt((square + tl.sum(p * p, 0)) / D + eps)
        write_gated(o * scale, z, norm_weight, to, column)
        write_gated(p * scale, z, norm_weight, to, right)
    move_window(past, q1, q2, x_q, q_channel, last, CHANNELS)
    move_window(past, k1, k2, x_k, k_channel, last, CHANNELS)
    if GROUP > 1:
        tl.store(ticket, tl.zeros([D], tl.int32), mask=last)


@triton.jit
def write_gated(o, z, weight, out, column):
    gate = silu(tl.load(z + column).to(tl.float32))
    tl.store(out + column, (o * tl.load(weight + column) * gate).to(out.dtype.element_ty))


def launch_decode(
    proj: torch.Tensor,
    window: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    conv_weight: torch.Tensor,
    neg_exp_a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    tickets: torch.Tensor,
    heads: Heads,
    launch: Launch,
) -> None:
    """As `gpu.gdn_decode`, checked."""
    gdn_decode_kernel[(heads.value, proj.shape[0])](
        proj, window, state, slots, tickets, conv_weight, neg_exp_a_log, dt_bias, norm_weight, out,
        proj.stride(0), window.stride(0), state.stride(0), out.stride(0), state.shape[0] - 1, eps,
        HK=heads.key, HV=heads.value, D=HEAD_DIM, COLUMNS=launch.block, **launch.options,
    )  # fmt: skip
