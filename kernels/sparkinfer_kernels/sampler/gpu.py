"""Sampling of all rows at once on the GPU, with parameters in device tensors: one captured graph serves any mix.

The definitions are those of `reference.py`: temperature, then top-k, then top-p over what top-k left, min-p relative to
the most likely token, ties kept, Gumbel noise by counter from the same integer generator. Instead of sorting, the
smallest value that passes is found by a search over thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton

from sparkinfer_kernels.sampler.filter_kernels import bracket_kernel, collect_kernel, count_kernel
from sparkinfer_kernels.sampler.kernels import ban_kernel, draw_kernel, first_kernel, pick_kernel
from sparkinfer_kernels.sampler.logprob_kernels import logprob_row_kernel, logprob_slice_kernel
from sparkinfer_kernels.sampler.pivot_kernel import pivot_kernel

MAX_TOP = 32
"""Most alternatives that `logprobs` reports."""
CAPACITY = 4096
"""Values that the search for a pivot keeps in registers; more are read again at each step."""
BAN_BLOCK = 128
SUB = 1024
"""Logits that a program has in registers at a time where it draws: their noise takes many."""
DRAW_WARPS = 4

Mode = Literal["greedy", "sample", "filter"]
"""What a captured step can do: greedy rows only; temperature too; temperature, top-k, top-p and min-p too. Each mode
serves the rows of those before it."""


@dataclass(frozen=True, slots=True)
class SamplerWorkspace:
    """Scratch of all calls with up to `rows` rows that run one after another. Programs: one per row and slice."""

    rows: int
    vocab: int
    values: torch.Tensor
    """[programs] fp32: best value of each slice of each row."""
    tokens: torch.Tensor
    """[programs] int32: its token."""
    lowest: torch.Tensor
    """[programs] fp32: smallest finite logit."""
    counts: torch.Tensor
    """[2 * programs * 32] int32: tokens above the thresholds of both search levels."""
    masses: torch.Tensor
    """[2 * programs * 32] fp32: their mass."""
    bracket: torch.Tensor
    """[rows, 8] fp32 and"""
    above: torch.Tensor
    """[rows, 2] int32: what the search knows of each row's pivot."""
    inside: torch.Tensor
    """[rows * vocab] fp32: scaled logits inside the last bracket."""
    found: torch.Tensor
    """[rows] int32: how many."""
    pivot: torch.Tensor
    """[rows] fp32."""
    saved: torch.Tensor
    """[max_banned] fp32: logits under the banned entries."""
    top_values: torch.Tensor
    """[programs * MAX_TOP] fp32, for `logprobs`."""
    top_ids: torch.Tensor
    """[programs * MAX_TOP] int32."""


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


