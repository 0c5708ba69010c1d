"""The gated delta rule, chunked for training and stepwise for decoding.

Chunked form after Yang et al., "Gated Delta Networks" (arXiv 2412.06464): inside a chunk of 64 tokens the updates are
one triangular system, between chunks the state is carried on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
_BLOCK = 16


class _UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower-triangular A, [..., 64, 64] float32.

    Blocks of 16 by the product (I - A)(I + A^2)(I + A^4)(I + A^8), exact as A^16 = 0; larger ones from halves. The
    product over all 64 rows would lose everything to cancellation where neighbouring keys are alike.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, lower: Tensor) -> Tensor:
        inverse = _invert(lower)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grads[0] @ transposed).tril(-1)


def _invert(lower: Tensor) -> Tensor:
    size = lower.shape[-1]
    if size <= _BLOCK:
        eye = torch.eye(size, dtype=lower.dtype, device=lower.device)
        inverse, power = eye - lower, lower
        covered = 2
        while covered < size:
            power = power @ power
            inverse = inverse @ (eye + power)
            covered *= 2
        return inverse
    half = size // 2
    # Both diagonal blocks in one batch: their shapes are the same.
    diagonal = _invert(torch.stack((lower[..., :half, :half], lower[..., half:, half:])))
    first, second = diagonal[0], diagonal[1]
    corner = -(second @ lower[..., half:, :half] @ first)
    top = torch.cat((first, torch.zeros_like(corner)), dim=-1)
    return torch.cat((top, torch.cat((corner, second), dim=-1)), dim=-2)


def chunk_terms(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """The parts of the chunked form that need no state.

    Args:
        q, k, v: [batch, heads, chunks, 64, dim], q and k L2-normalised, q scaled by dim^-1/2.
        beta, g: [batch, heads, chunks, 64] float32; g is the log decay, <= 0.

    Returns:
        lower (float32), and in q's dtype: masked scores, decayed q, decayed k, beta*v, beta*decay*k; the chunk's whole
        decay (float32).
    """
    dtype = q.dtype
    cumulative = g.cumsum(-1)
    difference = cumulative.unsqueeze(-1) - cumulative.unsqueeze(-2)
    size = q.shape[-2]
    causal = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    decay = difference.masked_fill(~causal, float("-inf")).exp()
    keys_by_keys = (k @ k.transpose(-1, -2)).float()
    lower = (keys_by_keys * decay * beta.unsqueeze(-1)).tril(-1)
    scores = ((q @ k.transpose(-1, -2)).float() * decay).to(dtype)
    grown = cumulative.exp().unsqueeze(-1)
    q_decayed = (q * grown).to(dtype)
    k_decayed = (k * (cumulative[..., -1:] - cumulative).exp().unsqueeze(-1)).to(dtype)
    v_beta = (v * beta.unsqueeze(-1)).to(dtype)
    k_beta = (k * (beta.unsqueeze(-1) * grown)).to(dtype)
    return lower, scores, q_decayed, k_decayed, v_beta, k_beta, cumulative[..., -1].exp()


def chunk_scan(terms: tuple[Tensor, ...], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Carries the state over the chunks.

    Args:
        terms: what `chunk_terms` returned.
        state: [batch, heads, dim_k, dim_v] float32, zero when None.

    Returns:
        Output [batch, heads, chunks, 64, dim_v] in q's dtype, and the last state in float32.
    """
    lower, scores, q_decayed, k_decayed, v_beta, k_beta, whole = terms
    dtype = scores.dtype
    batch, heads = k_decayed.shape[:2]
    dim_k = k_decayed.shape[-1]
    dim_v = v_beta.shape[-1]
    inverse = _UnitLowerInverse.apply(lower).to(dtype)
    new_v = (inverse @ v_beta).flatten(0, 1)
    read = (inverse @ k_beta).flatten(0, 1)
    write = k_decayed.flatten(0, 1).transpose(-1, -2)
    decay = whole.flatten(0, 1)[..., None, None]
    if state is None:
        carried = torch.zeros(batch * heads, dim_k, dim_v, dtype=torch.float32, device=scores.device)
    else:
        carried = state.flatten(0, 1)
    states, values = [], []
    # unbind, not indexing: its gradient is one stack instead of one zero-filled tensor per chunk.
    parts = zip(new_v.unbind(1), read.unbind(1), write.unbind(1), decay.unbind(1), strict=True)
    for value, reader, writer, factor in parts:
        low = carried.to(dtype)
        fresh = torch.baddbmm(value, reader, low, alpha=-1)
        carried = torch.addcmul(torch.bmm(writer, fresh).float(), carried, factor)
        states.append(low)
        values.append(fresh)
    before = torch.stack(states, 1).unflatten(0, (batch, heads))
    fresh_values = torch.stack(values, 1).unflatten(0, (batch, heads))
    output = q_decayed @ before + scores @ fresh_values
    return output, carried.unflatten(0, (batch, heads))


def to_chunks(x: Tensor, chunk: int = CHUNK) -> Tensor:
    """[batch, time, heads, ...] to [batch, heads, chunks, chunk, ...], zero-padded: padding leaves the state alone."""
    padding = -x.shape[1] % chunk
    if padding:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
    return x.transpose(1, 2).unflatten(2, (-1, chunk))


def from_chunks(x: Tensor, time: int) -> Tensor:
    """The reverse of `to_chunks` for the output: [batch, time, heads, dim]."""
    return x.flatten(2, 3).transpose(1, 2)[:, :time]


def step(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: q, k, v [batch, heads, dim], beta and g [batch, heads], state [batch, heads, dim_k, dim_v] float32."""
    state = state * g.exp()[..., None, None]
    read = torch.einsum("bhk,bhkv->bhv", k, state)
    state = state + torch.einsum("bhk,bhv->bhkv", k, (v - read) * beta.unsqueeze(-1))
    return torch.einsum("bhk,bhkv->bhv", q, state), state
