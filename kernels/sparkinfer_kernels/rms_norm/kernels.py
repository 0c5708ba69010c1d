"""Triton row kernels: norm (with residual add, gather and FP8 output) and SwiGLU."""

from __future__ import annotations

import triton
import triton.language as tl

from sparkinfer_kernels.programmatic import wait_for_previous


@triton.jit
def _store_row(y, offsets, mask, factor, out_ptr, out_row, fp8_ptr, fp8_row, OUT: tl.constexpr, FP8: tl.constexpr):
    if OUT:
        tl.store(out_ptr + out_row + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)
    if FP8:
        tl.store(fp8_ptr + fp8_row + offsets, (y * factor).to(tl.float8e4nv), mask=mask)


@triton.jit
def _row_scale(amax):
    # A row of zeros keeps a harmless scale. The factor is divided, not approximated: 448 must not be exceeded.
    amax = tl.maximum(amax, 1e-12)
    return amax / 448.0, tl.math.div_rn(448.0, amax)


@triton.jit
def _read(
    x_ptr, residual_ptr, keep_ptr, x_row, residual_row, keep_row, offsets, mask, ADD: tl.constexpr, KEEP: tl.constexpr
):
    x = tl.load(x_ptr + x_row + offsets, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + residual_row + offsets, mask=mask, other=0.0).to(tl.float32)
    if KEEP:
        rounded = x.to(keep_ptr.dtype.element_ty)
        tl.store(keep_ptr + keep_row + offsets, rounded, mask=mask)
        x = rounded.to(tl.float32)
    return x


@triton.jit
def norm_kernel(
    x_ptr,
    rows_ptr,
    residual_ptr,
    keep_ptr,
    weight_ptr,
    out_ptr,
    fp8_ptr,
    scale_ptr,
    x_stride,
    residual_stride,
    keep_stride,
    out_stride,
    fp8_stride,
    d,
    eps,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    OUT: tl.constexpr,
    FP8: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: [x + residual], kept; its norm as bf16 and, or, FP8. The row is A + B values, B masked."""
    row = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, A)
    wa = tl.load(weight_ptr + a, mask=a < d, other=0.0)
    if B:
        b = A + tl.arange(0, B)
        wb = tl.load(weight_ptr + b, mask=b < d, other=0.0)
    wait_for_previous(PDL)
    source = row
    if ROWS:
        source = tl.load(rows_ptr + row).to(tl.int64)
    x_row, residual_row, keep_row = source * x_stride, source * residual_stride, row * keep_stride
    xa = _read(x_ptr, residual_ptr, keep_ptr, x_row, residual_row, keep_row, a, a < d, ADD, KEEP)
    square = tl.sum(xa * xa)
    if B:
        xb = _read(x_ptr, residual_ptr, keep_ptr, x_row, residual_row, keep_row, b, b < d, ADD, KEEP)
        square += tl.sum(xb * xb)
    inverse = 1.0 / tl.sqrt_rn(square / d + eps)
    ya = xa * inverse * wa
    if B:
        yb = xb * inverse * wb
    factor = 1.0
    if FP8:
        amax = tl.max(tl.abs(ya))
        if B:
            amax = tl.maximum(amax, tl.max(tl.abs(yb)))
        scale, factor = _row_scale(amax)
        tl.store(scale_ptr + row, scale)
    _store_row(ya, a, a < d, factor, out_ptr, row * out_stride, fp8_ptr, row * fp8_stride, OUT, FP8)
    if B:
        _store_row(yb, b, b < d, factor, out_ptr, row * out_stride, fp8_ptr, row * fp8_stride, OUT, FP8)


@triton.jit
def _glu(x_ptr, x_row, inner, offsets, mask):
    x = tl.load(x_ptr + x_row + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + x_row + inner + offsets, mask=mask, other=0.0).to(tl.float32)
    # The reference rounds silu(gate) and its product with up to the activations' dtype.
    return (x * tl.sigmoid(x)).to(x_ptr.dtype.element_ty).to(tl.float32) * up


@triton.jit
def swiglu_kernel(
    x_ptr,
    out_ptr,
    fp8_ptr,
    scale_ptr,
    x_stride,
    out_stride,
    fp8_stride,
    inner,
    OUT: tl.constexpr,
    FP8: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of silu(gate) * up as bf16 and, or, FP8."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_row = row * x_stride
    a = tl.arange(0, A)
    ya = _glu(x_ptr, x_row, inner, a, a < inner)
    if B:
        b = A + tl.arange(0, B)
        yb = _glu(x_ptr, x_row, inner, b, b < inner)
    factor = 1.0
    if FP8:
        amax = tl.max(tl.abs(ya))
        if B:
            amax = tl.maximum(amax, tl.max(tl.abs(yb)))
        scale, factor = _row_scale(amax)
        tl.store(scale_ptr + row, scale)
    _store_row(ya, a, a < inner, factor, out_ptr, row * out_stride, fp8_ptr, row * fp8_stride, OUT, FP8)
    if B:
        _store_row(yb, b, b < inner, factor, out_ptr, row * out_stride, fp8_ptr, row * fp8_stride, OUT, FP8)


@triton.jit
def quantise_kernel(x_ptr, fp8_ptr, scale_ptr, x_stride, d, A: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """One row as FP8 with its own scale."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, A)
    xa = tl.load(x_ptr + row * x_stride + a, mask=a < d, other=0.0).to(tl.float32)
    if B:
        b = A + tl.arange(0, B)
        xb = tl.load(x_ptr + row * x_stride + b, mask=b < d, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(xa))
    if B:
        amax = tl.maximum(amax, tl.max(tl.abs(xb)))
    scale, factor = _row_scale(amax)
    tl.store(scale_ptr + row, scale)
    tl.store(fp8_ptr + row * d + a, (xa * factor).to(tl.float8e4nv), mask=a < d)
    if B:
        tl.store(fp8_ptr + row * d + b, (xb * factor).to(tl.float8e4nv), mask=b < d)
