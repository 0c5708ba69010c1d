"""Where the tokens of packed sequences stand in chunks, on the device; the buffers of a prefill pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sparkinfer_kernels.gated_delta_rule.plan_kernel import plan_kernel

CHUNK = 64
"""Tokens per chunk."""
HEAD_DIM = 128
"""Key and value dimension of a head, the one size the kernels take."""
CONV_WIDTH = 4
PLAN_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Heads:
    """Head counts of a GDN layer."""

    key: int
    value: int

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return (2 * self.key + self.value) * HEAD_DIM

    @property
    def row(self) -> int:
        """Elements of a row of in_proj's output: qkv | z | b | a."""
        return self.channels + self.value * HEAD_DIM + 2 * self.value


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """States and windows wanted inside a pass, one layer's view. N entries, some of them unused.

    Entries must come ordered by (sequence, position); several may lie in one chunk.
    """

    sequence: torch.Tensor
    """[N] int32: sequence of the pass, -1 where the entry is unused."""
    position: torch.Tensor
    """[N] int32: tokens of the sequence, `starts` counted, after which it is wanted: in (start, start + length]."""
    state: torch.Tensor
    """[N, Hv, D, D], dtype of the state: written; an entry's elements are adjacent, entries may be apart."""
    window: torch.Tensor
    """[N, W - 1, C] bf16: written; likewise."""


