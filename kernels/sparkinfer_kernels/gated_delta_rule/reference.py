"""Plain torch gated delta rule (Yang et al. 2024, arXiv 2412.06464).

Per value head, with state S [K, V] and for each token (k, q normalised to length 1, q scaled by K**-0.5):

    S <- exp(g) * S;  S <- S + k (beta * (v - S^T k))^T;  o = S^T q

Prefill uses the chunked form: inside a chunk the rank-one updates are condensed by the UT transform (Yang et al. 2024,
arXiv 2406.06484) into a triangular system, solved for all chunks of all sequences at once; then a short sequential scan
over chunk numbers carries the state, batched over sequences and heads. The system is solved by substitution: expanding
the inverse in powers would cancel badly when keys repeat.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

CHUNK = 32
"""Tokens per chunk. Chunks are cut at multiples of it in the request's own positions, and at checkpoints."""


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Where the tokens of packed sequences stand in chunks. Made by `chunk_layout`.

    N chunks are ordered by chunk number, then by sequence; sequences come longest (in chunks) first, so the chunks of
    one number belong to the first sequences.
    """

    gather: torch.Tensor
    """[N * CHUNK] int64: token of each chunk position (padding: some token of the same chunk)."""
    scatter: torch.Tensor
    """[T] int64: chunk position of each token."""
    padding: torch.Tensor | None
    """[N * CHUNK, 1] bool: true where no token stands; None when every chunk is full."""
    steps: list[tuple[int, int]]
    """First and last-plus-one chunk of every chunk number."""
    saves: list[list[tuple[int, int, int]]]
    """By chunk number: (sequence, save number, n) of the states wanted after the chunk's first n tokens."""


def num_chunks(start: int, length: int) -> int:
    """Chunks of a sequence that computes positions [start, start + length)."""
    return (start + length - 1) // CHUNK - start // CHUNK + 1


