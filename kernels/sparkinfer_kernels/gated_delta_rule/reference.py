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
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from sparkinfer_kernels.rms_norm.reference import unweighted_rms_norm

CHUNK = 32
"""Tokens per chunk. Chunks are cut at multiples of it in the request's own positions, and at checkpoints."""
SEGMENT_CHUNKS = 64
"""Chunks of all heads that prefill works on at a time."""
BFLOAT16_FROM = 8
"""States (heads of all sequences) from which products with states take bfloat16 when the values do; below, calls cost
more than they save."""
BFLOAT16_PARTS_FROM = 32
"""Chunks of all heads from which products inside chunks take bfloat16 when the values are."""


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
    # rsqrt(sum + e) = d**-0.5 * rsqrt(mean + e / d).
    return unweighted_rms_norm(qk, 1e-6 / qk.shape[-1]).mul_(scale)


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


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a segment of n chunks needs besides the states; B = n * Hv. fp32, or where noted the dtype of the scan."""

    u: torch.Tensor
    """[B, CHUNK, V], the UT transform's, in the scan's dtype."""
    reads: torch.Tensor
    """[B, 2 * CHUNK, K], what meets the state: the UT transform's w negated, decayed queries; in the scan's dtype."""
    k: torch.Tensor
    """[n, Hk, CHUNK, K]."""
    k_decayed: torch.Tensor
    """[B, CHUNK, K], decayed to the chunk's end."""
    attention: torch.Tensor
    """[B, CHUNK, CHUNK], in the scan's dtype."""
    last: torch.Tensor
    """[B, 1, 1], decay of a whole chunk."""


