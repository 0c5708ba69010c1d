"""Paged grouped-query attention on the GPU: split-KV decode and varlen causal prefill, output gate included.

Once per step, `plan` turns the step's lengths (device tensors) into work lists that all attention layers share; then
each layer calls `attention_decode` for its decode rows and `attention_prefill` for its prompts' tokens. Grids are
fixed by the workspace, so that a captured graph serves any lengths.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparkinfer_kernels.attention.configs import MAX_PIECES
from sparkinfer_kernels.attention.decode_kernel import attention_decode_kernel, combine_kernel
from sparkinfer_kernels.attention.hopper_kernel import attention_hopper_kernel
from sparkinfer_kernels.attention.prefill_kernel import attention_prefill_kernel, combine_spans_kernel, gate_kernel
from sparkinfer_kernels.attention.workspace import AttentionWorkspace, make_workspace, plan
from sparkinfer_kernels.programmatic import PDL

__all__ = [
    "BLOCK_TOKENS",
    "AttentionWorkspace",
    "attention_decode",
    "attention_prefill",
    "attention_prefill_fresh",
    "make_workspace",
    "plan",
]

BLOCK_TOKENS = 16
"""Tokens of a KV block."""
LOG2_E = math.log2(math.e)
COMBINED_ROWS = 4
"""Rows of a tile that one program combines."""
COMBINED_PARTS = 4
"""Parts that it loads at a time."""


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
        workspace.partial,
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
        workspace.partial,
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
    spans, rows = workspace.spans, config.rows
    items, tiles = workspace.prefill_items.shape[0], workspace.prefill_spans.shape[0]
    if not spans:
        # Fewer tokens than the workspace was made for need fewer tiles: the list is filled from its beginning.
        group = workspace.heads // workspace.kv_heads
        items = min(items, -(-q.shape[0] * group // rows) + starts.shape[0])
    where = (block_table, cu_seqlens, starts, workspace.prefill_items, workspace.partial, workspace.partial_lse, out)
    strides = (gate.stride(0), block_table.stride(0), scale * LOG2_E)
    sizes = {
        "HQ": workspace.heads,
        "HKV": workspace.kv_heads,
        "D": workspace.head_dim,
        "M": rows,
        "N": config.tokens,
        "WIDE": k_cache.numel() >= 2**31,
        "PDL": PDL,
        "launch_pdl": PDL,
        "num_warps": config.warps,
    }
    grid = (workspace.kv_heads, items)
    if config.wgmma and q.is_cuda and not fp8 and workspace.head_dim == 256:
        attention_hopper_kernel[grid](q, gate, k_cache, v_cache, *where, *strides, **sizes)
    else:
        attention_prefill_kernel[grid](
            q, gate, k_cache, v_cache, kv_scales, *where, *strides, **sizes, FP8=fp8, SPANS=spans, STAGES=config.stages
        )
    if spans:
        combine_spans_kernel[(workspace.kv_heads * (rows // COMBINED_ROWS), tiles)](
            gate,
            workspace.prefill_spans,
            cu_seqlens,
            workspace.partial,
            workspace.partial_lse,
            out,
            gate.stride(0),
            HQ=workspace.heads,
            HKV=workspace.kv_heads,
            D=workspace.head_dim,
            M=rows,
            ROWS=COMBINED_ROWS,
            PARTS=COMBINED_PARTS,
            PDL=PDL,
            launch_pdl=PDL,
            num_warps=4,
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
