"""The decode step of a Gated DeltaNet layer as one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparkinfer_kernels.causal_conv1d.kernels import silu
from sparkinfer_kernels.gated_delta_rule.layout import HEAD_DIM, Heads
from sparkinfer_kernels.gated_delta_rule.tuned import Tuning


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact to fp32 rounding also for very negative x."""
    e = tl.exp(tl.minimum(x, 20.0))
    return tl.where(x > 20.0, x, tl.where(e < 0.01, e * (1.0 - e * (0.5 - e * 0.3333333)), tl.log(1.0 + e)))


@triton.jit
def last_inputs(x, window, channel, CHANNELS: tl.constexpr):
    """[4, D]: the three inputs of `channel` [D] before this one, oldest first, and this one.

    One tile, summed over its first dimension later: values for single channels would be loaded again by every thread
    that needs them against the state.
    """
    j = tl.arange(0, 4)[:, None]
    old = tl.load(window + j * CHANNELS + channel[None, :], mask=j < 3, other=0.0)
    new = tl.load(x + j * 0 + channel[None, :], mask=j == 3, other=0.0)
    return tl.where(j < 3, old, new)


@triton.jit
def convolved(inputs, weight, channel, CHANNELS: tl.constexpr):
    """[D] fp32: convolution and SiLU at the last position of `inputs`."""
    j = tl.arange(0, 4)[:, None]
    return silu(tl.sum(inputs.to(tl.float32) * tl.load(weight + j * CHANNELS + channel[None, :]), 0))


@triton.jit
def move_window(inputs, window, channel, CHANNELS: tl.constexpr):
    """Write the last three of `inputs` as the window of the next position."""
    j = tl.arange(0, 4)[:, None]
    tl.store(window + (j - 1) * CHANNELS + channel[None, :], inputs, mask=j > 0)


@triton.jit
def gdn_decode_kernel(
    proj, window, state, slots, tickets, conv_weight, neg_exp_a_log, dt_bias, norm_weight, out,
    row_stride, window_stride, state_stride, out_stride, dummy_slot, eps,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One value head of one row. The state passes through registers once.

    The value heads of a group read the same windows of queries and keys. Whoever reads last moves them on: `tickets`
    counts the readers.
    """
    CHANNELS: tl.constexpr = (2 * HK + HV) * D
    GROUP: tl.constexpr = HV // HK
    head = tl.program_id(0)
    row = tl.program_id(1)
    lane = tl.arange(0, D)
    slot = tl.load(slots + row)
    to = out + row.to(tl.int64) * out_stride + head * D + lane
    if slot == dummy_slot:
        tl.store(to, tl.zeros([D], out.dtype.element_ty))
        return
    tile = state + slot.to(tl.int64) * state_stride + head * D * D + lane[:, None] * D + lane[None, :]
    s = tl.load(tile).to(tl.float32)

    x = proj + row.to(tl.int64) * row_stride
    past = window + slot.to(tl.int64) * window_stride
    q_channel = (head // GROUP) * D + lane
    k_channel = q_channel + HK * D
    v_channel = 2 * HK * D + head * D + lane
    q_inputs = last_inputs(x, past, q_channel, CHANNELS)
    k_inputs = last_inputs(x, past, k_channel, CHANNELS)
    v_inputs = last_inputs(x, past, v_channel, CHANNELS)
    z = tl.load(x + CHANNELS + head * D + lane).to(tl.float32)
    b = tl.load(x + CHANNELS + HV * D + head).to(tl.float32)
    a = tl.load(x + CHANNELS + HV * D + HV + head).to(tl.float32)
    q = convolved(q_inputs, conv_weight, q_channel, CHANNELS)
    k = convolved(k_inputs, conv_weight, k_channel, CHANNELS)
    v = convolved(v_inputs, conv_weight, v_channel, CHANNELS)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * (D**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    # All reads of the windows by this program come before its ticket, its writes after.
    tl.debug_barrier()
    last = True
    ticket = tickets + row * HK + head // GROUP
    if GROUP > 1:
        last = tl.atomic_add(ticket, 1, sem="acq_rel") == GROUP - 1

    decay = tl.exp(tl.load(neg_exp_a_log + head) * softplus(a + tl.load(dt_bias + head)))
    read_k = tl.sum(s * k[:, None], 0)
    read_q = tl.sum(s * q[:, None], 0)
    delta = (v - decay * read_k) * tl.sigmoid(b)
    o = decay * read_q + tl.sum(q * k, 0) * delta
    tl.store(tile, (s * decay + k[:, None] * delta[None, :]).to(state.dtype.element_ty))
    o *= tl.rsqrt(tl.sum(o * o, 0) / D + eps) * tl.load(norm_weight + lane)
    tl.store(to, (o * silu(z)).to(out.dtype.element_ty))
    move_window(v_inputs, past, v_channel, CHANNELS)
    if last:
        move_window(q_inputs, past, q_channel, CHANNELS)
        move_window(k_inputs, past, k_channel, CHANNELS)
        if GROUP > 1:
            tl.store(ticket, 0)


def launch(
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
    tuning: Tuning,
) -> None:
    """As `gpu.gdn_decode`, checked."""
    gdn_decode_kernel[(heads.value, proj.shape[0])](
        proj, window, state, slots, tickets, conv_weight, neg_exp_a_log, dt_bias, norm_weight, out,
        proj.stride(0), window.stride(0), state.stride(0), out.stride(0), state.shape[0] - 1, eps,
        HK=heads.key, HV=heads.value, D=HEAD_DIM,
        **tuning.decode.options,
    )  # fmt: skip
