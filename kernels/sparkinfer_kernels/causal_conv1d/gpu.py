"""Causal convolution over packed sequences on the GPU, with the normalisation of the heads it feeds.

The update of single tokens is part of `gated_delta_rule.gpu.gdn_decode`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from sparkinfer_kernels.causal_conv1d.kernels import conv_prefill_kernel

if TYPE_CHECKING:
    from sparkinfer_kernels.gated_delta_rule.layout import Checkpoints, Heads, PrefillWorkspace
    from sparkinfer_kernels.gated_delta_rule.tuned import Launch

CHUNK = 64
HEAD_DIM = 128


MOST_HEADS = 8


def heads_together(heads: Heads) -> int:
    """Heads that one program takes: a power of two that divides the counts of queries', keys' and values' heads."""
    common = math.gcd(heads.key, heads.value, MOST_HEADS)
    return common & -common


def causal_conv1d_prefill(
    proj: torch.Tensor,
    window: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    weight: torch.Tensor,
    workspace: PrefillWorkspace,
    heads: Heads,
    checkpoints: Checkpoints | None,
    launch: Launch,
) -> None:
    """Convolution of width 4 and SiLU of each sequence from its slot's window; heads of queries and keys normalised.

    Writes `workspace.mixed` and the checkpoints' windows; the slots' own windows stay as they are. Arguments as in
    `gated_delta_rule.gpu.gdn_prefill`; `workspace` is planned.
    """
    chunks = workspace.chunks(proj.shape[0], slots.shape[0])
    block = launch.block
    grouped = heads_together(heads)
    conv_prefill_kernel[((2 * heads.key + heads.value) // grouped, chunks * (CHUNK // block))](
        proj, window, slots, cu_seqlens, starts, weight, workspace.mixed,
        workspace.chunk_sequence, workspace.chunk_token, workspace.chunk_length, workspace.chunk_checkpoint,
        cu_seqlens if checkpoints is None else checkpoints.sequence,
        cu_seqlens if checkpoints is None else checkpoints.position,
        window if checkpoints is None else checkpoints.window,
        proj.stride(0), window.stride(0),
        0 if checkpoints is None else checkpoints.window.stride(0),
        0 if checkpoints is None else checkpoints.sequence.shape[0],
        HK=heads.key, HV=heads.value, D=HEAD_DIM, CHUNK=CHUNK, BLOCK=block, HEADS=grouped,
        CHECKPOINTS=checkpoints is not None, **launch.options,
    )  # fmt: skip
