"""Turns a `StepPlan` into the tensors of one pass: everything per row happens here, once per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sparkinfer_kernels.attention.reference import PrefillSpan, decode_groups
from sparkinfer_kernels.gated_delta_rule.reference import chunk_layout, num_chunks
from sparkinfer_kernels.sampler.reference import SamplingBatch, noise_keys

from sparkinfer.models.qwen3_5 import Batch, Prefill
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, Checkpoint, DecodeRows, Request, Row, StepPlan


@dataclass(slots=True)
class _Owner:
    """Whose blocks a line of the block table shows."""

    blocks: list[int]
    count: int


class BlockTables:
    """Block numbers by slot as an array, so that a step appends what is new instead of copying every list.

    A block list only grows at its end. Whenever other entries of it change (a new owner, a preemption, blocks taken
    over from an equal cached prefix) the scheduler makes a new list: the line is then written anew.
    """

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        self.array = np.zeros((num_slots, -(-max_model_len // KV_BLOCK_TOKENS)), dtype=np.int64)
        self.tokens = np.zeros(num_slots, dtype=np.int64)
        """Tokens that the blocks of each line hold."""
        self._owners: list[_Owner | None] = [None] * num_slots

    def update(self, row: Row) -> None:
        """Bring the line of the row's slot up to the row's blocks. Raises ValueError for too few or too many."""
        count = len(row.blocks)
        if count * KV_BLOCK_TOKENS < row.start + row.length:
            raise ValueError(f"request {row.request.id}: {count} blocks do not hold {row.start + row.length} tokens")
        if count > self.array.shape[1]:
            raise ValueError(
                f"request {row.request.id}: {count} blocks exceed the {self.array.shape[1]} of max_model_len"
            )
        owner = self._owners[row.slot]
        if owner is None or owner.blocks is not row.blocks:
            owner = self._owners[row.slot] = _Owner(row.blocks, 0)
        known = owner.count
        if known < count:
            self.array[row.slot, known:count] = row.blocks[known:]
        owner.count = count
        self.tokens[row.slot] = count * KV_BLOCK_TOKENS

    def update_decode(self, rows: DecodeRows) -> None:
        """The same for all decode rows of a plan, of which only those are looked at whose blocks have changed."""
        for index in rows.changed:
            self.update(rows.row(index))
        short = np.flatnonzero(self.tokens[rows.slots] <= rows.starts)
        if len(short):
            first = short[0]
            raise ValueError(f"request {rows.requests[first].id}: blocks do not hold {rows.starts[first] + 1} tokens")


@dataclass(slots=True)
class StepTensors:
    """A pass, and what the runner does around it."""

    batch: Batch
    pending: tuple[torch.Tensor, torch.Tensor] | None
    """(tokens of the pass, slots): inputs to take from the last-token table."""
    requests: list[Request]
    """Of the rows that sample, decode rows first."""
    output_indices: list[int]
    """Of the same rows."""
    slots: torch.Tensor
    """Of the same rows."""
    before: list[tuple[int, int]]
    """(slot, snapshot): checkpoints of the state as it is before the pass."""
    after: list[tuple[int, int]]
    """(slot, snapshot): checkpoints of decode rows, taken after the pass."""
    fresh: list[int]
    """Slots that start from zero."""
    restores: list[tuple[int, int]]
    """(slot, snapshot): slots that start from a snapshot."""


class BatchBuilder:
    """Builds the tensors of a step. One per runner; keeps the block tables."""

    def __init__(
        self, num_slots: int, max_model_len: int, dtype: torch.dtype, device: torch.device, *, steady: bool = False
    ) -> None:
        """`steady`: rows are rounded alike in every batch, where that is a choice."""
        self.tables = BlockTables(num_slots, max_model_len)
        self.dtype, self.device, self.steady = dtype, device, steady

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)

    def build(self, plan: StepPlan) -> StepTensors:
        """The pass of a plan. Raises ValueError for a row that contradicts its contract."""
        # Decode rows in slot order make long runs of neighbouring slots, whose states are used in place; prefill
        # rows with most chunks first let the chunk scan work on a shrinking prefix.
        decode, prefill = plan.decode, plan.prefill
        slots, starts, order = decode.slots, decode.starts, None
        if (slots[1:] < slots[:-1]).any():
            order = np.argsort(slots, kind="stable")
            slots, starts = slots[order], starts[order]
        if len(prefill) > 1:
            prefill = sorted(prefill, key=lambda row: -num_chunks(row.start, row.length))
        self.tables.update_decode(decode)
        tokens, positions, pending = self._tokens(decode, order, prefill)
        table = self.tables.array
        around = self._around(plan)
        prefill_slots = np.array([row.slot for row in prefill], dtype=np.int64)
        lengths = np.array([row.length for row in prefill], dtype=np.int64)
        token_slots = np.concatenate((slots, np.repeat(prefill_slots, lengths))) if prefill else slots
        kv_positions = table[token_slots, positions // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + positions % KV_BLOCK_TOKENS
        batch = Batch(
            tokens=self._tensor(tokens),
            positions=self._tensor(positions),
            num_decode=len(slots),
            kv_positions=self._tensor(kv_positions),
            decode_groups=[],
            decode_runs=_runs(slots),
            prefill=self._prefill(prefill, prefill_slots) if prefill else None,
            outputs=None,
        )
        if prefill or order is not None:
            last = dict(zip(prefill_slots.tolist(), (len(slots) - 1 + np.cumsum(lengths)).tolist(), strict=True))
            ends = np.array([last[row.slot] for row in plan.prefill if row.samples], dtype=np.int64)
            places = np.arange(len(slots)) if order is None else np.argsort(order)
            batch.outputs = self._tensor(np.concatenate((places, ends)))
        if len(slots):
            batch.decode_groups = decode_groups(
                table, slots, starts + 1, KV_BLOCK_TOKENS, self.dtype, self.device, not self.steady
            )
        sampling = [row for row in plan.prefill if row.samples]
        sampling_slots = np.concatenate((decode.slots, np.array([row.slot for row in sampling], dtype=np.int64)))
        return StepTensors(
            batch,
            pending,
            decode.requests + [row.request for row in sampling],
            decode.output_indices.tolist() + [row.output_index for row in sampling],
            self._tensor(sampling_slots),
            *around,
        )

    def _around(
        self, plan: StepPlan
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[int], list[tuple[int, int]]]:
        """Check the prompt rows and bring their block tables up to date; what happens around the pass."""
        before: list[tuple[int, int]] = []
        after: list[tuple[int, int]] = []
        restores: list[tuple[int, int]] = []
        fresh = plan.decode.slots[plan.decode.starts == 0].tolist()
        for index, checkpoints in plan.decode.checkpoints.items():
            slot, start = int(plan.decode.slots[index]), int(plan.decode.starts[index])
            for checkpoint in checkpoints:
                check_inside(plan.decode.requests[index], checkpoint, start, start + 1)
                (before if checkpoint.position == start else after).append((slot, checkpoint.snapshot))
        for row in plan.prefill:
            check_row(row)
            self.tables.update(row)
            if row.restore is not None:
                restores.append((row.slot, row.restore))
            elif row.start == 0:
                fresh.append(row.slot)
            before.extend((row.slot, c.snapshot) for c in row.checkpoints if c.position == row.start)
        return before, after, fresh, restores

    def _tokens(
        self, decode: DecodeRows, order: np.ndarray | None, prefill: list[Row]
    ) -> tuple[np.ndarray, np.ndarray, tuple[torch.Tensor, torch.Tensor] | None]:
        """Input tokens and positions, and which inputs are still on the device."""
        known = zip(decode.requests, decode.starts.tolist(), decode.pending.tolist(), strict=True)
        tokens = [0 if later else request.token_at(start) for request, start, later in known]
        slots, starts, later = decode.slots, decode.starts, decode.pending
        if order is not None:
            slots, starts, later = slots[order], starts[order], later[order]
            tokens = [tokens[index] for index in order.tolist()]
        waiting = np.flatnonzero(later)
        pending = (self._tensor(waiting), self._tensor(slots[waiting])) if len(waiting) else None
        positions = [starts]
        for row in prefill:
            stop = row.start + row.length
            share = row.request.tokens(row.start, stop)
            if len(share) != row.length:
                raise ValueError(f"request {row.request.id}: positions {row.start} to {stop} are not all known")
            tokens.extend(share)
            positions.append(np.arange(row.start, stop, dtype=np.int64))
        return np.array(tokens, dtype=np.int64), np.concatenate(positions), pending

    def _prefill(self, rows: list[Row], slots: np.ndarray) -> Prefill:
        """The part of a batch that concerns prompts."""
        first = 0
        cuts: list[list[int]] = []
        spans: list[PrefillSpan] = []
        saves: list[tuple[int, int, int]] = []
        for index, row in enumerate(rows):
            blocks = None
            if row.start:
                needed = -(-(row.start + row.length) // KV_BLOCK_TOKENS)
                blocks = self._tensor(self.tables.array[row.slot, :needed].copy())
            spans.append(PrefillSpan(first, row.length, row.start, blocks))
            wanted = sorted((c.position, c.snapshot) for c in row.checkpoints if c.position > row.start)
            cuts.append([position for position, _ in wanted])
            saves.extend((index, position - row.start, snapshot) for position, snapshot in wanted)
            first += row.length
        lengths = [row.length for row in rows]
        chunks = chunk_layout([row.start for row in rows], lengths, cuts, self.device)
        return Prefill(self._tensor(slots), lengths, spans, chunks, saves)

    def sampling(self, requests: Sequence[Request], output_indices: Sequence[int], vocab: int) -> SamplingBatch:
        """The sampling parameters of rows, in order; fields that no row uses stay None."""
        banned = self._banned(requests, output_indices, vocab)
        params = [request.sampling for request in requests]
        if all(p.temperature == 0 for p in params):
            return SamplingBatch(banned=banned)

        def column(values: list[float], off: float) -> torch.Tensor | None:
            return self._tensor(np.array(values, dtype=np.float32)) if any(v != off for v in values) else None

        top_k = [p.top_k if p.temperature else 0 for p in params]
        by_rank = [k for k, p in zip(top_k, params, strict=True) if k or (p.temperature and p.top_p < 1)]
        keys = noise_keys([p.seed for p in params], output_indices)
        return SamplingBatch(
            temperature=self._tensor(np.array([p.temperature for p in params], dtype=np.float32)),
            keys=self._tensor(keys),
            top_k=self._tensor(np.array(top_k, dtype=np.int64)) if any(top_k) else None,
            max_top_k=max(by_rank) if by_rank and all(by_rank) else 0,
            top_p=column([p.top_p if p.temperature else 1.0 for p in params], 1.0),
            min_p=column([p.min_p if p.temperature else 0.0 for p in params], 0.0),
            banned=banned,
        )

    def _banned(
        self, requests: Sequence[Request], output_indices: Sequence[int], vocab: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Entries of the logits that `min_tokens` forbids: ends of text and stop tokens."""
        where, ids = [], []
        for index, (request, output_index) in enumerate(zip(requests, output_indices, strict=True)):
            if output_index < request.sampling.min_tokens:
                for token in request.eos_token_ids | request.sampling.stop_token_ids:
                    if token < vocab:
                        where.append(index)
                        ids.append(token)
        if not ids:
            return None
        return self._tensor(np.array(where, dtype=np.int64)), self._tensor(np.array(ids, dtype=np.int64))


