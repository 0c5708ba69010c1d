"""Everything between the attention layer's input projection and attention itself, in one kernel.

Per token: RMS norm of each query and key head, rotation of the first dimensions, keys and values into the paged cache,
queries into a packed tensor. The output gates stay where the projection left them; `gate_view` names that place.
"""

from __future__ import annotations

import torch
import triton

from sparkinfer_kernels.programmatic import PDL
from sparkinfer_kernels.rotary.kernels import qk_norm_rotary_kernel


def gate_view(proj: torch.Tensor, heads: int, kv_heads: int, head_dim: int) -> torch.Tensor:
    """The gates [T, Hq, D] inside a projection's rows (queries | keys | gates | values), without a copy."""
    first = (heads + kv_heads) * head_dim
    return proj[:, first : first + heads * head_dim].unflatten(-1, (heads, head_dim))


def value_view(proj: torch.Tensor, heads: int, kv_heads: int, head_dim: int) -> torch.Tensor:
    """The values [T, Hkv, D] inside a projection's rows, without a copy."""
    first = (2 * heads + kv_heads) * head_dim
    return proj[:, first : first + kv_heads * head_dim].unflatten(-1, (kv_heads, head_dim))


def _launch_shape(heads: int, kv_heads: int, d: int, count: int) -> tuple[int, int, int]:
    """(heads and tokens of a program, warps).

    As many heads as divide both kinds: a program sees queries, keys or values only. Few tokens: latency counts. Many:
    starting programs does, each takes 16 rows.
    """
    tile = 1
    while tile < 4 and heads % (2 * tile) == 0 and kv_heads % (2 * tile) == 0:
        tile *= 2
    if count <= 128:
        return tile, 1, max(1, tile * d // 256)
    return tile, 16 // tile, 4


def qk_norm_rotary_write(
    proj: torch.Tensor,
    positions: torch.Tensor,
    kv_positions: torch.Tensor,
    q_norm1: torch.Tensor,
    k_norm1: torch.Tensor,
    rotary_table: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    eps: float,
    q_out: torch.Tensor,
    k_out: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Norm and rotate queries and keys of all tokens of a pass, store keys and values.

    Args:
        proj: [T, (2 * Hq + 2 * Hkv) * D] bf16, rows queries | keys | gates | values (rows may be strided).
        positions: [T] int32 or int64, place of each token in its sequence (any valid one for padding).
        kv_positions: [T] int32 or int64, flat cache position block * 16 + offset. Padding rows name the dummy block.
        q_norm1, k_norm1: [D] fp32, norm weights plus one.
        rotary_table: [max_positions, 2, rot / 2] fp32, from `reference.rotary_table`.
        k_cache, v_cache: [blocks, 16, Hkv, D] contiguous, bf16 or float8_e4m3fn, written at `kv_positions`.
        eps: of the norms.
        q_out: [T, Hq, D] bf16 contiguous, written.
        k_out: [T, Hkv, D] bf16 contiguous, written when given (for attention over a fresh prompt without the cache).
        kv_scales: [2, Hkv] fp32, key and value scale of each head; needed with an FP8 cache, whose entry is
            value / scale, saturated at 448.

    Raises:
        ValueError: an FP8 cache without scales, or shapes that contradict each other.
    """
    count, heads, d = q_out.shape
    kv_heads = k_cache.shape[2]
    half = rotary_table.shape[2]
    if proj.shape != (count, 2 * (heads + kv_heads) * d) or proj.stride(1) != 1:
        raise ValueError(
            f"projection {tuple(proj.shape)} does not hold queries, keys, gates and values of "
            f"{heads} and {kv_heads} heads of {d} for {count} tokens"
        )
    if d & (d - 1) or 2 * half > d:
        raise ValueError(f"head_dim {d} with {2 * half} rotated dimensions: a power of two with at most all rotated")
    fp8 = k_cache.dtype == torch.float8_e4m3fn
    if fp8 and kv_scales is None:
        raise ValueError("an FP8 cache needs kv_scales [2, kv_heads]")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and q_out.is_contiguous()):
        raise ValueError("k_cache, v_cache and q_out must be contiguous")
    if count == 0:
        return
    tile, tokens, warps = _launch_shape(heads, kv_heads, d, count)
    qk_norm_rotary_kernel[(triton.cdiv(count, tokens), (heads + 2 * kv_heads) // tile)](
        proj,
        positions,
        kv_positions,
        q_norm1,
        k_norm1,
        rotary_table,
        k_cache,
        v_cache,
        q_out,
        k_out,
        kv_scales,
        proj.stride(0),
        count,
        eps,
        HQ=heads,
        HKV=kv_heads,
        D=d,
        HALF=half,
        TILE=tile,
        TOKENS=tokens,
        KEYS=k_out is not None,
        FP8=fp8,
        PDL=PDL,
        launch_pdl=PDL,
        num_warps=warps,
    )
