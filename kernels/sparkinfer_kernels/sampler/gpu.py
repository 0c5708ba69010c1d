"""Sampling of all rows at once on the GPU, with parameters in device tensors: one captured graph serves any mix.

The definitions are those of `reference.py`: temperature, then top-k, then top-p over what top-k left, min-p relative to
the most likely token, ties kept, Gumbel noise by counter from the same integer generator. Instead of sorting, the
smallest value that passes is found by a search over thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Mode = Literal["greedy", "sample", "filter"]
"""What a captured step can do: greedy rows only; temperature too; temperature, top-k, top-p and min-p too. Each mode
serves the rows of those before it."""


@dataclass(frozen=True, slots=True)
class SamplerWorkspace:
    """Scratch of one padded number of rows."""

    rows: int
    vocab: int


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of m rows, on the device. Padding rows: temperature 0."""

    temperature: torch.Tensor
    """[m] fp32, 0 = greedy."""
    keys: torch.Tensor
    """[m, 2] int32, from `reference.noise_keys`; not read for greedy rows."""
    top_k: torch.Tensor
    """[m] int32, 0 = off."""
    top_p: torch.Tensor
    """[m] fp32, 1 = off."""
    min_p: torch.Tensor
    """[m] fp32, 0 = off."""
    banned_rows: torch.Tensor | None = None
    """[b] int32: row of each banned entry, -1 for none (padding). None: the step bans nothing."""
    banned_tokens: torch.Tensor | None = None
    """[b] int32: token that the row must not take; a (row, token) pair occurs once."""


def make_workspace(rows: int, vocab: int, device: torch.device) -> SamplerWorkspace:
    """Allocate scratch for `rows` rows of `vocab` logits."""
    raise NotImplementedError


def sample(
    logits: torch.Tensor, tensors: SamplingTensors, mode: Mode, workspace: SamplerWorkspace, out: torch.Tensor
) -> torch.Tensor:
    """Choose one token per row.

    Args:
        logits: [m, V] fp32 or bf16, rows may be strided; unchanged afterwards (banned entries are restored).
        tensors: the rows' parameters.
        mode: fixed at capture. A row that asks for more than the mode offers is an error of the caller; it is sampled
            as if it had not asked.
        workspace: of at least m rows.
        out: [m] int64 or int32, written. Equal values: the lowest token wins.

    Returns:
        `out`.
    """
    raise NotImplementedError


def logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top: int, workspace: SamplerWorkspace
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Natural-log probabilities of the raw distribution; fixed shapes, can be captured.

    Args:
        logits: [m, V] fp32 or bf16, as `sample` got them.
        tokens: [m] int32 or int64, the chosen tokens.
        top: how many of the most likely tokens to report, 0 to 32, fixed at capture.
        workspace: of at least m rows.

    Returns:
        (logprob of the chosen [m] fp32, its rank counted from 1 [m] int32, top ids [m, top] int32, top logprobs
        [m, top] fp32).
    """
    raise NotImplementedError