def chunk_layout(
    starts: Sequence[int], lengths: Sequence[int], saves: Sequence[Sequence[int]], device: torch.device
) -> ChunkLayout:
    """Lay packed sequences out in chunks.

    Args:
        starts: first position of each sequence's share.
        lengths: tokens of each share, at least 1.
        saves: for each sequence the positions in (start, start + length] whose state is wanted, ascending; they are
            numbered through all sequences in order. They cut no chunk.
        device: where the index tensors go.

    Raises:
        ValueError: if sequences do not come longest (in chunks) first.
    """
    first_token, size, number = [], [], []
    saves_at: list[tuple[int, int, int, int]] = []
    counts = []
    token = 0
    for row, (start, length, wanted) in enumerate(zip(starts, lengths, saves, strict=True)):
        stop = start + length
        for position in wanted:
            index = (position - 1) // CHUNK - start // CHUNK
            begin = max(start, (position - 1) // CHUNK * CHUNK)
            saves_at.append((index, row, len(saves_at), position - begin))
        edges = [start, *range((start // CHUNK + 1) * CHUNK, stop, CHUNK), stop]
        for index, (left, right) in enumerate(itertools.pairwise(edges)):
            first_token.append(token)
            size.append(right - left)
            number.append(index)
            token += right - left
        counts.append(len(edges) - 1)
    if any(a < b for a, b in itertools.pairwise(counts)):
        raise ValueError("sequences must come longest (in chunks) first")
    order = np.argsort(np.asarray(number), kind="stable")
    first = np.asarray(first_token)[order]
    extent = np.asarray(size)[order]
    lane = np.arange(CHUNK)
    gather = first[:, None] + np.minimum(lane, extent[:, None] - 1)
    real = lane < extent[:, None]
    scatter = np.empty(token, dtype=np.int64)
    scatter[gather[real]] = np.flatnonzero(real)
    edges_of = np.searchsorted(np.asarray(number)[order], np.arange(counts[0] + 1)).tolist()
    by_number: list[list[tuple[int, int, int]]] = [[] for _ in range(counts[0])]
    for index, row, save, tokens in saves_at:
        by_number[index].append((row, save, tokens))
    return ChunkLayout(
        gather=torch.from_numpy(gather.reshape(-1)).to(device),
        scatter=torch.from_numpy(scatter).to(device),
        padding=None if real.all() else torch.from_numpy(~real.reshape(-1, 1)).to(device),
        steps=list(itertools.pairwise(edges_of)),
        saves=by_number,
    )


def normalise_qk(qk: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """L2-normalise query and key heads, x / sqrt(sum x^2 + 1e-6), and scale them.

    Args:
        qk: [T, 2 * Hk, K], query heads then key heads.
        scale: [2 * Hk, 1] fp32: K**-0.5 times the factor wanted (queries take another K**-0.5).

    Returns:
        [T, 2 * Hk, K] fp32.
    """
    d = qk.shape[-1]
    # rsqrt(sum + e) = d**-0.5 * rsqrt(mean + e / d): the norm kernel does it in one call.
    return F.rms_norm(qk.float(), (d,), None, 1e-6 / d).mul_(scale)


def decay_and_beta(
    b: torch.Tensor, a: torch.Tensor, neg_exp_a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gates of the rule: g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b).

    Args:
        b, a: [T, Hv].
        neg_exp_a_log, dt_bias: [Hv] fp32.

    Returns:
        (g, beta), [T, Hv] fp32 each.
    """
    return F.softplus(a.float() + dt_bias).mul_(neg_exp_a_log), torch.sigmoid(b.float())


def chunk_gated_delta_rule(
    qk: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    layout: ChunkLayout,
    save_to: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """The rule over packed sequences, each from its own state.

    Args:
        qk: [T, 2 * Hk, K] fp32 from `normalise_qk`.
        v: [T, Hv, V].
        g, beta: [T, Hv] fp32.
        state: [R, Hv, K, V] fp32, overwritten by the state after each sequence.
        layout: the sequences in chunks.
        save_to: destination [Hv, K, V] of every save of `layout`, by save number.

    Returns:
        [T, Hv, V] fp32.
    """
    hk, dk = qk.shape[1] // 2, qk.shape[2]
    hv, dv = v.shape[1:]
    n = layout.gather.shape[0] // CHUNK
    rows = layout.gather.view(n, 1, CHUNK)
    heads = torch.arange(max(hv, 2 * hk), device=v.device).view(1, -1, 1)
    qk_c = qk.view(-1, dk).index_select(0, (rows * (2 * hk) + heads[:, : 2 * hk]).view(-1)).view(n, 2, hk, CHUNK, dk)
    v_c = v[rows, heads[:, :hv]].float()
    gates = torch.cat((g, beta), dim=1).index_select(0, layout.gather)
    if layout.padding is not None:
        gates.masked_fill_(layout.padding, 0.0)
    cum, beta_c = gates.view(n, CHUNK, 2 * hv).transpose(1, 2).contiguous().split(hv, dim=1)
    cum = cum.cumsum(dim=-1)
    u, reads, k_decayed, attention = _within_chunks(qk_c, v_c, cum, beta_c)
    last = cum[..., -1:].exp().view(n * hv, 1, 1)
    k_t = k_decayed.transpose(1, 2)
    out = torch.empty(n * hv, CHUNK, dv, dtype=torch.float32, device=v.device)
    flat = state.view(-1, dk, dv)
    for number, (begin, end) in enumerate(layout.steps):
        lo, hi = begin * hv, end * hv
        current = flat[: hi - lo]
        read = torch.bmm(reads[lo:hi], current)
        values = u[lo:hi].sub_(read[:, :CHUNK])
        out[lo:hi] = read[:, CHUNK:]
        for row, save, tokens in layout.saves[number]:
            new = values.view(-1, hv, CHUNK, dv)[row, :, :tokens]
            _state_within(qk_c[begin + row, 1], cum[begin + row], new, state[row], save_to[save])
        current.mul_(last[lo:hi]).baddbmm_(k_t[lo:hi], values)
    out.baddbmm_(attention, u)
    chunk, lane = layout.scatter // CHUNK, layout.scatter % CHUNK
    back = (chunk * (hv * CHUNK) + lane).unsqueeze(1) + heads.view(1, -1)[:, :hv] * CHUNK
    return out.view(-1, dv).index_select(0, back.view(-1)).view(-1, hv, dv)


def _state_within(
    k: torch.Tensor, cum: torch.Tensor, values: torch.Tensor, before: torch.Tensor, destination: torch.Tensor
) -> None:
    """Save the state after the first n tokens of a chunk.

    Args:
        k: [Hk, CHUNK, K]; cum: [Hv, CHUNK] running sum of g; values: [Hv, n, V], what those tokens write;
        before: [Hv, K, V], the state before the chunk; destination: [Hv, K, V].
    """
    hv, n = values.shape[:2]
    decay = (cum[:, n - 1 : n] - cum[:, :n]).exp()
    keys = k[:, :n].repeat_interleave(hv // k.shape[0], dim=0) * decay.unsqueeze(-1)
    after = torch.baddbmm(before * cum[:, n - 1].exp().view(hv, 1, 1), keys.transpose(1, 2), values)
    destination.copy_(after, non_blocking=True)


def _within_chunks(
    qk: torch.Tensor, v: torch.Tensor, cum: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Everything that needs no state: the UT transform's u and w, decayed queries and keys, the inner attention.

    Args:
        qk: [N, 2, Hk, CHUNK, K]; v: [N, Hv, CHUNK, V]; cum, beta: [N, Hv, CHUNK], cum the running sum of g.

    Returns:
        With B = N * Hv: u [B, CHUNK, V]; w and the decayed queries, which both meet the state, [B, 2 * CHUNK, K];
        decayed keys [B, CHUNK, K]; attention [B, CHUNK, CHUNK].
    """
    n, _, hk, _, dk = qk.shape
    hv, dv = v.shape[1], v.shape[3]
    group, batch = hv // hk, n * hv
    shape = (n, hk, group, CHUNK)
    q, k = qk.unbind(1)
    products = torch.matmul(qk, k.unsqueeze(1).transpose(-1, -2)).unsqueeze(3)
    decay = (cum.unsqueeze(-1) - cum.unsqueeze(-2)).tril_().exp_().tril_().view(*shape, CHUNK)
    attention = (products[:, 0] * decay).view(batch, CHUNK, CHUNK)
    system = (products[:, 1] * decay).mul_(beta.reshape(*shape, 1)).view(batch, CHUNK, CHUNK)
    # The inverse of I + (strictly lower part of the system); its columns then take beta, and for w the decay.
    inverse = torch.eye(CHUNK, dtype=torch.float32, device=v.device).expand(batch, CHUNK, CHUNK).contiguous()
    torch.linalg.solve_triangular(system, inverse, upper=False, unitriangular=True, out=inverse)
    inverse.mul_(beta.reshape(batch, 1, CHUNK))
    u = torch.bmm(inverse, v.view(batch, CHUNK, dv))
    grow = cum.exp().contiguous()
    inverse.mul_(grow.view(batch, 1, CHUNK))
    reads = torch.empty(batch, 2, CHUNK, dk, dtype=torch.float32, device=v.device)
    w = torch.bmm(inverse.view(n * hk, group * CHUNK, CHUNK), k.reshape(n * hk, CHUNK, dk))
    reads[:, 0] = w.view(batch, CHUNK, dk)
    torch.mul(q.unsqueeze(2), grow.view(*shape, 1), out=reads.view(n, hk, group, 2, CHUNK, dk)[:, :, :, 1])
    k_decayed = k.unsqueeze(2) * (cum[..., -1:] - cum).exp_().view(*shape, 1)
    return u, reads.view(batch, 2 * CHUNK, dk), k_decayed.view(batch, CHUNK, dk), attention


def recurrent_gated_delta_rule(
    qk: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    pool: torch.Tensor,
    runs: Sequence[tuple[int, int, int]],
) -> torch.Tensor:
    """One token for each of n sequences; their states in `pool` advance in place.

    One pass over the old state reads S^T k and S^T q; the new output follows from them without reading the new state:
    o = exp(g) S^T q + (k . q) delta.

    Args:
        qk: [n, 2 * Hk, K] fp32 from `normalise_qk`.
        v: [n, Hv, V].
        g, beta: [n, Hv] fp32.
        pool: [slots, Hv, K, V] fp32, states by slot.
        runs: (row, slot, count): rows row.. live in slots slot.., `count` of them; together all n rows, in order.

    Returns:
        [n, Hv, V] fp32.
    """
    n, hv, dv = v.shape
    hk, dk = qk.shape[1] // 2, qk.shape[2]
    group = hv // hk
    pair = qk.view(n, 2, hk, 1, dk).expand(n, 2, hk, group, dk).reshape(n, 2, hv, dk)
    pair = pair.transpose(1, 2).contiguous()  # [n, Hv, (q, k), K]
    decay = g.exp().unsqueeze(-1)
    read = torch.empty(n * hv, 2, dv, dtype=torch.float32, device=v.device)
    rows = pair.view(n * hv, 2, dk)
    for row, slot, count in runs:
        lo, hi = row * hv, (row + count) * hv
        torch.bmm(rows[lo:hi], pool[slot : slot + count].view(-1, dk, dv), out=read[lo:hi])
    seen = read.view(n, hv, 2, dv)
    delta = torch.addcmul(v.float(), seen[:, :, 1], decay, value=-1).mul_(beta.unsqueeze(-1))
    agreement = (pair[:, :, 0] * pair[:, :, 1]).sum(dim=-1, keepdim=True)
    out = (seen[:, :, 0] * decay).addcmul_(delta, agreement)
    key = pair[:, :, 1].unsqueeze(-1)
    for row, slot, count in runs:
        state = pool[slot : slot + count]
        rows_of = slice(row, row + count)
        state.mul_(decay[rows_of].unsqueeze(-1)).addcmul_(key[rows_of], delta[rows_of].unsqueeze(-2))
    return out