def make_workspace(rows: int, vocab: int, device: torch.device, max_banned: int = 1024) -> SamplerWorkspace:
    """Allocate scratch.

    Args:
        rows: most rows m of a call.
        vocab: V.
        device: the GPU (or the CPU under Triton's interpreter).
        max_banned: most banned entries of a step.
    """
    programs = max(m * -(-vocab // _block(m)) for m in {min(rows, 4), min(rows, 16), rows})

    def floats(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=device)

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return SamplerWorkspace(
        rows=rows,
        vocab=vocab,
        values=floats(programs),
        tokens=ints(programs),
        lowest=floats(programs),
        counts=ints(64 * programs),
        masses=floats(64 * programs),
        bracket=floats(rows, 8),
        above=ints(rows, 2),
        inside=floats(rows * vocab),
        found=ints(rows),
        pivot=floats(rows),
        saved=floats(max_banned),
        top_values=floats(programs * MAX_TOP),
        top_ids=ints(programs * MAX_TOP),
    )


def _block(m: int) -> int:
    """Logits of a slice: enough programs for all multiprocessors, and as few slices as that allows."""
    return 2048 if m <= 4 else 4096


def _warps(block: int) -> int:
    return block // 512


def _check(logits: torch.Tensor, workspace: SamplerWorkspace) -> None:
    m, vocab = logits.shape
    if m > workspace.rows or vocab != workspace.vocab or logits.stride(1) != 1:
        raise ValueError(
            f"logits {tuple(logits.shape)} with strides {logits.stride()} in a workspace of {workspace.rows} rows of "
            f"{workspace.vocab}"
        )


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
    _check(logits, workspace)
    m, vocab = logits.shape
    if m == 0:
        return out
    banned = tensors.banned_rows is not None
    if banned:
        _ban(logits, tensors, workspace, restore=False)
    block = _block(m)
    slices = triton.cdiv(vocab, block)
    grid = (m, slices)
    row = (tensors.temperature, tensors.keys, tensors.top_k, tensors.top_p, tensors.min_p)
    drawing = {"BLOCK": block, "SUB": SUB, "num_warps": DRAW_WARPS}
    options = {"BLOCK": block, "SUB": block, "num_warps": _warps(block)} if mode == "greedy" else drawing
    first_kernel[grid](
        logits,
        *row,
        workspace.values,
        workspace.tokens,
        workspace.lowest,
        workspace.found,
        logits.stride(0),
        vocab,
        slices,
        SAMPLE=mode != "greedy",
        FILTER=mode == "filter",
        **options,
    )
    padded = triton.next_power_of_2(slices)
    if mode == "filter":
        _find_pivots(logits, tensors, workspace)
        draw_kernel[grid](
            logits,
            *row,
            workspace.pivot,
            workspace.values,
            workspace.tokens,
            logits.stride(0),
            vocab,
            slices,
            **drawing,
        )
    pick_kernel[(m,)](workspace.values, workspace.tokens, out, vocab, slices, SLICES=padded, num_warps=1)
    if banned:
        _ban(logits, tensors, workspace, restore=True)
    return out


def _ban(logits: torch.Tensor, tensors: SamplingTensors, workspace: SamplerWorkspace, restore: bool) -> None:
    rows, tokens = tensors.banned_rows, tensors.banned_tokens
    if rows is None or tokens is None or rows.shape != tokens.shape:
        raise ValueError("banned entries need rows and tokens of one shape")
    count = rows.shape[0]
    if count > workspace.saved.shape[0]:
        raise ValueError(f"{count} banned entries, the workspace holds {workspace.saved.shape[0]}: raise max_banned")
    if count:
        ban_kernel[(triton.cdiv(count, BAN_BLOCK),)](
            logits, rows, tokens, workspace.saved, logits.stride(0), count, RESTORE=restore, BLOCK=BAN_BLOCK
        )


def _find_pivots(logits: torch.Tensor, tensors: SamplingTensors, workspace: SamplerWorkspace) -> None:
    """Fill `workspace.pivot` for all filtered rows."""
    m, vocab = logits.shape
    block = _block(m)
    slices = triton.cdiv(vocab, block)
    padded = triton.next_power_of_2(slices)
    filters = (tensors.temperature, tensors.top_k, tensors.top_p, tensors.min_p)
    work = workspace
    state = (work.counts, work.masses, work.bracket, work.above)
    size = {"BLOCK": block, "VEC": 16 // logits.element_size(), "num_warps": 4}
    for level in (0, 1, 2):
        bracket_kernel[(m,)](
            *filters, work.values, work.lowest, *state, vocab, slices, LEVELS=level, SLICES=padded, num_warps=4
        )
        if level < 2:
            count_kernel[(m, slices)](logits, *filters, *state, logits.stride(0), vocab, slices, LEVEL=level, **size)
    collect_kernel[(m, slices)](
        logits, *filters, work.bracket, work.inside, work.found, logits.stride(0), vocab, **size
    )
    pivot_kernel[(m,)](
        *filters, work.bracket, work.above, work.inside, work.found, work.pivot, vocab, CAPACITY=CAPACITY, num_warps=16
    )


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
    _check(logits, workspace)
    if not 0 <= top <= MAX_TOP:
        raise ValueError(f"{top} alternatives asked for, 0 to {MAX_TOP} can be reported")
    m, vocab = logits.shape
    top = min(top, vocab)
    device, block = logits.device, _block(m)
    slices = triton.cdiv(vocab, block)
    chosen = torch.empty(m, dtype=torch.float32, device=device)
    rank = torch.empty(m, dtype=torch.int32, device=device)
    ids = torch.empty(m, top, dtype=torch.int32, device=device)
    values = torch.empty(m, top, dtype=torch.float32, device=device)
    if m == 0:
        return chosen, rank, ids, values
    work = (
        workspace.values,
        workspace.lowest,
        workspace.tokens,
        workspace.top_values,
        workspace.top_ids,
    )
    logprob_slice_kernel[(m, slices)](
        logits,
        tokens,
        *work,
        logits.stride(0),
        vocab,
        slices,
        COUNT=top,
        BLOCK=block,
        num_warps=_warps(block),
    )
    padded = triton.next_power_of_2(slices)
    logprob_row_kernel[(m,)](
        logits,
        tokens,
        *work,
        chosen,
        rank,
        ids,
        values,
        logits.stride(0),
        slices,
        COUNT=top,
        SLICES=padded,
        CANDIDATES=triton.next_power_of_2(max(1, slices * top)),
        num_warps=4,
    )
    return chosen, rank, ids, values
