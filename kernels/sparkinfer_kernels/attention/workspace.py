"""Work lists and scratch memory of the attention kernels, made on the device from a step's lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from sparkinfer_kernels.attention.configs import (
    DECODE,
    DECODE_FP8,
    DECODE_MANY,
    FIXED_PIECE,
    MANY_ROWS,
    MAX_PIECES,
    MIN_PIECE,
    MIN_SPAN,
    PREFILL,
    TileConfig,
    nearest,
)
from sparkinfer_kernels.attention.plan_kernel import plan_decode_kernel, plan_spans_kernel, plan_tiles_kernel

TILES_AT_ONCE = 64
"""Query tiles that one program of the plan lists."""


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Work lists and partial results of one captured step shape. Made once, reused by every layer and step."""

    max_decode_rows: int
    max_prefill_tokens: int
    max_sequences: int
    heads: int
    kv_heads: int
    head_dim: int
    fixed_piece: int
    """Tokens of a piece of every decode row, 0 where the step's total decides."""
    decode_config: TileConfig
    prefill_config: TileConfig
    decode_items: torch.Tensor
    """[items, 4] int32: row, first token, end token, piece number within the row; row -1 for no work."""
    decode_pieces: torch.Tensor
    """[n, 2] int32: the row's first item and number of pieces."""
    prefill_items: torch.Tensor
    """[items, 4] int32: sequence, tile within it, first and end token of the context; sequence -1 for no work."""
    prefill_spans: torch.Tensor
    """[tiles, 4] int32: sequence, tile, first item and number of items; empty where contexts are never cut."""
    one_wave: int
    """Items of a key head that all run at a time."""
    partial: torch.Tensor
    """[...] fp32: outputs of pieces: decoding [items, Hkv, Hq / Hkv, D], of prompts [items, Hkv, rows, D]."""
    partial_lse: torch.Tensor
    """[...] fp32: log2 of each piece's sum of exponentials, scale included: the same without D."""

    @property
    def spans(self) -> bool:
        """Whether contexts of prompts may be cut."""
        return bool(self.prefill_spans.shape[0])


