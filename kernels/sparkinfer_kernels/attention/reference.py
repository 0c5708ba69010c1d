"""Plain torch grouped-query attention over a paged KV cache (Kwon et al. 2023, arXiv 2309.06180).

The cache of one layer is a pair [blocks, block_tokens, Hkv, D]; flat position = block * block_tokens + offset. Query
head h reads key head h // (Hq / Hkv). Softmax runs in fp32 inside torch's fused attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from sparkinfer_kernels.linear.reference import bfloat16_instructions

GROUP_TOKENS = 8192
"""Padded KV tokens gathered at once by decode: small enough to stay in a CPU's cache between gather and use."""
BY_ROWS_FROM = 1024
"""Padded KV tokens of a group from which bfloat16 decode goes row by row on a CPU; for fewer, one call is faster."""
TILED_FROM = 128
"""Queries of one prompt from which bfloat16 attention goes tile by tile on a CPU; below, one call is faster."""
TILE_ROWS = 64
"""Queries that bfloat16 attention on a CPU takes together, twice as many of a long prompt, with all the keys that the
last of them may see."""
BATCH_TOKENS = 4096
"""Tokens of equally long prompts that it takes together."""


@dataclass(slots=True)
class DecodeGroup:
    """Decode rows of similar context length that are gathered and attended together."""

    rows: torch.Tensor | None
    """[n] int64: the group's rows; None when the group is all rows in order."""
    blocks: torch.Tensor
    """[n * m] int64: m blocks for each row, short rows filled up with their last block."""
    count: int
    mask: torch.Tensor | None
    """[n, 1, 1, m * block_tokens] additive (0 or -inf); None when nothing is padded."""
    by_rows: bool
    """Which way to go: `_decode_by_rows` or `_decode_at_once`."""
    _bags: tuple[torch.Tensor, torch.Tensor] | None = None

    def bags(self, kv_heads: int, heads: int, block_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the flat cache [.., D] that every head reads [n, heads, m * block_tokens] int64, and where each
        head's begin in them. All layers of a pass ask for the same, so they are made once.
        """
        if self._bags is None:
            tokens = self.blocks.view(self.count, 1, -1, 1) * block_tokens + torch.arange(block_tokens)
            rows = tokens.view(self.count, 1, -1)
            if kv_heads > 1:
                rows = rows * kv_heads + torch.arange(kv_heads).view(-1, 1)
            rows = rows.repeat_interleave(heads // kv_heads, dim=1)
            self._bags = rows, torch.arange(0, rows.numel() + 1, rows.shape[-1])
        return self._bags


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """One sequence's share of a prefill: tokens [first, first + length) of the pass, at positions start.. ."""

    first: int
    length: int
    start: int
    blocks: torch.Tensor | None
    """[m] int64: the blocks of positions [0, start + length); None when start is 0 (nothing to read back)."""


def decode_groups(
    table: np.ndarray,
    lines: np.ndarray,
    lengths: np.ndarray,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    allow_by_rows: bool = True,
) -> list[DecodeGroup]:
    """Group decode rows by context length, so that one padded gather holds at most about `GROUP_TOKENS` tokens.

    Args:
        table: [slots, M] int64, block numbers.
        lines: [n], each row's line of the table; it holds at least as many blocks as its context needs.
        lengths: [n] context lengths, the row's own token included.
        block_tokens: tokens per block.
        dtype: of the queries.
        device: where the index tensors go.
        allow_by_rows: whether large groups may go row by row, whose rounding differs.
    """
    n, allow_by_rows = len(lines), allow_by_rows and _in_bfloat16(dtype, device)
    needed = -(-lengths // block_tokens)
    one_group = n * int(needed.max()) * block_tokens <= GROUP_TOKENS
    order = np.arange(n) if one_group else np.argsort(-lengths, kind="stable")
    groups = []
    lo = 0
    while lo < n:
        m = int(needed.max()) if one_group else int(needed[order[lo]])
        hi = n if one_group else min(n, lo + max(1, GROUP_TOKENS // (m * block_tokens)))
        members = order[lo:hi]
        columns = np.minimum(np.arange(m), needed[members][:, None] - 1)
        blocks = table[lines[members][:, None], columns]
        by_rows = allow_by_rows and blocks.size * block_tokens >= BY_ROWS_FROM
        seen = lengths[members]
        mask = None
        if (seen != m * block_tokens).any():
            bias = np.where(np.arange(m * block_tokens) < seen[:, None], np.float32(0), np.float32(-np.inf))
            mask = torch.from_numpy(bias).to(device, torch.float32 if by_rows else dtype).view(hi - lo, 1, 1, -1)
        rows = None if one_group else torch.from_numpy(members).to(device)
        groups.append(DecodeGroup(rows, torch.from_numpy(blocks.reshape(-1)).to(device), hi - lo, mask, by_rows))
        lo = hi
    return groups


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, positions: torch.Tensor
) -> None:
    """Store the keys and values of a pass.

    Args:
        k, v: [T, Hkv, D].
        k_cache, v_cache: [blocks, block_tokens, Hkv, D], written in place.
        positions: [T] int64 flat cache positions, all different.
    """
    for new, cache in ((k, k_cache), (v, v_cache)):
        if new.element_size() == 2 and new.shape[-1] % 4 == 0:
            # The copy goes number by number: four at a time.
            new, cache = new.contiguous().view(torch.int64), cache.view(torch.int64)
        cache.view(-1, *new.shape[1:]).index_copy_(0, positions, new)


def attention_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, groups: Sequence[DecodeGroup], scale: float
) -> torch.Tensor:
    """One query token per row against the row's whole context (its own key is already in the cache).

    Args:
        q: [n, Hq, D].
        k_cache, v_cache: [blocks, block_tokens, Hkv, D].
        groups: from `decode_groups`; together they hold every row once.
        scale: of the scores.

    Returns:
        [n, Hq, D].
    """
    n, hq, d = q.shape
    hkv = k_cache.shape[2]
    q = q.reshape(n, hkv, hq // hkv, d)
    out = None if len(groups) == 1 else torch.empty_like(q)
    for group in groups:
        q_group = q if group.rows is None else q.index_select(0, group.rows)
        attend = _decode_by_rows if group.by_rows else _decode_at_once
        result = attend(q_group, k_cache, v_cache, group, scale)
        if group.rows is None:
            return result.reshape(n, hq, d)
        if out is None:
            out = torch.empty_like(q)
        out.index_copy_(0, group.rows, result)
    if out is None:
        raise ValueError("decode groups hold no row")
    return out.view(n, hq, d)


def _in_bfloat16(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products in bfloat16 are worth taking by oneself: on a CPU that has instructions for them."""
    return dtype == torch.bfloat16 and device.type == "cpu" and bfloat16_instructions()


def _decode_at_once(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, group: DecodeGroup, scale: float
) -> torch.Tensor:
    """One group through torch's fused attention: q [n, Hkv, G, D] to the same shape."""
    n, hkv, _, d = q.shape
    k = k_cache.index_select(0, group.blocks).view(n, -1, hkv, d).transpose(1, 2)
    v = v_cache.index_select(0, group.blocks).view(n, -1, hkv, d).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)


def _decode_by_rows(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, group: DecodeGroup, scale: float
) -> torch.Tensor:
    """As `_decode_at_once`, in steps; for bfloat16 on a CPU, where the fused one takes few queries slowly.

    Softmax is fp32, weights are rounded to bfloat16 before they meet the values. Their sum is an embedding bag, a
    weighted sum of rows that reads the values where they lie.
    """
    n, hkv, group_heads, d = q.shape
    rows, bags = group.bags(hkv, hkv * group_heads, k_cache.shape[1])
    if hkv == 1:
        k = k_cache.index_select(0, group.blocks)
    else:
        k = k_cache.view(-1, d).index_select(0, rows[:, ::group_heads].reshape(-1))
    scores = torch.bmm(q.reshape(n * hkv, group_heads, d), k.view(n * hkv, -1, d).transpose(1, 2)).float()
    scores = scores.view(n, hkv, group_heads, -1)
    scores = scores.mul_(scale) if group.mask is None else torch.add(group.mask, scores, alpha=scale)
    weights = torch.softmax(scores, -1).to(q.dtype).view(-1)
    return torch.embedding_bag(v_cache.view(-1, d), rows.view(-1), bags, False, 0, False, weights, True)[0].view(
        q.shape
    )


def attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    spans: Sequence[PrefillSpan],
    scale: float,
    steady: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of packed sequences; a sequence that continues reads its earlier keys from the cache.

    Args:
        q: [T, Hq, D]; k, v: [T, Hkv, D], of this pass, already stored in the cache.
        k_cache, v_cache: [blocks, block_tokens, Hkv, D].
        spans: the sequences, which together cover the T tokens.
        scale: of the scores.
        steady: one way for prompts of any length, whose rounding then does not depend on where a prompt is cut.
        out: [T, Hq, D] without gaps, in the dtype of `q`, written; made when None.

    Returns:
        `out`.
    """
    total, hq, d = q.shape
    hkv = k.shape[1]
    if out is None:
        out = torch.empty(total, hq, d, dtype=q.dtype, device=q.device)
    by_tiles = not steady and _in_bfloat16(q.dtype, q.device)
    for count, span in _alike(spans) if by_tiles else [(1, span) for span in spans]:
        tokens = slice(span.first, span.first + count * span.length)
        q_span = q[tokens].view(count, span.length, hkv, hq // hkv, d)
        if span.blocks is None:
            k_span, v_span = k[tokens], v[tokens]
        else:
            context = span.start + span.length
            k_span = k_cache.index_select(0, span.blocks).view(-1, hkv, d)[:context]
            v_span = v_cache.index_select(0, span.blocks).view(-1, hkv, d)[:context]
        out_span = out[tokens].view(q_span.shape)
        if by_tiles and span.length >= TILED_FROM:
            _causal_by_tiles(q_span, k_span.view(count, -1, hkv, d), v_span.view(count, -1, hkv, d), scale, out_span)
        else:
            out_span[0].copy_(_causal_at_once(q_span[0], k_span, v_span, scale))
    return out


def _alike(spans: Sequence[PrefillSpan]) -> list[tuple[int, PrefillSpan]]:
    """Neighbours of equal length that read nothing back go together: (how many, the first of them)."""
    groups: list[tuple[int, PrefillSpan]] = []
    for span in spans:
        if groups and span.blocks is None and span.length >= TILED_FROM:
            count, first = groups[-1]
            if first.blocks is None and first.length == span.length and count * span.length < BATCH_TOKENS:
                groups[-1] = (count + 1, first)
                continue
        groups.append((1, span))
    return groups


def _causal_at_once(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The last queries of a sequence against all its keys: q [L, Hkv, G, D], k and v [N, Hkv, D] to [L, Hkv, G, D]."""
    length, _, group, _ = q.shape
    context = k.shape[0]
    mask = None
    if length < context:
        at = torch.arange(context - length, context, device=q.device)
        mask = torch.arange(context, device=q.device) <= at[:, None]
    # The heads of one key head stand in the batch dimension: keys are shared by a stride of zero, not copied.
    k = k.transpose(0, 1).expand(group, -1, -1, -1)
    v = v.transpose(0, 1).expand(group, -1, -1, -1)
    result = F.scaled_dot_product_attention(
        q.permute(2, 1, 0, 3), k, v, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return result.permute(2, 1, 0, 3)


def _causal_by_tiles(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """As `_causal_at_once`, tile of queries by tile, each against the keys it may see; for bfloat16 on a CPU.

    Both products run at the rate of bfloat16, where torch's fused kernel takes them at that of fp32. Sums are fp32;
    scores are rounded to bfloat16 before the softmax, which is fp32 inside, and so are its weights.

    Args:
        q: [R, L, Hkv, G, D], the last L queries of R sequences.
        k, v: [R, N, Hkv, D], all their keys and values.
        scale: of the scores.
        out: [R, L, Hkv, G, D], written.
    """
    count, length, heads, group, d = q.shape
    before = k.shape[1] - length
    q = q.permute(0, 2, 3, 1, 4) * scale
    keys, values = (x.transpose(1, 2).reshape(count * heads, -1, d) for x in (k, v))
    out = out.permute(0, 2, 3, 1, 4)
    size = TILE_ROWS if length <= 8 * TILE_ROWS else 2 * TILE_ROWS
    later = torch.full((size, size), float("-inf"), dtype=q.dtype).triu_(1)
    for first in range(0, length, size):
        rows = min(size, length - first)
        seen = before + first + rows
        tile = q[:, :, :, first : first + rows].reshape(count * heads, group * rows, d)
        # Keys without gaps between sequences (one sequence: without a stride that says so), or oneDNN's kernel for
        # transposed operands is passed over for one a third slower.
        keys_seen = keys[:, :seen].reshape(-1, d).view(-1, seen, d)
        scores = torch.bmm(tile, keys_seen.transpose(1, 2)).view(-1, rows, seen)
        scores[..., seen - rows :].add_(later[:rows, :rows])
        weights = torch.softmax(scores, -1).view(count * heads, group * rows, seen)
        result = torch.bmm(weights, values[:, :seen])
        out[:, :, :, first : first + rows] = result.view(count, heads, group, rows, d)
