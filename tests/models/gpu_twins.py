"""Plain torch twins of the GPU operations: lengths are read from the tensors, as the kernels do; nothing is fast."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sparkinfer_kernels.gpu_ops import GpuOps
from sparkinfer_kernels.moe import reference as moe_reference
from sparkinfer_kernels.rotary.reference import qk_norm_rotary
from sparkinfer_kernels.sampler import reference as sampler
from sparkinfer_kernels.step import reference as step

D = 128


@dataclass
class Plain:
    """A weight of any stored format, dequantised."""

    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]


def prepare_bf16(parts: list[torch.Tensor]) -> Plain:
    return Plain(torch.cat(list(parts)))


def prepare_fp8_rows(parts: list[torch.Tensor]) -> Plain:
    weight = torch.cat(list(parts))
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    return Plain(((weight / scales).to(torch.float8_e4m3fn).float() * scales).to(weight.dtype))


def linear(x: torch.Tensor, weight: Plain, workspace: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    if out is not None and out.dtype != x.dtype:
        return torch.mm(x.to(out.dtype), weight.values.to(out.dtype).t(), out=out)
    y = x @ weight.values.t()
    return y if out is None else out.copy_(y)


def norm(x: torch.Tensor, weight1: torch.Tensor, eps: float) -> torch.Tensor:
    return (F.rms_norm(x.float(), x.shape[-1:], None, eps) * weight1).to(x.dtype)


def embed_rms_norm(tokens, embedding, weight1, eps, residual, out=None, fp8=None):  # type: ignore[no-untyped-def]
    residual.copy_(embedding[tokens.long()])
    return out.copy_(norm(residual, weight1, eps)), residual


def add_rms_norm(x, residual, weight1, eps, out=None, fp8=None, rows=None, residual_out=None):  # type: ignore[no-untyped-def]
    total = (residual if rows is None else residual[rows.long()]) + (x if rows is None else x[rows.long()])
    kept = residual if residual_out is None else residual_out
    kept.copy_(total)
    return out.copy_(norm(kept, weight1, eps)), kept


def swiglu(gate_up, out=None, fp8=None):  # type: ignore[no-untyped-def]
    return out.copy_(moe_reference.swiglu(gate_up.clone()))


def gate_view(proj: torch.Tensor, heads: int, kv_heads: int, d: int) -> torch.Tensor:
    first = (heads + kv_heads) * d
    return proj[:, first : first + heads * d].unflatten(-1, (heads, d))


def qk_norm_rotary_write(
    proj, positions, kv_positions, q_norm1, k_norm1, rotary_table, k_cache, v_cache, eps, q_out, kv_scales=None
):  # type: ignore[no-untyped-def]
    heads, d, kv_heads = q_out.shape[1], q_out.shape[2], k_cache.shape[2]
    qk = proj[:, : (heads + kv_heads) * d].unflatten(-1, (-1, d))
    v = proj[:, (2 * heads + kv_heads) * d :].unflatten(-1, (-1, d))
    cos, sin = rotary_table[positions.long()].unsqueeze(2).unbind(1)
    weight1 = torch.cat([q_norm1.expand(heads, -1), k_norm1.expand(kv_heads, -1)])
    qk = qk_norm_rotary(qk, weight1, cos, sin, eps)
    q_out.copy_(qk[:, :heads])
    # Padding rows all write the dummy block: one after another, so that any of them may win.
    for index, place in enumerate(kv_positions.tolist()):
        k_cache.view(-1, kv_heads, d)[place] = qk[index, heads:]
        v_cache.view(-1, kv_heads, d)[place] = v[index]


def _attend(q, k_cache, v_cache, table, start, scale):  # type: ignore[no-untyped-def]
    """q [t, Hq, D] at positions start.. over all cached tokens up to each."""
    t, heads, d = q.shape
    kv_heads, context = k_cache.shape[2], start + t
    blocks = table[: -(-context // 16)].long()
    k = k_cache[blocks].reshape(-1, kv_heads, d)[:context].repeat_interleave(heads // kv_heads, 1)
    v = v_cache[blocks].reshape(-1, kv_heads, d)[:context].repeat_interleave(heads // kv_heads, 1)
    mask = torch.arange(context) <= torch.arange(start, context)[:, None]
    parts = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale)[0].transpose(0, 1)


def attention_decode(q, gate, k_cache, v_cache, block_table, positions, scale, workspace, out, kv_scales=None):  # type: ignore[no-untyped-def]
    for row, position in enumerate(positions.tolist()):
        out[row] = _attend(q[row : row + 1], k_cache, v_cache, block_table[row], position, scale)[0]
    return out.mul_(torch.sigmoid(gate))


def attention_prefill(
    q, gate, k_cache, v_cache, block_table, cu_seqlens, starts, scale, workspace, out, kv_scales=None
):  # type: ignore[no-untyped-def]
    ends = cu_seqlens.tolist()
    for row, (first, stop) in enumerate(itertools.pairwise(ends)):
        if stop > first:
            part = _attend(q[first:stop], k_cache, v_cache, block_table[row], int(starts[row]), scale)
            out[first:stop] = part * torch.sigmoid(gate[first:stop])
    out[ends[-1] :] = torch.nan
    return out


@dataclass
class Checkpoints:
    sequence: torch.Tensor
    position: torch.Tensor
    state: torch.Tensor
    window: torch.Tensor


def _gdn_token(row, window, state, conv, neg_exp_a_log, dt_bias, norm_weight, eps):  # type: ignore[no-untyped-def]
    """One token; window [W-1, C] and state [Hv, K, V] advance in place."""
    hv, dk, dv = state.shape
    channels = window.shape[1]
    hk = (channels - hv * dv) // (2 * dk)
    qkv, z, b, a = row.float().split([channels, hv * dv, hv, hv])
    seen = torch.cat([window.float(), qkv[None]])
    mixed = F.silu((seen * conv).sum(0))
    window.copy_(seen[1:])
    q, k, v = mixed.split([hk * dk, hk * dk, hv * dv])
    q, k = (F.normalize(x.view(hk, dk), dim=-1, eps=1e-6).repeat_interleave(hv // hk, 0) for x in (q, k))
    g = (neg_exp_a_log * F.softplus(a + dt_bias)).exp()
    beta = torch.sigmoid(b)
    s = state.float() * g[:, None, None]
    delta = (v.view(hv, dv) - torch.einsum("hk,hkv->hv", k, s)) * beta[:, None]
    s = s + k[:, :, None] * delta[:, None]
    state.copy_(s)
    o = torch.einsum("hk,hkv->hv", q * dk**-0.5, s)
    o = F.rms_norm(o, (dv,), None, eps) * norm_weight * F.silu(z.view(hv, dv))
    return o.reshape(-1).to(row.dtype)


def gdn_decode(proj, window, state, slots, conv, a, dt, norm_weight, eps, out, *, workspace):  # type: ignore[no-untyped-def]
    for row, slot in enumerate(slots.tolist()):
        if slot == state.shape[0] - 1:
            out[row] = 0
        else:
            out[row] = _gdn_token(proj[row], window[slot], state[slot], conv, a, dt, norm_weight, eps)
    return out


def gdn_prefill(
    proj, window, state, slots, cu_seqlens, starts, conv, a, dt, norm_weight, eps, out, *, workspace, checkpoints=None
):  # type: ignore[no-untyped-def]
    ends = cu_seqlens.tolist()
    wanted: dict[tuple[int, int], list[int]] = {}
    if checkpoints is not None:
        for entry, key in enumerate(zip(checkpoints.sequence.tolist(), checkpoints.position.tolist(), strict=True)):
            wanted.setdefault(key, []).append(entry)
    for row, (first, stop) in enumerate(itertools.pairwise(ends)):
        if stop == first:
            continue
        slot, start = int(slots[row]), int(starts[row])
        if start == 0:
            window[slot].zero_()
            state[slot].zero_()
        for token in range(first, stop):
            out[token] = _gdn_token(proj[token], window[slot], state[slot], conv, a, dt, norm_weight, eps)
            for entry in wanted.get((row, start + token - first + 1), ()):
                checkpoints.state[entry].copy_(state[slot])
                checkpoints.window[entry].copy_(window[slot])
    out[ends[-1] :] = 0
    return out


@dataclass
class SamplingTensors:
    temperature: torch.Tensor
    keys: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    banned_rows: torch.Tensor | None = None
    banned_tokens: torch.Tensor | None = None


def sample(logits, tensors, mode, workspace, out):  # type: ignore[no-untyped-def]
    logits = logits.float().clone()
    banned = None
    if tensors.banned_rows is not None:
        real = tensors.banned_rows >= 0
        banned = tensors.banned_rows[real].long(), tensors.banned_tokens[real].long()
    if mode == "greedy":
        return out.copy_(logits.argmax(-1))
    filters = mode == "filter"
    batch = sampler.SamplingBatch(
        temperature=tensors.temperature,
        keys=tensors.keys,
        top_k=tensors.top_k.long() if filters else None,
        top_p=tensors.top_p if filters else None,
        min_p=tensors.min_p if filters else None,
        banned=banned,
    )
    return out.copy_(sampler.sample(logits, batch))


def logprobs(logits, tokens, top, workspace):  # type: ignore[no-untyped-def]
    return sampler.logprobs(logits.float(), tokens.long(), top)


@dataclass
class PlainMoe:
    """Router, experts and shared expert, dequantised."""

    parts: tuple[torch.Tensor, ...]
    top_k: int


def prepare_moe(router, gate_up, down, shared_gate_up, shared_down, top_k):  # type: ignore[no-untyped-def]
    """As the reference lays them out."""
    parts = router.t(), gate_up.transpose(1, 2), down.transpose(1, 2), shared_gate_up.t(), shared_down.t()
    return PlainMoe(tuple(part.contiguous() for part in parts), top_k)


def moe(x, weights, workspace, out=None):  # type: ignore[no-untyped-def]
    y = moe_reference.moe(x, *weights.parts, weights.top_k)
    return y if out is None else out.copy_(y)


def _nothing(*arguments: Any, **named: Any) -> None:
    return None


def twin_ops() -> GpuOps:
    """The table of twins."""
    return GpuOps(
        skinny_rows=4,
        prepare_bf16=prepare_bf16,
        prepare_nvfp4=lambda parts, gate_up=False, fp8=False: Plain(torch.cat([part.dequantise() for part in parts])),
        prepare_fp8_block=_nothing,
        prepare_fp8_rows=prepare_fp8_rows,
        make_linear_workspace=_nothing,
        linear=linear,
        linear_swiglu=lambda x, weight, workspace, out, *fp8, **more: swiglu(linear(x, weight, None), out),
        embed_rms_norm=embed_rms_norm,
        add_rms_norm=add_rms_norm,
        swiglu=swiglu,
        quantise_rows=_nothing,
        qk_norm_rotary_write=qk_norm_rotary_write,
        gate_view=gate_view,
        make_attention_workspace=_nothing,
        plan_attention=_nothing,
        attention_decode=attention_decode,
        attention_prefill=attention_prefill,
        make_gdn_decode_workspace=_nothing,
        make_gdn_prefill_workspace=_nothing,
        gdn_heads=lambda key, value: Heads(key, value),
        gdn_checkpoints=Checkpoints,
        plan_gdn_prefill=_nothing,
        gdn_decode=gdn_decode,
        gdn_prefill=gdn_prefill,
        prepare_moe=prepare_moe,
        make_moe_workspace=_nothing,
        moe=moe,
        make_sampler_workspace=_nothing,
        sampling_tensors=SamplingTensors,
        sample=sample,
        logprobs=logprobs,
        prepare_step=step.prepare_step,
        keep_tokens=step.keep_tokens,
    )


@dataclass
class Heads:
    key: int
    value: int