def check_row(row: Row) -> None:
    """Raise ValueError where a row contradicts its contract."""
    if row.is_decode and row.length != 1:
        raise ValueError(f"request {row.request.id}: a decode row computes 1 token, not {row.length}")
    if row.length < 1:
        raise ValueError(f"request {row.request.id}: a row computes at least one token")
    if row.pending and not row.is_decode:
        raise ValueError(f"request {row.request.id}: only a decode row may wait for its input token")
    for checkpoint in row.checkpoints:
        check_inside(row.request, checkpoint, row.start, row.start + row.length)


def check_inside(request: Request, checkpoint: Checkpoint, start: int, stop: int) -> None:
    """Raise ValueError for a checkpoint outside its row."""
    if not start <= checkpoint.position <= stop:
        raise ValueError(f"request {request.id}: checkpoint at {checkpoint.position} lies outside its row")


def _runs(slots: np.ndarray) -> list[tuple[int, int, int]]:
    """(row, slot, count) of the longest runs of neighbours in ascending slots."""
    if not len(slots):
        return []
    edges = np.flatnonzero(np.diff(slots) != 1) + 1
    starts = [0, *edges.tolist()]
    stops = [*edges.tolist(), len(slots)]
    return [(start, int(slots[start]), stop - start) for start, stop in zip(starts, stops, strict=True)]