def make_workspace(
    max_decode_rows: int,
    max_prefill_tokens: int,
    max_sequences: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
    decode_config: TileConfig | None = None,
    prefill_config: TileConfig | None = None,
    fp8_cache: bool = False,
    independent: bool = False,
    share: AttentionWorkspace | None = None,
) -> AttentionWorkspace:
    """Allocate the buffers of one step shape.

    Args:
        max_decode_rows: padded number n of decode rows of the step (0: no decode part).
        max_prefill_tokens: padded number of prompt tokens of the step (0: no prefill part).
        max_sequences: padded number R of prefill sequences.
        heads, kv_heads, head_dim: Hq, Hkv, D; Hq / Hkv at most 16, D a power of two.
        device: the GPU (or the CPU under Triton's interpreter).
        decode_config, prefill_config: tile sizes; the shipped ones of the device's architecture when None.
        fp8_cache: whether the shipped ones are to be those for an FP8 cache.
        independent: cut each row by its own length only (prompts not at all), so that its result is bit for bit the
            same whatever its neighbours are. Otherwise the cut balances the step, and rounding depends on it.
        share: another workspace whose partial results this one overwrites, if they are large enough: steps of both
            must follow one another.

    Raises:
        ValueError: heads that the kernels do not serve.
    """
    if heads % kv_heads or heads // kv_heads > 16 or head_dim & (head_dim - 1):
        raise ValueError(
            f"{heads} query heads on {kv_heads} key heads of {head_dim}: at most 16 per key head, a power of two wide"
        )
    arch, processors = 90, 132
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        arch, processors = properties.major * 10 + properties.minor, properties.multi_processor_count
    if decode_config is None:
        many = DECODE | DECODE_MANY if max_decode_rows > MANY_ROWS else DECODE
        decode_config = nearest(DECODE_FP8 if fp8_cache else many, arch)
    prefill_config = prefill_config or nearest(PREFILL, arch)
    if arch // 10 != 9:
        prefill_config = replace(prefill_config, wgmma=False)
    group, rows = heads // kv_heads, prefill_config.rows
    # One wave of programs where the rows allow it; half a row more each where they alone fill the GPU, so that
    # one long context among many short ones is still cut.
    items = max(processors * decode_config.programs // kv_heads, max_decode_rows * 3 // 2) if max_decode_rows else 0
    if independent:
        items = max_decode_rows * MAX_PIECES
    tiles = -(-max_prefill_tokens * group // rows) + max_sequences if max_prefill_tokens else 0
    one_wave = processors // kv_heads
    # Prompts' contexts are cut where their tiles would leave at least half of the multiprocessors idle.
    spans = 0 if independent or 2 * (tiles - max_sequences) > one_wave else tiles
    prefill_items = max(one_wave, tiles) if spans else tiles
    outputs = max(items * group, prefill_items * rows if spans else 0) * kv_heads

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    if share is not None and share.partial_lse.shape[0] >= outputs and share.head_dim == head_dim:
        partial, partial_lse = share.partial, share.partial_lse
    else:
        partial, partial_lse = (torch.empty(size, device=device) for size in (outputs * head_dim, outputs))
    return AttentionWorkspace(
        max_decode_rows=max_decode_rows,
        max_prefill_tokens=max_prefill_tokens,
        max_sequences=max_sequences,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        fixed_piece=FIXED_PIECE if independent else 0,
        decode_config=decode_config,
        prefill_config=prefill_config,
        decode_items=ints(items, 4) - 1,
        decode_pieces=ints(max_decode_rows, 2),
        prefill_items=ints(prefill_items, 4) - 1,
        prefill_spans=ints(spans, 4) - 1,
        one_wave=one_wave,
        partial=partial,
        partial_lse=partial_lse,
    )


def plan(
    workspace: AttentionWorkspace,
    decode_positions: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> None:
    """Fill the work lists for a step's lengths. Once per step, before the first attention layer (small kernels).

    Args:
        workspace: of this step shape.
        decode_positions: [n] int32, position of each decode row's token: its context is positions + 1 tokens. A padding
            row has position 0 and a block table that names the dummy block. None: no decode part.
        cu_seqlens: [R + 1] int32, token offsets of the prefill sequences, the first prefill token being 0. Padding
            sequences have length 0. None: no prefill part.
        starts: [R] int32, tokens of each prefill sequence that are in the cache already.
    """
    if decode_positions is not None and decode_positions.shape[0]:
        n, items = decode_positions.shape[0], workspace.decode_items.shape[0]
        if n > workspace.max_decode_rows:
            raise ValueError(f"{n} decode rows in a workspace of {workspace.max_decode_rows}")
        plan_decode_kernel[(1,)](
            decode_positions,
            workspace.decode_items,
            workspace.decode_pieces,
            n,
            items,
            ROWS=triton.next_power_of_2(n),
            ITEMS=triton.next_power_of_2(items),
            MIN_PIECE=MIN_PIECE,
            MAX_PIECES=MAX_PIECES,
            PIECE=workspace.fixed_piece,
            num_warps=8,
        )
    if cu_seqlens is not None and starts is not None:
        _plan_prefill(workspace, cu_seqlens, starts)


def _plan_prefill(workspace: AttentionWorkspace, cu_seqlens: torch.Tensor, starts: torch.Tensor) -> None:
    sequences, items = starts.shape[0], workspace.prefill_items.shape[0]
    if sequences > workspace.max_sequences:
        raise ValueError(f"{sequences} prefill sequences in a workspace of {workspace.max_sequences}")
    config = workspace.prefill_config
    lengths = {
        "SEQUENCES": triton.next_power_of_2(sequences),
        "M": config.rows,
        "GROUP": workspace.heads // workspace.kv_heads,
    }
    if workspace.spans:
        tiles = workspace.prefill_spans.shape[0]
        plan_spans_kernel[(1,)](
            cu_seqlens,
            starts,
            workspace.prefill_items,
            workspace.prefill_spans,
            sequences,
            tiles,
            items,
            workspace.one_wave,
            TILES=triton.next_power_of_2(tiles),
            ITEMS=triton.next_power_of_2(items),
            N=config.tokens,
            MIN_SPAN=MIN_SPAN,
            **lengths,
            num_warps=8,
        )
        return
    plan_tiles_kernel[(triton.cdiv(items, TILES_AT_ONCE),)](
        cu_seqlens, starts, workspace.prefill_items, sequences, items, TILES=TILES_AT_ONCE, **lengths, num_warps=4
    )
