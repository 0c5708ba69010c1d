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
    count,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tokens / TOKENS, heads / TILE): TILE heads of each of TOKENS tokens. The first programs of a token take
    queries, then keys, then values (whose place in a row comes after the gates)."""
    wait_for_previous(PDL)
    first = tl.program_id(1) * TILE
    r = tl.arange(0, TOKENS * TILE)
    c = tl.arange(0, D)
    head = first + r % TILE
    token = tl.program_id(0) * TOKENS + r // TILE
    live = token < count
    mask = live[:, None]
    row = proj_ptr + (token.to(tl.int64) * proj_stride)[:, None]
    if first >= HQ + HKV:
        slot = tl.load(kv_positions_ptr + token, mask=live, other=0).to(tl.int64)
        head -= HQ + HKV
        v = tl.load(row + (2 * HQ + HKV + head)[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        place = (slot * HKV + head)[:, None] * D + c[None, :]
        tl.store(v_cache_ptr + place, _to_cache(v, scales_ptr, HKV + head, v_cache_ptr, FP8), mask=mask)
    else:
        # The partner of dimension i is i + HALF below HALF and i - HALF above; the others are their own, unrotated.
        turned = c < 2 * HALF
        partner = tl.where(c < HALF, c + HALF, tl.where(turned, c - HALF, c))
        norm_ptr = k_norm_ptr if first >= HQ else q_norm_ptr
        x = tl.load(row + head[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        xp = tl.load(row + head[:, None] * D + partner[None, :], mask=mask & turned[None, :], other=0.0).to(tl.float32)
        position = tl.load(positions_ptr + token, mask=live, other=0).to(tl.int64)
        angle = table_ptr + (position * (2 * HALF))[:, None] + (c % HALF)[None, :]
        cos = tl.load(angle, mask=mask & turned[None, :], other=1.0)
        sin = tl.load(angle + HALF, mask=mask & turned[None, :], other=0.0)
        sin = tl.where((c < HALF)[None, :], -sin, sin)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / D + eps)
        y = x * inverse[:, None] * tl.load(norm_ptr + c)[None, :]
        yp = xp * inverse[:, None] * tl.load(norm_ptr + partner)[None, :]
        y = y * cos + yp * sin
        if first < HQ:
            place = (token.to(tl.int64) * HQ + head)[:, None] * D + c[None, :]
            tl.store(q_out_ptr + place, y.to(q_out_ptr.dtype.element_ty), mask=mask)
        else:
            head -= HQ
            slot = tl.load(kv_positions_ptr + token, mask=live, other=0).to(tl.int64)
            place = (slot * HKV + head)[:, None] * D + c[None, :]
            tl.store(k_cache_ptr + place, _to_cache(y, scales_ptr, head, k_cache_ptr, FP8), mask=mask)
            if KEYS:
                place = (token.to(tl.int64) * HKV + head)[:, None] * D + c[None, :]
                tl.store(k_out_ptr + place, y.to(k_out_ptr.dtype.element_ty), mask=mask)