def chunk_gated_delta_rule(
    qk: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    layout: ChunkLayout,
    save_to: Sequence[torch.Tensor] = (),
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rule over packed sequences, each from its own state.

    Args:
        qk: [T, 2 * Hk, K] fp32 from `normalise_qk`.
        v: [T, Hv, V]. In bfloat16 the products inside chunks, of many states those with the states too, take and give
            bfloat16 (sums are fp32 inside); the triangular system, what is added to the states and the states stay
            fp32.
        g, beta: [T, Hv] fp32.
        state: [R, Hv, K, V] fp32, overwritten by the state after each sequence.
        layout: the sequences in chunks.
        save_to: destination [Hv, K, V] of every save of `layout`, by save number.
        out: [T, Hv, V] fp32 without gaps, written; made when None.

    Returns:
        `out`.
    """
    hk, dk = qk.shape[1] // 2, qk.shape[2]
    hv, dv = v.shape[1:]
    n = layout.gather.shape[0] // CHUNK
    if n < 2 * state.shape[0] or n * hv < BFLOAT16_PARTS_FROM:
        v = v.float()
    scan_dtype = v.dtype if state.shape[0] * hv >= BFLOAT16_FROM else torch.float32
    gates = torch.cat((g, beta), dim=1).index_select(0, layout.gather)
    if layout.padding is not None:
        gates.masked_fill_(layout.padding, 0.0)
    cum, beta_c = gates.view(n, CHUNK, 2 * hv).transpose(1, 2).contiguous().split(hv, dim=1)
    cum = cum.cumsum(dim=-1)
    rows = layout.gather.view(n, 1, CHUNK)
    of_head = torch.arange(max(hv, 2 * hk), device=v.device)
    # Query and key of a head side by side: [N, Hk, 2, CHUNK].
    pair_rows = rows.unsqueeze(2) * (2 * hk) + of_head[: 2 * hk].view(2, hk).t().unsqueeze(-1)
    v_rows = rows * hv + of_head[:hv].unsqueeze(-1)
    by_chunk = torch.empty(n * hv, CHUNK, dv, dtype=scan_dtype, device=v.device)
    for first, stop in _segments(layout.steps, max(1, SEGMENT_CHUNKS // hv)):
        begin, end = layout.steps[first][0], layout.steps[stop - 1][1]
        pair = qk.view(-1, dk).index_select(0, pair_rows[begin:end].reshape(-1)).view(-1, 2, CHUNK, dk)
        v_c = v.reshape(-1, dv).index_select(0, v_rows[begin:end].reshape(-1)).view(-1, CHUNK, dv)
        segment = by_chunk[begin * hv : end * hv]
        parts = _within_chunks(pair, v_c, cum[begin:end], beta_c[begin:end], scan_dtype)
        values = _scan(parts, segment, state, layout, (first, stop), save_to, cum)
        segment.baddbmm_(parts.attention, values)
    chunk, lane = layout.scatter // CHUNK, layout.scatter % CHUNK
    back = (chunk * (hv * CHUNK) + lane).unsqueeze(1) + of_head[:hv] * CHUNK
    if out is None:
        return by_chunk.view(-1, dv).index_select(0, back.view(-1)).float().view(-1, hv, dv)
    if scan_dtype == out.dtype:
        torch.index_select(by_chunk.view(-1, dv), 0, back.view(-1), out=out.view(-1, dv))
    else:
        out.view(-1, dv).copy_(by_chunk.view(-1, dv).index_select(0, back.view(-1)))
    return out


def _segments(steps: Sequence[tuple[int, int]], chunks: int) -> list[tuple[int, int]]:
    """Chunk numbers [first, stop) that are worked on together: of at most `chunks` chunks, but of one number at least.

    What a segment needs stays in a CPU's cache, and its buffers are those of the segment before.
    """
    cuts = [0]
    for number in range(1, len(steps)):
        if steps[number][1] - steps[cuts[-1]][0] > chunks:
            cuts.append(number)
    return list(itertools.pairwise([*cuts, len(steps)]))


def _scan(
    parts: _Parts,
    out: torch.Tensor,
    state: torch.Tensor,
    layout: ChunkLayout,
    numbers: tuple[int, int],
    save_to: Sequence[torch.Tensor],
    cum: torch.Tensor,
) -> torch.Tensor:
    """Carry the states through the chunks of a segment; returns what the tokens write into them, [B, CHUNK, V].

    Args:
        parts: of the segment.
        out: [B, CHUNK, V], written: what the tokens read from the state before their chunk.
        state: [R, Hv, K, V] fp32, advanced.
        numbers: chunk numbers [first, stop) of the segment.
        save_to: destinations of all saves; cum: [N, Hv, CHUNK] of all chunks.
    """
    hv, dk, dv = state.shape[1:]
    flat, values = state.view(-1, dk, dv), parts.u
    offset = layout.steps[numbers[0]][0]
    sizes = [(end - begin) * hv for begin, end in layout.steps[numbers[0] : numbers[1]]]
    pieces = (parts.reads, values, out, parts.k_decayed.transpose(1, 2), parts.last)
    steps = zip(range(*numbers), *(piece.split(sizes) for piece in pieces), strict=True)
    for number, reads, new, read_out, keys_out, last in steps:
        current = flat[: new.shape[0]]
        if values.dtype == torch.float32:
            written = new.baddbmm_(reads[:, :CHUNK], current)
            torch.bmm(reads[:, CHUNK:], current, out=read_out)
        else:
            # One call, which lays the states out for oneDNN once.
            read = torch.bmm(reads, current.to(values.dtype))
            written = new.add_(read[:, :CHUNK]).float()
            read_out.copy_(read[:, CHUNK:])
        for row, save, tokens in layout.saves[number]:
            place = layout.steps[number][0] + row
            of_row = written.view(-1, hv, CHUNK, dv)[row, :, :tokens]
            _state_within(parts.k[place - offset], cum[place], of_row, state[row], save_to[save])
        current.mul_(last).baddbmm_(keys_out, written)
    return values


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
    pair: torch.Tensor, v: torch.Tensor, cum: torch.Tensor, beta: torch.Tensor, scan_dtype: torch.dtype
) -> _Parts:
    """Everything that needs no state, of n chunks.

    Args:
        pair: [n * Hk, 2, CHUNK, K] fp32, queries and keys; v: [n * Hv, CHUNK, V]; cum, beta: [n, Hv, CHUNK], cum the
            running sum of g.
        scan_dtype: of what the scan takes.
    """
    n, hv = cum.shape[:2]
    hk, dk = pair.shape[0] // n, pair.shape[-1]
    group, batch, low = hv // hk, n * hv, v.dtype
    shape = (n * hk, group, CHUNK)
    q, k = pair.unbind(1)
    products = torch.bmm(pair.view(n * hk, 2 * CHUNK, dk), k.transpose(1, 2)).view(n * hk, 2, 1, CHUNK, CHUNK)
    decay = (cum.unsqueeze(-1) - cum.unsqueeze(-2)).tril_().exp_().tril_().view(*shape, CHUNK)
    attention = (products[:, 0] * decay).view(batch, CHUNK, CHUNK).to(scan_dtype)
    system = decay.mul_(products[:, 1]).mul_(beta.reshape(*shape, 1)).view(batch, CHUNK, CHUNK)
    # The inverse of I + (strictly lower part of the system); its columns then take beta, and for w the decay.
    inverse = torch.eye(CHUNK, dtype=torch.float32, device=v.device).expand(batch, CHUNK, CHUNK).contiguous()
    torch.linalg.solve_triangular(system, inverse, upper=False, unitriangular=True, out=inverse)
    inverse.mul_(beta.reshape(batch, 1, CHUNK))
    u = torch.bmm(inverse.to(low), v).to(scan_dtype)
    grow = cum.exp().view(*shape, 1)
    inverse.mul_(grow.view(batch, 1, CHUNK)).neg_()
    reads = torch.empty(batch, 2, CHUNK, dk, dtype=scan_dtype, device=v.device)
    minus_w = torch.bmm(inverse.view(n * hk, group * CHUNK, CHUNK).to(low), k.to(low))
    reads[:, 0] = minus_w.view(batch, CHUNK, dk)
    reads[:, 1] = (q.unsqueeze(1) * grow).view(batch, CHUNK, dk)
    return _Parts(
        u=u,
        reads=reads.view(batch, 2 * CHUNK, dk),
        k=k.view(n, hk, CHUNK, dk),
        k_decayed=(k.unsqueeze(1) * (cum[..., -1:] - cum).exp_().view(*shape, 1)).view(batch, CHUNK, dk),
        attention=attention,
        last=cum[..., -1:].exp().view(batch, 1, 1),
    )


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
    o = exp(g) S^T q + (k . q) delta. The pass is a weighted sum of the state's rows, which torch's embedding bag
    takes at the rate of memory; a batched product with two rows reaches less than half of it on a CPU.

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
    pair = qk.view(n, 2, hk, 1, dk).expand(n, 2, hk, hv // hk, dk).permute(0, 2, 3, 1, 4)
    pair = pair.contiguous().view(n, hv, 2, dk)
    decay = g.exp().unsqueeze(-1)
    rows, bags = _state_rows(tuple(runs), hv, dk, v.device)
    read = torch.embedding_bag(pool.view(-1, dv), rows, bags, False, 0, False, pair.view(-1), True)[0]
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


@lru_cache(maxsize=8)
def _state_rows(
    runs: tuple[tuple[int, int, int], ...], heads: int, dk: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the flat pool [slots * Hv * K, V] that the two reads of each (sequence, head) sum up, and where each
    read begins. The same for all layers, and from step to step until a request comes or goes.
    """
    slots = np.concatenate([np.arange(slot, slot + count) for _, slot, count in runs])
    first = (slots[:, None] * heads + np.arange(heads)).reshape(-1, 1) * dk
    rows = (first + np.tile(np.arange(dk), 2)).reshape(-1)
    bags = np.arange(0, len(rows) + 1, dk)
    return torch.from_numpy(rows).to(device), torch.from_numpy(bags).to(device)
