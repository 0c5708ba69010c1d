"""Row kernels around the projections: RMS norms with residual add, embedding and row gather, SwiGLU, FP8 quantisation.

One program handles one row and reads it once. All arithmetic is fp32. Rounding follows the plain torch reference: the
residual stream is rounded to its own dtype (bf16 or fp32) and the norm reads the rounded sum. An FP8 output (OCP e4m3,
`torch.float8_e4m3fn`) is quantised from the fp32 result, not from its bf16 rounding: row scale = amax / 448, and
value = fp8 * scale.

Every function writes only into the tensors it is given (or into new ones where `out` is None), takes no host value
from the device and can be captured into a CUDA graph.
"""

from __future__ import annotations

import torch
import triton

from sparkinfer_kernels.programmatic import PDL
from sparkinfer_kernels.rms_norm.kernels import norm_kernel, quantise_kernel, swiglu_kernel

FP8_MAX = 448.0
"""Largest finite e4m3 value."""


def _blocks(d: int) -> tuple[int, int]:
    """A row as two power-of-two pieces: 5120 = 4096 + 1024 needs no masked lanes."""
    first = 1 << (d.bit_length() - 1)
    rest = d - first
    return first, triton.next_power_of_2(rest) if rest else 0


def _warps(d: int, rows: int) -> int:
    # Few rows: latency counts, more warps share a row. Many rows: 16-byte accesses, several rows per multiprocessor.
    per_thread = 16 if rows <= 128 else 40
    return min(16, max(1, triton.next_power_of_2(-(-d // (32 * per_thread)))))


def _check_row(name: str, x: torch.Tensor, d: int) -> None:
    if x.shape[-1] != d or x.stride(-1) != 1:
        raise ValueError(f"{name} has shape {tuple(x.shape)} and strides {x.stride()}; rows of {d} values side by side")


def _launch_norm(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    residual: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    weight1: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
    fp8: tuple[torch.Tensor, torch.Tensor] | None,
    count: int,
) -> None:
    d = weight1.shape[0]
    _check_row("input", x, d)
    block_a, block_b = _blocks(d)
    x_fp8, scale = fp8 if fp8 is not None else (None, None)
    if count == 0:
        return
    norm_kernel[(count,)](
        x,
        rows,
        residual,
        residual_out,
        weight1,
        out,
        x_fp8,
        scale,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        0 if residual_out is None else residual_out.stride(0),
        0 if out is None else out.stride(0),
        0 if x_fp8 is None else x_fp8.stride(0),
        d,
        eps,
        ROWS=rows is not None,
        ADD=residual is not None,
        KEEP=residual_out is not None,
        OUT=out is not None,
        FP8=fp8 is not None,
        A=block_a,
        B=block_b,
        PDL=PDL,
        launch_pdl=PDL,
        num_warps=_warps(d, count),
    )


def rms_norm(
    x: torch.Tensor,
    weight1: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    fp8: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor | None:
    """Zero-centred RMS norm of each row.

    Args:
        x: [T, d] bf16 or fp32, rows may be strided.
        weight1: [d] fp32, the checkpoint's weight plus one.
        eps: added to the mean square.
        out: [T, d] bf16 (or the dtype of `x`). Made when neither it nor `fp8` is given.
        fp8: (values [T, d] float8_e4m3fn, row scales [T] fp32), written when given.

    Returns:
        `out`; None when only the FP8 form was asked for.
    """
    if out is None and fp8 is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_norm(x, None, None, None, weight1, eps, out, fp8, x.shape[0])
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight1: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    fp8: tuple[torch.Tensor, torch.Tensor] | None = None,
    rows: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Add a sublayer's output to the residual stream and norm the sum; optionally for chosen rows only.

    Args:
        x: [T, d] bf16, the sublayer's output.
        residual: [T, d] bf16 or fp32. Overwritten by the sum, rounded to its dtype, unless `residual_out` is given.
        weight1: [d] fp32.
        eps: added to the mean square.
        out: [T, d] (or [m, d] with `rows`) bf16. Made when neither it nor `fp8` is given.
        fp8: (values [.., d] float8_e4m3fn, row scales [..] fp32), written when given.
        rows: [m] int32 or int64. Output row i comes from row rows[i] of `x` and `residual`; entries may repeat. Needs
            `residual_out`: [m, d] in the dtype of `residual`, another tensor than it.

    Returns:
        (`out` or None, the tensor that holds the sum).

    Raises:
        ValueError: `rows` without `residual_out`.
    """
    if rows is not None and residual_out is None:
        raise ValueError("rows are gathered into another tensor: give residual_out [m, d]")
    count = x.shape[0] if rows is None else rows.shape[0]
    kept = residual if residual_out is None else residual_out
    if out is None and fp8 is None:
        out = torch.empty(count, x.shape[1], dtype=x.dtype, device=x.device)
    _launch_norm(x, rows, residual, kept, weight1, eps, out, fp8, count)
    return out, kept


def embed_rms_norm(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    weight1: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    out: torch.Tensor | None = None,
    fp8: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Look tokens up and norm them for the first layer, in one kernel.

    Args:
        tokens: [T] int32 or int64, all within the vocabulary (padding included).
        embedding: [V, d] bf16.
        weight1: [d] fp32, of the first layer's norm.
        eps: added to the mean square.
        residual: [T, d] bf16 or fp32, written with the embeddings.
        out: [T, d] bf16. Made when neither it nor `fp8` is given.
        fp8: (values [T, d] float8_e4m3fn, row scales [T] fp32), written when given.

    Returns:
        (`out` or None, `residual`).
    """
    if out is None and fp8 is None:
        out = torch.empty(tokens.shape[0], embedding.shape[1], dtype=embedding.dtype, device=embedding.device)
    _launch_norm(embedding, tokens, None, residual, weight1, eps, out, fp8, tokens.shape[0])
    return out, residual


def swiglu(
    gate_up: torch.Tensor, out: torch.Tensor | None = None, fp8: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor | None:
    """silu(gate) * up of each row, for the down projection.

    Args:
        gate_up: [T, 2 * I] bf16: I gate values, then I up values.
        out: [T, I] bf16. Made when neither it nor `fp8` is given.
        fp8: (values [T, I] float8_e4m3fn, row scales [T] fp32), written when given.

    Returns:
        `out`; None when only the FP8 form was asked for.
    """
    count, inner = gate_up.shape[0], gate_up.shape[1] // 2
    _check_row("gate_up", gate_up, 2 * inner)
    if out is None and fp8 is None:
        out = torch.empty(count, inner, dtype=gate_up.dtype, device=gate_up.device)
    if count == 0:
        return out
    x_fp8, scale = fp8 if fp8 is not None else (None, None)
    block_a, block_b = _blocks(inner)
    swiglu_kernel[(count,)](
        gate_up,
        out,
        x_fp8,
        scale,
        gate_up.stride(0),
        0 if out is None else out.stride(0),
        0 if x_fp8 is None else x_fp8.stride(0),
        inner,
        OUT=out is not None,
        FP8=fp8 is not None,
        A=block_a,
        B=block_b,
        PDL=PDL,
        launch_pdl=PDL,
        num_warps=_warps(inner, count),
    )
    return out


def quantise_rows(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """FP8 copy of each row with its own scale, for inputs that no other kernel quantises.

    Args:
        x: [T, d] bf16, rows may be strided.
        values: [T, d] float8_e4m3fn contiguous, written.
        scales: [T] fp32, written.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    m, d = x.shape
    _check_row("input", x, d)
    if values.shape != (m, d) or values.dtype != torch.float8_e4m3fn or scales.shape != (m,):
        raise ValueError(f"values must be e4m3 {(m, d)} and scales fp32 {(m,)}, got {values.dtype} {values.shape}")
    if not values.is_contiguous():
        raise ValueError(f"values must be contiguous, their strides are {values.stride()}")
    if m:
        block_a, block_b = _blocks(d)
        quantise_kernel[(m,)](
            x, values, scales, x.stride(0), d, A=block_a, B=block_b, PDL=PDL, launch_pdl=PDL, num_warps=_warps(d, m)
        )
