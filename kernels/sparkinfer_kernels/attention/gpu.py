"""Paged grouped-query attention on the GPU: split-KV decode and varlen causal prefill, output gate included.

Once per step, `plan` turns the step's lengths (device tensors) into work lists that all attention layers share; then
each layer calls `attention_decode` for its decode rows and `attention_prefill` for its prompts' tokens. Grids are
fixed by the workspace, so that a captured graph serves any lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparkinfer_kernels.attention.configs import (
    DECODE,
    DECODE_FP8,
    FIXED_PIECE,
    MAX_PIECES,
    MIN_PIECE,
    PREFILL,
    TileConfig,
    nearest,
)
from sparkinfer_kernels.attention.decode_kernel import attention_decode_kernel, combine_kernel
from sparkinfer_kernels.attention.plan_kernel import plan_decode_kernel, plan_prefill_kernel
from sparkinfer_kernels.attention.prefill_kernel import attention_prefill_kernel, gate_kernel
from sparkinfer_kernels.programmatic import PDL

BLOCK_TOKENS = 16
"""Tokens of a KV block."""
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Work lists and partial results of one captured step shape. Made once, reused by every layer and step."""

    max_decode_rows: int
    max_prefill_tokens: int
    max_sequences: int
    heads: int
    kv_heads: int
    head_dim: int
    fixed_piece: int
    """Tokens of a piece of every row, 0 where the step's total decides."""
    decode_config: TileConfig
    prefill_config: TileConfig
    decode_items: torch.Tensor
    """[items, 4] int32: row, first token, end token, piece number within the row; row -1 for no work."""
    decode_pieces: torch.Tensor
    """[n, 2] int32: the row's first item and number of pieces."""
    partial_out: torch.Tensor
    """[items, Hkv, Hq / Hkv, D] fp32: each piece's normalised output."""
    partial_lse: torch.Tensor
    """[items, Hkv, Hq / Hkv] fp32: log2 of each piece's sum of exponentials, scale included."""
    prefill_tiles: torch.Tensor
    """[tiles, 2] int32: sequence and tile number within it; sequence -1 for no work."""


