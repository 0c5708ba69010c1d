"""Paged grouped-query attention on the GPU: split-KV decode and varlen causal prefill, output gate included.

Once per step, `plan` turns the step's lengths (device tensors) into work lists that all attention layers share; then
each layer calls `attention_decode` for its decode rows and `attention_prefill` for its prompts' tokens. Grids are
fixed by the workspace, so that a captured graph serves any lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_TOKENS = 16
"""Tokens of a KV block."""


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Work lists and partial results of one captured step shape. Made once, reused by every layer and step."""

    max_decode_rows: int
    max_prefill_tokens: int
    max_sequences: int
    heads: int
    kv_heads: int
    head_dim: int
    decode_programs: int
    """Programs of the decode grid, and the most pieces a step is cut into per key head group."""
    decode_items: torch.Tensor
    """[items, 4] int32: row, first token, end token, piece number within the row; row -1 for no work."""
    decode_pieces: torch.Tensor
    """[rows, 2] int32: the row's first item and number of pieces."""
    partial_out: torch.Tensor
    """[items, Hkv, G, D] fp32: each piece's normalised output."""
    partial_lse: torch.Tensor
    """[items, Hkv, G] fp32: log2 of each piece's sum of exponentials, scale included."""
    counters: torch.Tensor
    """[rows, Hkv] int32, zero between launches."""
    prefill_tiles: torch.Tensor
    """[tiles, 2] int32: sequence and tile number within it, longest context first; sequence -1 for no work."""


def make_workspace(
    max_decode_rows: int,
    max_prefill_tokens: int,
    max_sequences: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
    multiprocessors: int | None = None,
) -> AttentionWorkspace:
    """Allocate the buffers of one step shape.

    Args:
        max_decode_rows: padded number n of decode rows of the step (0: no decode part).
        max_prefill_tokens: padded number of prompt tokens of the step (0: no prefill part).
        max_sequences: padded number R of prefill sequences.
        heads, kv_heads, head_dim: Hq, Hkv, D; Hq / Hkv at most 16, D a power of two.
        device: the GPU.
        multiprocessors: of the GPU; read from it when None.
    """
    raise NotImplementedError


def plan(
    workspace: AttentionWorkspace,
    decode_positions: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> None:
    """Fill the work lists for a step's lengths. Once per step, before the first attention layer (one small kernel).

    Args:
        workspace: of this step shape.
        decode_positions: [n] int32, position of each decode row's token: its context is positions + 1 tokens. A padding
            row has position 0 and a block table that names the dummy block. None: no decode part.
        cu_seqlens: [R + 1] int32, token offsets of the prefill sequences, the first prefill token being 0. Padding
            sequences have length 0. None: no prefill part.
        starts: [R] int32, tokens of each prefill sequence that are in the cache already.
    """
    raise NotImplementedError


def attention_decode(
    q: torch.Tensor,
    gate: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    workspace: AttentionWorkspace,
    out: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query token per row against its whole context, times sigmoid(gate). The own key is in the cache already.

    Args:
        q: [n, Hq, D] bf16, normed and rotated.
        gate: [n, Hq, D] bf16, rows may be strided (`rotary.gpu.gate_view`).
        k_cache, v_cache: [blocks, 16, Hkv, D] contiguous, bf16 or float8_e4m3fn.
        block_table: [n, max_blocks] int32; entries beyond a row's context are not read.
        positions: [n] int32, as given to `plan`.
        scale: of the scores.
        workspace: after `plan` of this step.
        out: [n, Hq, D] (or [n, Hq * D]) bf16 contiguous, written.
        kv_scales: [2, Hkv] fp32, with an FP8 cache.

    Returns:
        `out`.
    """
    raise NotImplementedError


def attention_prefill(
    q: torch.Tensor,
    gate: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
    workspace: AttentionWorkspace,
    out: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of packed prompts over cached prefix and new tokens, times sigmoid(gate).

    All keys and values are read from the cache: `rotary.gpu.qk_norm_rotary_write` of this layer comes first.

    Args:
        q: [T, Hq, D] bf16, normed and rotated; the prefill tokens of the pass only.
        gate: [T, Hq, D] bf16, rows may be strided.
        k_cache, v_cache: [blocks, 16, Hkv, D] contiguous, bf16 or float8_e4m3fn.
        block_table: [R, max_blocks] int32; entries beyond a sequence's context are not read.
        cu_seqlens: [R + 1] int32, as given to `plan`.
        starts: [R] int32, as given to `plan`.
        scale: of the scores.
        workspace: after `plan` of this step.
        out: [T, Hq, D] (or [T, Hq * D]) bf16 contiguous. Padding tokens (beyond cu_seqlens[R]) are left as they are.
        kv_scales: [2, Hkv] fp32, with an FP8 cache.

    Returns:
        `out`.
    """
    raise NotImplementedError
