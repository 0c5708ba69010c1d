"""Triton functions of the counter-based Gumbel noise, equal to `reference.gumbel_noise` up to the last bits of log."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _lowbias32(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log1p_series(m):
    """log(1 + m) for 1 + m between sqrt(1/2) and sqrt(2), about one unit in the last place (Moshier, Cephes logf)."""
    z = m * m
    y = 7.0376836292e-2 * m - 1.1514610310e-1
    y = y * m + 1.1676998740e-1
    y = y * m - 1.2420140846e-1
    y = y * m + 1.4249322787e-1
    y = y * m - 1.6668057665e-1
    y = y * m + 2.0000714765e-1
    y = y * m - 2.4999993993e-1
    y = y * m + 3.3333331174e-1
    return y * m * z, z


@triton.jit
def _split(x):
    """(m, exponent) with x = (1 + m) * 2**exponent and 1 + m between sqrt(1/2) and sqrt(2), for normal x > 0."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) & 0xFF) - 126
    m = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    small = m < 0.70710678
    return tl.where(small, m + m, m) - 1.0, tl.where(small, exponent - 1, exponent).to(tl.float32)


@triton.jit
def _join(m, exponent):
    y, z = _log1p_series(m)
    y += exponent * -2.12194440e-4
    y += -0.5 * z
    return (m + y) + exponent * 0.693359375


@triton.jit
def log(x):
    """Natural logarithm of normal positive fp32. Written out: the hardware's one is too coarse near 1."""
    m, exponent = _split(x)
    return _join(m, exponent)


@triton.jit
def gumbel_noise(token, key0, key1):
    """Noise of vocabulary indices (int32 tensor) for a row's two int32 keys."""
    h = token.to(tl.uint32, bitcast=True) + key0.to(tl.uint32, bitcast=True)
    h = _lowbias32(_lowbias32(h) ^ key1.to(tl.uint32, bitcast=True))
    u = (h.to(tl.float32) + 0.5) * 2.0**-32
    m, exponent = _split(tl.maximum(1.0 - u, 2.0**-33))
    # Small u: log1p of -u itself, in full relative precision: the winners are there.
    small = u < 0.29
    e = -_join(tl.where(small, -u, m), tl.where(small, 0.0, exponent))
    return -log(tl.where(u < 1.0, e, 88.0))
