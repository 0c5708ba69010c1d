"""Gated DeltaNet on the GPU: convolution, gates, recurrence and gated norm of one layer (arXiv 2412.06464).

`gdn_decode` is one kernel for one token of each row. `gdn_prefill` is four kernels over packed sequences: convolution,
UT transform of every chunk, the pass over the states, outputs (a fifth where checkpoints are wanted). `plan_prefill`
lays the chunks out, once for all layers of a pass. Nothing here reads a length on the host, synchronises, or allocates
when `out` is given.

Shapes: D = 128 is the key and the value dimension; Hk key heads, Hv value heads, C = (2 * Hk + Hv) * D channels of the
convolution, of width W = 4. A row of `proj` is in_proj's output: qkv [C] | z [Hv * D] | b [Hv] | a [Hv], bf16, channels
adjacent. `conv_weight` [W, C], `neg_exp_a_log` [Hv], `dt_bias` [Hv] and `norm_weight` [D] are fp32. One layer's caches:
`window` [slots, W - 1, C] bf16, oldest input first; `state` [slots, Hv, D, D] (key, value), fp32 or bf16; a slot's
elements are adjacent. The last slot is the dummy: rows that point at it are padding, their outputs are zeros and its
contents are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparkinfer_kernels.causal_conv1d.gpu import causal_conv1d_prefill
from sparkinfer_kernels.gated_delta_rule import decode_kernels, prefill_kernels
from sparkinfer_kernels.gated_delta_rule.layout import (
    CHUNK,
    HEAD_DIM,
    Checkpoints,
    Heads,
    PrefillWorkspace,
    heads_of,
    make_prefill_workspace,
    max_chunks,
    plan_prefill,
)
from sparkinfer_kernels.gated_delta_rule.tuned import Tuning, tuning_for

__all__ = [
    "CHUNK",
    "HEAD_DIM",
    "Checkpoints",
    "DecodeWorkspace",
    "Heads",
    "PrefillWorkspace",
    "Tuning",
    "gdn_decode",
    "gdn_prefill",
    "make_decode_workspace",
    "make_prefill_workspace",
    "max_chunks",
    "plan_prefill",
    "tuning_for",
]


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """What `gdn_decode` needs beside its tensors; one serves all layers, on one stream at a time."""

    tickets: torch.Tensor
    """[max_rows, Hk * D] int32, zero between launches: value heads that have read a channel of the keys' window."""


def make_decode_workspace(max_rows: int, key_heads: int, device: torch.device | str) -> DecodeWorkspace:
    """A workspace for up to `max_rows` rows."""
    return DecodeWorkspace(torch.zeros(max_rows, key_heads * HEAD_DIM, dtype=torch.int32, device=device))


def gdn_decode(
    proj: torch.Tensor,
    window: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    conv_weight: torch.Tensor,
    neg_exp_a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    *,
    workspace: DecodeWorkspace,
    tuning: Tuning | None = None,
) -> torch.Tensor:
    """One token of each of n rows through a GDN layer between `in_proj` and `out_proj`; one kernel.

    Window and state of every row's slot advance in place. Rows other than padding have slots of their own.

    Args:
        proj: [n, C + Hv * D + 2 * Hv] bf16.
        window, state, conv_weight, neg_exp_a_log, dt_bias, norm_weight: see the module.
        slots: [n] int32; the last slot marks padding.
        eps: added to the mean square of the output norm.
        out: [n, Hv * D] bf16, written; made when None.
        workspace: from `make_decode_workspace`, for at least n rows.
        tuning: launch parameters; those measured for the device when None.

    Returns:
        `out`: norm(o) * norm_weight * silu(z), bf16; zeros in padding rows.

    Raises:
        ValueError: for shapes, dtypes or strides the kernel does not take.
    """
    heads = heads_of(proj, window, state, conv_weight)
    rows = proj.shape[0]
    have, channels = workspace.tickets.shape
    if have < rows or channels != heads.key * HEAD_DIM:
        raise ValueError(f"the workspace has tickets [{have}, {channels}], needed are [{rows}, {heads.key * HEAD_DIM}]")
    if out is None:
        out = torch.empty(rows, heads.value * HEAD_DIM, dtype=proj.dtype, device=proj.device)
    if rows:
        tuning = tuning or tuning_for(proj.device)
        decode_kernels.launch_decode(
            proj, window, state, slots, conv_weight, neg_exp_a_log, dt_bias, norm_weight, eps, out,
            workspace.tickets, heads, tuning.decode if rows < tuning.many_rows else tuning.decode_many,
        )  # fmt: skip
    return out


def gdn_prefill(
    proj: torch.Tensor,
    window: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    conv_weight: torch.Tensor,
    neg_exp_a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    *,
    workspace: PrefillWorkspace,
    checkpoints: Checkpoints | None = None,
    tuning: Tuning | None = None,
) -> torch.Tensor:
    """Packed sequences through a GDN layer between `in_proj` and `out_proj`, each from its slot's window and state.

    A sequence that starts at position 0 starts from zeros, whatever its slot holds. Chunks of 64 tokens are cut at
    multiples of 64 in each sequence's own positions, so a prompt computed in several passes, or from a checkpoint, sees
    the same chunks where the cuts are multiples of 64.

    Args:
        proj: [T, C + Hv * D + 2 * Hv] bf16; rows from cu_seqlens[R] on are padding.
        window, state, conv_weight, neg_exp_a_log, dt_bias, norm_weight: see the module.
        slots: [R] int32, one slot for each sequence; of sequences of length 0 they are not looked at.
        cu_seqlens: [R + 1] int32, first row of each sequence; equal neighbours are a padding sequence.
        starts: [R] int32, tokens each sequence already has.
        eps: added to the mean square of the output norm.
        out: [T, Hv * D] bf16, written; made when None.
        workspace: from `make_prefill_workspace`; `plan_prefill` must have run for this pass, on the same stream, with
            the same `cu_seqlens`, `starts`, T and checkpoints.
        checkpoints: where states and windows are wanted; None for nowhere.
        tuning: launch parameters; those measured for the device when None.

    Returns:
        `out`: norm(o) * norm_weight * silu(z), bf16; zeros in padding rows.

    Raises:
        ValueError: for shapes, dtypes or strides the kernels do not take, or a workspace that is too small.
    """
    heads = heads_of(proj, window, state, conv_weight)
    tokens, sequences = proj.shape[0], slots.shape[0]
    workspace.check(tokens, sequences, heads)
    if out is None:
        out = torch.empty(tokens, heads.value * HEAD_DIM, dtype=proj.dtype, device=proj.device)
    if not tokens:
        return out
    tuning = tuning or tuning_for(proj.device)
    causal_conv1d_prefill(
        proj, window, slots, cu_seqlens, starts, conv_weight, workspace, heads, checkpoints, tuning.conv
    )
    prefill_kernels.transform_chunks(
        proj, window, slots, cu_seqlens, starts, neg_exp_a_log, dt_bias, workspace, heads, tuning.transform
    )
    prefill_kernels.scan_states(state, slots, cu_seqlens, starts, workspace, heads, checkpoints, tuning.scan)
    if checkpoints is not None:
        prefill_kernels.finish_checkpoints(starts, workspace, heads, checkpoints, tuning.checkpoint)
    prefill_kernels.write_outputs(proj, norm_weight, eps, out, workspace, heads, sequences, tuning.output)
    return out
