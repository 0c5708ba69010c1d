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

GROUP_TOKENS = 2048
"""Padded KV tokens gathered at once by decode: small enough to stay in a core's cache between gather and use."""
TILED_FROM = 128
"""Queries of one span from which bfloat16 attention goes tile by tile on a CPU; below, one call is as fast."""
TILE_ROWS = 64


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of similar context length that are gathered and attended together."""

    rows: torch.Tensor | None
    """[n] int64: the group's rows; None when the group is all rows in order."""
    blocks: torch.Tensor
    """[n * m] int64: m blocks for each row, short rows filled up with their last block."""
    count: int
    mask: torch.Tensor | None
    """[n, 1, 1, m * block_tokens] additive (0 or -inf); None when nothing is padded."""


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """One sequence's share of a prefill: tokens [first, first + length) of the pass, at positions start.. ."""

    first: int
    length: int
    start: int
    blocks: torch.Tensor | None
    """[m] int64: the blocks of positions [0, start + length); None when start is 0 (nothing to read back)."""


def decode_groups(
    tables: Sequence[np.ndarray], lengths: np.ndarray, block_tokens: int, dtype: torch.dtype, device: torch.device
) -> list[DecodeGroup]:
    """Group decode rows by context length, so that one padded gather holds at most about `GROUP_TOKENS` tokens.

    Args:
        tables: each row's block numbers (int64); at least as many as its context needs.
        lengths: [n] context lengths, the row's own token included.
        block_tokens: tokens per block.
        dtype: of the masks, that of the queries.
        device: where the index tensors go.
    """
    n = len(tables)
    needed = -(-lengths // block_tokens)
    one_group = n * int(needed.max()) * block_tokens <= GROUP_TOKENS
    order = np.arange(n) if one_group else np.argsort(-lengths, kind="stable")
    groups = []
    lo = 0
    while lo < n:
        m = int(needed[order].max()) if one_group else int(needed[order[lo]])
        hi = n if one_group else min(n, lo + max(1, GROUP_TOKENS // (m * block_tokens)))
        members = order[lo:hi]
        blocks = np.empty((hi - lo, m), dtype=np.int64)
        for index, row in enumerate(members):
            count = int(needed[row])
            blocks[index, :count] = tables[row][:count]
            blocks[index, count:] = tables[row][count - 1]
        seen = lengths[members]
        mask = None
        if (seen != m * block_tokens).any():
            bias = np.where(np.arange(m * block_tokens) < seen[:, None], np.float32(0), np.float32(-np.inf))
            mask = torch.from_numpy(bias).to(device=device, dtype=dtype).view(hi - lo, 1, 1, -1)
        rows = None if one_group else torch.from_numpy(members).to(device)
        groups.append(DecodeGroup(rows, torch.from_numpy(blocks.reshape(-1)).to(device), hi - lo, mask))
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
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, positions, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, positions, v)


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
        k = k_cache.index_select(0, group.blocks).view(group.count, -1, hkv, d).transpose(1, 2)
        v = v_cache.index_select(0, group.blocks).view(group.count, -1, hkv, d).transpose(1, 2)
        q_group = q if group.rows is None else q.index_select(0, group.rows)
        result = F.scaled_dot_product_attention(q_group, k, v, attn_mask=group.mask, scale=scale)
        if group.rows is None:
            return result.reshape(n, hq, d)
        if out is None:
            out = torch.empty_like(q)
        out.index_copy_(0, group.rows, result)
    if out is None:
        raise ValueError("decode groups hold no row")
    return out.view(n, hq, d)


def attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    spans: Sequence[PrefillSpan],
    scale: float,
) -> torch.Tensor:
    """Causal attention of packed sequences; a sequence that continues reads its earlier keys from the cache.

    Args:
        q: [T, Hq, D]; k, v: [T, Hkv, D], of this pass, already stored in the cache.
        k_cache, v_cache: [blocks, block_tokens, Hkv, D].
        spans: the sequences, which together cover the T tokens.
        scale: of the scores.

    Returns:
        [T, Hq, D].
    """
    total, hq, d = q.shape
    hkv = k.shape[1]
    out = torch.empty(total, hq, d, dtype=q.dtype, device=q.device)
    for span in spans:
        tokens = slice(span.first, span.first + span.length)
        q_span = q[tokens].view(span.length, hkv, hq // hkv, d)
        if span.blocks is None:
            k_span, v_span = k[tokens], v[tokens]
        else:
            context = span.start + span.length
            k_span = k_cache.index_select(0, span.blocks).view(-1, hkv, d)[:context]
            v_span = v_cache.index_select(0, span.blocks).view(-1, hkv, d)[:context]
        by_tiles = q.dtype == torch.bfloat16 and q.device.type == "cpu" and span.length >= TILED_FROM
        attend = _causal_by_tiles if by_tiles else _causal_at_once
        out[tokens].view(q_span.shape).copy_(attend(q_span, k_span, v_span, scale))
    return out


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


def _causal_by_tiles(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """As `_causal_at_once`, tile of queries by tile, each against the keys it may see; for bfloat16 on a CPU.

    Scores and softmax are fp32, weights are rounded to bfloat16 before they meet the values, as in
    FlashAttention (arXiv 2205.14135). torch's own kernel takes both products at the rate of fp32; here the second
    runs at that of bfloat16.
    """
    length, heads, group, d = q.shape
    before = k.shape[0] - length
    out = torch.empty(heads, group, length, d, dtype=q.dtype)
    queries = q.permute(1, 2, 0, 3).float().mul_(scale)
    keys, values = k.permute(1, 2, 0).float(), v.transpose(0, 1)
    for first in range(0, length, TILE_ROWS):
        rows = min(TILE_ROWS, length - first)
        seen = before + first + rows
        tile = queries[:, :, first : first + rows].reshape(heads, group * rows, d)
        scores = torch.bmm(tile, keys[:, :, :seen]).view(heads, group, rows, seen)
        later = torch.ones(rows, rows, dtype=torch.bool).triu_(1)
        scores[..., seen - rows :].masked_fill_(later, float("-inf"))
        weights = torch.softmax(scores, -1).to(q.dtype).view(heads, group * rows, seen)
        out[:, :, first : first + rows] = torch.bmm(weights, values[:, :seen]).view(heads, group, rows, d)
    return out.permute(2, 0, 1, 3)