def make_workspace(
    max_decode_rows: int,
    max_prefill_tokens: int,
    max_sequences: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
    decode_config: TileConfig | None = None,
    prefill_config: TileConfig | None = None,
    fp8_cache: bool = False,
    independent: bool = False,
) -> AttentionWorkspace:
    """Allocate the buffers of one step shape.

    Args:
        max_decode_rows: padded number n of decode rows of the step (0: no decode part).
        max_prefill_tokens: padded number of prompt tokens of the step (0: no prefill part).
        max_sequences: padded number R of prefill sequences.
        heads, kv_heads, head_dim: Hq, Hkv, D; Hq / Hkv at most 16, D a power of two.
        device: the GPU (or the CPU under Triton's interpreter).
        decode_config, prefill_config: tile sizes; the shipped ones of the device's architecture when None.
        fp8_cache: whether the shipped ones are to be those for an FP8 cache.
        independent: cut each decode row by its own length only, so that its result is bit for bit the same whatever
            its neighbours are. Otherwise the cut balances the step, and rounding depends on it.

    Raises:
        ValueError: heads that the kernels do not serve.
    """
    if heads % kv_heads or heads // kv_heads > 16 or head_dim & (head_dim - 1):
        raise ValueError(
            f"{heads} query heads on {kv_heads} key heads of {head_dim}: at most 16 per key head, a power of two wide"
        )
    arch, processors = 90, 132
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        arch, processors = properties.major * 10 + properties.minor, properties.multi_processor_count
    decode_config = decode_config or nearest(DECODE_FP8 if fp8_cache else DECODE, arch)
    prefill_config = prefill_config or nearest(PREFILL, arch)
    # One wave of programs where the rows allow it; half a row more each where they alone fill the GPU, so that
    # one long context among many short ones is still cut.
    items = max(processors * decode_config.programs // kv_heads, max_decode_rows * 3 // 2) if max_decode_rows else 0
    if independent:
        items = max_decode_rows * MAX_PIECES
    tiles = -(-max_prefill_tokens // prefill_config.rows) + max_sequences if max_prefill_tokens else 0
    group = heads // kv_heads

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return AttentionWorkspace(
        max_decode_rows=max_decode_rows,
        max_prefill_tokens=max_prefill_tokens,
        max_sequences=max_sequences,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        fixed_piece=FIXED_PIECE if independent else 0,
        decode_config=decode_config,
        prefill_config=prefill_config,
        decode_items=ints(items, 4) - 1,
        decode_pieces=ints(max_decode_rows, 2),
        partial_out=torch.empty(items, kv_heads, group, head_dim, device=device),
        partial_lse=torch.empty(items, kv_heads, group, device=device),
        prefill_tiles=ints(tiles, 2) - 1,
    )


def _check_caches(
    workspace: AttentionWorkspace, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_scales: torch.Tensor | None
) -> bool:
    """Whether the cache is FP8; ValueError where the kernels would read it wrongly."""
    shape = (BLOCK_TOKENS, workspace.kv_heads, workspace.head_dim)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.shape[1:] != shape or not cache.is_contiguous():
            raise ValueError(f"{name} {tuple(cache.shape)} must be contiguous [blocks, {', '.join(map(str, shape))}]")
    fp8 = k_cache.dtype == torch.float8_e4m3fn
    if fp8 and kv_scales is None:
        raise ValueError("an FP8 cache needs kv_scales [2, kv_heads]")
    return fp8


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
    if decode_positions is not None and decode_positions.shape[0]:
        n, items = decode_positions.shape[0], workspace.decode_items.shape[0]
        if n > workspace.max_decode_rows:
            raise ValueError(f"{n} decode rows in a workspace of {workspace.max_decode_rows}")
        plan_decode_kernel[(1,)](
            decode_positions,
            workspace.decode_items,
            workspace.decode_pieces,
            n,
            items,
            ROWS=triton.next_power_of_2(n),
            ITEMS=triton.next_power_of_2(items),
            MIN_PIECE=MIN_PIECE,
            MAX_PIECES=MAX_PIECES,
            PIECE=workspace.fixed_piece,
            num_warps=8,
        )
    if cu_seqlens is not None and starts is not None:
        sequences, tiles = starts.shape[0], workspace.prefill_tiles.shape[0]
        if sequences > workspace.max_sequences:
            raise ValueError(f"{sequences} prefill sequences in a workspace of {workspace.max_sequences}")
        plan_prefill_kernel[(1,)](
            cu_seqlens,
            workspace.prefill_tiles,
            sequences,
            tiles,
            SEQUENCES=triton.next_power_of_2(sequences),
            TILES=triton.next_power_of_2(tiles),
            M=workspace.prefill_config.rows,
            num_warps=4,
        )


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
        positions: [n] int32, as given to `plan`, which has cut them into work already.
        scale: of the scores.
        workspace: after `plan` of this step.
        out: [n, Hq, D] (or [n, Hq * D]) bf16 contiguous, written.
        kv_scales: [2, Hkv] fp32, with an FP8 cache.

    Returns:
        `out`.
    """
    config = workspace.decode_config
    fp8 = _check_caches(workspace, k_cache, v_cache, kv_scales)
    if q.shape[0] == 0:
        return out
    attention_decode_kernel[(workspace.kv_heads, workspace.decode_items.shape[0])](
        q,
        gate,
        k_cache,
        v_cache,
        block_table,
        kv_scales,
        workspace.decode_items,
        workspace.decode_pieces,
        workspace.partial_out,
        workspace.partial_lse,
        out,
        gate.stride(0),
        block_table.stride(0),
        scale * LOG2_E,
        HQ=workspace.heads,
        HKV=workspace.kv_heads,
        D=workspace.head_dim,
        TOKENS=config.tokens,
        FP8=fp8,
        WIDE=k_cache.numel() >= 2**31,
        STAGES=config.stages,
        PDL=PDL,
        launch_pdl=PDL,
        num_warps=config.warps,
    )
    combine_kernel[(workspace.heads, q.shape[0])](
        gate,
        workspace.decode_pieces,
        workspace.partial_out,
        workspace.partial_lse,
        out,
        gate.stride(0),
        HQ=workspace.heads,
        HKV=workspace.kv_heads,
        D=workspace.head_dim,
        MAX_PIECES=MAX_PIECES,
        PDL=PDL,
        launch_pdl=PDL,
        num_warps=4,
    )
    return out


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
    config = workspace.prefill_config
    fp8 = _check_caches(workspace, k_cache, v_cache, kv_scales)
    if q.shape[0] == 0:
        return out
    # Fewer tokens than the workspace was made for need fewer tiles: the list is filled from its beginning.
    tiles = min(workspace.prefill_tiles.shape[0], -(-q.shape[0] // config.rows) + starts.shape[0])
    attention_prefill_kernel[(workspace.heads, tiles)](
        q,
        gate,
        k_cache,
        v_cache,
        block_table,
        kv_scales,
        cu_seqlens,
        starts,
        workspace.prefill_tiles,
        out,
        gate.stride(0),
        block_table.stride(0),
        scale * LOG2_E,
        HQ=workspace.heads,
        HKV=workspace.kv_heads,
        D=workspace.head_dim,
        M=config.rows,
        N=config.tokens,
        FP8=fp8,
        WIDE=k_cache.numel() >= 2**31,
        STAGES=config.stages,
        PDL=PDL,
        launch_pdl=PDL,
        num_warps=config.warps,
    )
    return out


def attention_prefill_fresh(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, scale: float, out: torch.Tensor
) -> torch.Tensor:
    """Causal attention of exactly one prompt that starts at its first token, times sigmoid(gate).

    cuDNN's fused attention through torch, which is faster than `attention_prefill` where it applies. No length is
    needed: padding tokens come after the prompt's and no token of it sees them (their values must be finite). To be
    captured it must have run once with these shapes before.

    Args:
        q: [T, Hq, D] bf16, normed and rotated.
        k: [T, Hkv, D] bf16, `k_out` of `rotary.gpu.qk_norm_rotary_write`.
        v: [T, Hkv, D] bf16, `rotary.gpu.value_view` of the projection.
        gate: [T, Hq, D] bf16, rows may be strided.
        scale: of the scores.
        out: [T, Hq, D] (or [T, Hq * D]) bf16 contiguous, written (padding tokens too).

    Returns:
        `out`.
    """
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    backend = SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH
    with sdpa_kernel(backend):
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)[0]
    count, hq, d = q.shape
    gate_kernel[(count,)](
        attended,
        gate,
        out,
        attended.stride(0),
        attended.stride(1),
        gate.stride(0),
        HQ=hq,
        HEADS=triton.next_power_of_2(hq),
        D=d,
        num_warps=max(1, min(8, triton.next_power_of_2(hq) * d // 512)),
    )
    return out
