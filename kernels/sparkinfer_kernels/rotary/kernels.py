"""Triton kernel: q/k norm, partial rotation, paged KV write."""

from __future__ import annotations

import triton
import triton.language as tl

from sparkinfer_kernels.programmatic import wait_for_previous


@triton.jit
def _to_cache(x, scale_ptr, which, cache_ptr, FP8: tl.constexpr):
    if FP8:
        x = x / tl.load(scale_ptr + which)[:, None]
        return tl.clamp(x, -448.0, 448.0).to(tl.float8e4nv)
    return x.to(cache_ptr.dtype.element_ty)


@triton.jit
def qk_norm_rotary_kernel(
    proj_ptr,
    positions_ptr,
    kv_positions_ptr,
    q_norm_ptr,
    k_norm_ptr,
    table_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_out_ptr,
    k_out_ptr,
    scales_ptr,
    proj_stride,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """TILE heads of one token: first queries, then keys, then values (whose place in a row comes after the gates)."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    head = tl.arange(0, TILE)
    c = tl.arange(0, D)
    row = proj_ptr + token * proj_stride
    if first >= HQ + HKV:
        heads = first - HQ - HKV + head
        slot = tl.load(kv_positions_ptr + token).to(tl.int64)
        v = tl.load(row + (HQ + first + head)[:, None] * D + c[None, :]).to(tl.float32)
        place = (slot * HKV + heads)[:, None] * D + c[None, :]
        tl.store(v_cache_ptr + place, _to_cache(v, scales_ptr, HKV + heads, v_cache_ptr, FP8))
    else:
        # The partner of dimension i is i + HALF below HALF and i - HALF above; the others are their own, unrotated.
        turned = c < 2 * HALF
        partner = tl.where(c < HALF, c + HALF, tl.where(turned, c - HALF, c))
        norm_ptr = k_norm_ptr if first >= HQ else q_norm_ptr
        x = tl.load(row + (first + head)[:, None] * D + c[None, :]).to(tl.float32)
        xp = tl.load(row + (first + head)[:, None] * D + partner[None, :]).to(tl.float32)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / D + eps)
        y = x * inverse[:, None] * tl.load(norm_ptr + c)[None, :]
        yp = xp * inverse[:, None] * tl.load(norm_ptr + partner)[None, :]
        angle = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + c % HALF
        cos = tl.load(angle, mask=turned, other=1.0)
        sin = tl.load(angle + HALF, mask=turned, other=0.0)
        sin = tl.where(c < HALF, -sin, sin)
        y = y * cos[None, :] + yp * sin[None, :]
        if first < HQ:
            place = (token * HQ + first + head)[:, None] * D + c[None, :]
            tl.store(q_out_ptr + place, y.to(q_out_ptr.dtype.element_ty))
        else:
            heads = first - HQ + head
            slot = tl.load(kv_positions_ptr + token).to(tl.int64)
            place = (slot * HKV + heads)[:, None] * D + c[None, :]
            tl.store(k_cache_ptr + place, _to_cache(y, scales_ptr, heads, k_cache_ptr, FP8))
            if KEYS:
                place = (token * HKV + heads)[:, None] * D + c[None, :]
                tl.store(k_out_ptr + place, y.to(k_out_ptr.dtype.element_ty))