def max_chunks(tokens: int, sequences: int) -> int:
    """Most chunks that `sequences` sequences of `tokens` tokens in sum can have, and enough to cover all padding."""
    return -(-tokens // CHUNK) + 2 * sequences


@dataclass(frozen=True, slots=True)
class PrefillWorkspace:
    """Buffers of `gdn_prefill`, shared by all layers. M is `max_chunks` of the largest pass, R its sequences."""

    heads: Heads
    max_tokens: int
    chunk_sequence: torch.Tensor
    """[M] int32: sequence of each chunk, -1 past the last."""
    chunk_token: torch.Tensor
    """[M] int32: first row of each chunk; past the last chunk, of a block of padding rows."""
    chunk_length: torch.Tensor
    """[M] int32: rows of each chunk (or block of padding rows)."""
    chunk_checkpoint: torch.Tensor
    """[M] int32: first checkpoint of each chunk, -1 for none."""
    first_chunk: torch.Tensor
    """[R + 1] int32: first chunk of each sequence."""
    active: torch.Tensor
    """[2] int32: chunks and blocks of padding rows that have any rows, which come first; sequences that have any."""
    mixed: torch.Tensor
    """[M, 2 * Hk + Hv, CHUNK, D] bf16: queries and keys, normalised and scaled, values; zeros past a chunk's rows."""
    decay: torch.Tensor
    """[M, Hv, CHUNK] fp32: running sum of g from the chunk's begin."""
    w: torch.Tensor
    """[M, Hv, CHUNK, D] bf16: the UT transform's w."""
    u: torch.Tensor
    """[M, Hv, CHUNK, D] bf16: the UT transform's u, overwritten by what each token writes, v_new."""
    before: torch.Tensor
    """[M, Hv, D, D] bf16: state before each chunk."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        names = (
            "chunk_sequence", "chunk_token", "chunk_length", "chunk_checkpoint", "first_chunk",
            "active", "mixed", "decay", "w", "u", "before",
        )  # fmt: skip
        return sum(getattr(self, name).nbytes for name in names)

    def chunks(self, tokens: int, sequences: int) -> int:
        """Chunks that a launch must cover."""
        return max_chunks(tokens, sequences)

    def check(self, tokens: int, sequences: int, heads: Heads) -> None:
        """Raises ValueError if a pass does not fit."""
        if heads != self.heads:
            raise ValueError(f"the workspace was made for {self.heads}, not for {heads}")
        if tokens > self.max_tokens or sequences >= self.first_chunk.shape[0]:
            raise ValueError(
                f"a pass of {tokens} tokens in {sequences} sequences does not fit a workspace for {self.max_tokens} "
                f"tokens in {self.first_chunk.shape[0] - 1} sequences"
            )


def make_prefill_workspace(
    max_tokens: int, max_sequences: int, heads: Heads, device: torch.device | str
) -> PrefillWorkspace:
    """Buffers for passes of up to `max_tokens` rows (padding included) in `max_sequences` sequences."""
    chunks = max_chunks(max_tokens, max_sequences)

    def ints(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    def bf16(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device=device)

    return PrefillWorkspace(
        heads=heads,
        max_tokens=max_tokens,
        chunk_sequence=ints(chunks),
        chunk_token=ints(chunks),
        chunk_length=ints(chunks),
        chunk_checkpoint=ints(chunks),
        first_chunk=ints(max_sequences + 1),
        active=ints(2),
        mixed=bf16(chunks, 2 * heads.key + heads.value, CHUNK, HEAD_DIM),
        decay=torch.empty(chunks, heads.value, CHUNK, dtype=torch.float32, device=device),
        w=bf16(chunks, heads.value, CHUNK, HEAD_DIM),
        u=bf16(chunks, heads.value, CHUNK, HEAD_DIM),
        before=bf16(chunks, heads.value, HEAD_DIM, HEAD_DIM),
    )


def heads_of(proj: torch.Tensor, window: torch.Tensor, state: torch.Tensor, conv_weight: torch.Tensor) -> Heads:
    """Head counts from the shapes of a layer's tensors (see `gpu`).

    Raises:
        ValueError: if they do not fit together or the kernels do not take them.
    """
    value = state.shape[1]
    channels = window.shape[-1]
    key, rest = divmod(channels - value * HEAD_DIM, 2 * HEAD_DIM)
    heads = Heads(key, value)
    if state.shape[2:] != (HEAD_DIM, HEAD_DIM):
        raise ValueError(f"state is {tuple(state.shape)}: the kernels take key and value dimension {HEAD_DIM} only")
    if rest or key < 1 or value % key:
        raise ValueError(f"{channels} channels with {value} value heads leave no whole number of key heads")
    if conv_weight.shape != (CONV_WIDTH, channels) or window.shape[1] != CONV_WIDTH - 1:
        raise ValueError(
            f"convolution weight {tuple(conv_weight.shape)} and window {tuple(window.shape)} must be "
            f"[{CONV_WIDTH}, {channels}] and [slots, {CONV_WIDTH - 1}, {channels}]"
        )
    if proj.shape[1] != heads.row or proj.stride(1) != 1:
        raise ValueError(f"in_proj's rows must have {heads.row} adjacent elements; got shape {tuple(proj.shape)}")
    if not window[0].is_contiguous() or not state[0].is_contiguous() or window.shape[0] != state.shape[0]:
        raise ValueError("window and state must have one contiguous entry for each slot, and as many slots")
    return heads


def plan_prefill(
    workspace: PrefillWorkspace,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    tokens: int,
    checkpoints: Checkpoints | None = None,
) -> None:
    """Lay a pass out in chunks; one kernel, once for all layers of the pass.

    Args:
        workspace: filled.
        cu_seqlens, starts: [R + 1] and [R] int32, as in `gdn_prefill`.
        tokens: rows of the pass, padding included.
        checkpoints: only `sequence` and `position` are read.

    Raises:
        ValueError: if the pass does not fit the workspace.
    """
    sequences = starts.shape[0]
    workspace.check(tokens, sequences, workspace.heads)
    chunks = max_chunks(tokens, sequences)
    wanted = 0 if checkpoints is None else checkpoints.sequence.shape[0]
    plan_kernel[(triton.cdiv(chunks, PLAN_BLOCK),)](
        cu_seqlens, starts,
        cu_seqlens if checkpoints is None else checkpoints.sequence,
        cu_seqlens if checkpoints is None else checkpoints.position,
        workspace.chunk_sequence, workspace.chunk_token, workspace.chunk_length, workspace.chunk_checkpoint,
        workspace.first_chunk, workspace.active, tokens, sequences, chunks, wanted,
        CHUNK=CHUNK, BLOCK=PLAN_BLOCK, SEQUENCES=triton.next_power_of_2(sequences),
        CHECKPOINTS=triton.next_power_of_2(wanted) if wanted else 0,
    )  # fmt: skip
