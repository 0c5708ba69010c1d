"""Turns a `StepPlan` into the words that a captured pass reads: one block of int32, copied to the device at once.

Each padded shape has a fixed layout of fields. Padding points at the dummy slot and the dummy KV block, which lie
behind the usable ones; a padding prompt has length 0. Numpy only: nothing here touches a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from sparkinfer_kernels.sampler.reference import noise_keys

from sparkinfer.runner.batch import BlockTables, check_inside, check_row
from sparkinfer.runner.gpu_sizes import PassLimits, PassShape
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, DecodeRows, Request, Row, StepPlan

ALIGN_WORDS = 4
"""Fields begin at multiples of 16 bytes."""
MAX_BANNED = 64
"""(row, token) pairs that `min_tokens` forbids inside a captured choice; more take an operation of their own."""
PENDING = -1
"""Input token that the last-token table holds."""
NO_ROW = -1
"""Padding of the banned pairs and of the checkpoints."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the fields of a shape lie: name to (first word, dimensions)."""

    shape: PassShape
    fields: dict[str, tuple[int, tuple[int, ...]]]
    words: int

    @classmethod
    def of(cls, shape: PassShape, entries: int) -> Layout:
        """The layout of a shape whose prompts may save up to `entries` checkpoints."""
        rows, requests, outputs = shape.rows, shape.decode + shape.sequences, shape.outputs
        updates = requests + -(-shape.tokens // KV_BLOCK_TOKENS)
        # What the choice of tokens reads comes first: its place then depends on the number of outputs alone.
        sizes: dict[str, tuple[int, ...]] = {
            "output_slots": (outputs,),
            "temperature": (outputs,),
            "top_k": (outputs,),
            "top_p": (outputs,),
            "min_p": (outputs,),
            "keys": (outputs, 2),
            "banned_rows": (MAX_BANNED,),
            "banned_tokens": (MAX_BANNED,),
            "outputs": (outputs,),
            "tokens": (rows,),
            "positions": (rows,),
            "kv_positions": (rows,),
            "slots": (requests,),
            "starts": (shape.sequences,),
            "cu_seqlens": (shape.sequences + 1,),
            "update_places": (updates,),
            "update_blocks": (updates,),
            "checkpoint_sequences": (entries if shape.tokens else 0,),
            "checkpoint_positions": (entries if shape.tokens else 0,),
        }
        fields, first = {}, 0
        for name, size in sizes.items():
            fields[name] = first, size
            first += -(-int(np.prod(size)) // ALIGN_WORDS) * ALIGN_WORDS
        return cls(shape, fields, first)

    def views(self, words: np.ndarray) -> dict[str, np.ndarray]:
        """The fields of a block of words as arrays; sampling parameters as float32."""
        views = {}
        for name, (first, size) in self.fields.items():
            view = words[first : first + int(np.prod(size))].reshape(size)
            views[name] = view.view(np.float32) if name in FLOATS else view
        return views


Mode = Literal["greedy", "sample", "filter"]
"""Largest logit; noise by temperature too; filters and banned tokens too."""
FLOATS = frozenset({"temperature", "top_p", "min_p"})


class UpdatedTables(BlockTables):
    """Block tables that remember what changed, so that only that travels to the device."""

    def __init__(self, num_slots: int, max_model_len: int, dummy_block: int) -> None:
        super().__init__(num_slots, max_model_len)
        self.array[:] = dummy_block
        self.changes: list[tuple[int, int, int]] = []
        """(slot, first, stop) of changed entries, oldest first."""

    def update(self, row: Row) -> None:
        """As `BlockTables.update`."""
        owner = self._owners[row.slot]
        known = owner.count if owner is not None and owner.blocks is row.blocks else 0
        super().update(row)
        stop = len(row.blocks)
        if known < stop:
            self.changes.append((row.slot, known, stop))

    def take(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Up to `most` changed entries, taken off the list: (flat places, blocks), both int32."""
        width = self.array.shape[1]
        places, left = [np.empty(0, dtype=np.int64)], most
        while self.changes and left:
            slot, first, stop = self.changes.pop(0)
            if stop - first > left:
                self.changes.insert(0, (slot, first + left, stop))
                stop = first + left
            places.append(np.arange(slot * width + first, slot * width + stop, dtype=np.int64))
            left -= stop - first
        flat = np.concatenate(places)
        return flat.astype(np.int32), self.array.reshape(-1)[flat].astype(np.int32)


@dataclass(slots=True)
class StepMetadata:
    """A pass of padded shape, and what the runner does around it."""

    layout: Layout
    requests: list[Request]
    """Of the rows that sample, decode rows first."""
    row_tokens: list[tuple[int, int]]
    """(first, count): each plan row's tokens within the padded pass."""
    mode: Mode = "greedy"
    """The least that the rows' choice needs."""
    asked: list[int] = field(default_factory=list)
    """Sampling rows that report log-probabilities."""
    before: list[tuple[int, int]] = field(default_factory=list)
    """(slot, snapshot): checkpoints of the state as it is before the pass."""
    after: list[tuple[int, int]] = field(default_factory=list)
    """(slot, snapshot): checkpoints of decode rows, taken after the pass."""
    inside: list[int] = field(default_factory=list)
    """Snapshots that the pass itself writes, in the order of their entries."""
    more_banned: list[tuple[int, int]] = field(default_factory=list)
    """(sampling row, token) pairs that `MAX_BANNED` leaves no room for."""
    restores: list[tuple[int, int]] = field(default_factory=list)
    """(slot, snapshot): slots that start from a snapshot."""


class MetadataBuilder:
    """Fills the words of a pass. One per runner; keeps the block tables."""

    def __init__(self, limits: PassLimits, max_model_len: int, num_kv_blocks: int, vocab: int, entries: int) -> None:
        """`entries`: checkpoints that a pass can save. The dummy slot is `max_num_seqs`, the dummy block the last."""
        self.limits, self.vocab, self.entries = limits, vocab, entries
        self.dummy_slot, self.dummy_block = limits.max_num_seqs, num_kv_blocks
        self.tables = UpdatedTables(limits.max_num_seqs + 1, max_model_len, num_kv_blocks)
        self._layouts: dict[PassShape, Layout] = {}

    def layout(self, shape: PassShape) -> Layout:
        """The layout of a shape."""
        if shape not in self._layouts:
            self._layouts[shape] = Layout.of(shape, self.entries)
        return self._layouts[shape]

    @property
    def max_words(self) -> int:
        """Words of the largest layout."""
        return max(self.layout(shape).words for shape in self.limits.shapes())

    def shape_of(self, plan: StepPlan) -> PassShape:
        """The padded shape of a plan. Raises ValueError when the plan exceeds the runner's limits."""
        decode = plan.num_decode
        return self.limits.shape_for(decode, plan.num_tokens - decode, len(plan.prefill))

    def build(self, plan: StepPlan, words: np.ndarray, shape: PassShape | None = None) -> StepMetadata:
        """Fill `words` [at least the layout's] for a plan, padded to `shape` (default: the smallest that fits).

        Raises:
            ValueError: a row contradicts its contract, or the plan exceeds the limits.
        """
        layout = self.layout(shape or self.shape_of(plan))
        fields = layout.views(words)
        self.tables.update_decode(plan.decode)
        for row in plan.prefill:
            check_row(row)
            self.tables.update(row)
        self._padding(fields)
        places = self._decode(fields, plan.decode) + self._prompts(fields, plan.prefill, layout.shape)
        prompts = [row for row in plan.prefill if row.samples]
        step = StepMetadata(layout, plan.decode.requests + [row.request for row in prompts], row_tokens=places)
        self._checkpoints(fields, plan, step)
        decode = len(plan.decode)
        fields["outputs"][:decode] = np.arange(decode)
        fields["output_slots"][:decode] = plan.decode.slots
        ends = zip(plan.prefill, places[decode:], strict=True)
        for index, (row, (first, count)) in enumerate((each for each in ends if each[0].samples), decode):
            fields["outputs"][index], fields["output_slots"][index] = first + count - 1, row.slot
        indices = np.concatenate((plan.decode.output_indices, [row.output_index for row in prompts]))
        self._sampling(fields, step, indices.astype(np.int64))
        changed, blocks = self.tables.take(len(fields["update_places"]))
        fields["update_places"][: len(changed)] = changed
        fields["update_blocks"][: len(blocks)] = blocks
        return step

    def fill_padding(self, layout: Layout, words: np.ndarray) -> None:
        """A pass of nothing but padding."""
        self._padding(layout.views(words))

    def _padding(self, fields: dict[str, np.ndarray]) -> None:
        """What padding rows read: the dummy slot and block, position 0, token 0, no checkpoint, greedy choice."""
        for name in ("tokens", "positions", "starts", "cu_seqlens", "outputs", "top_k", "keys", "temperature", "min_p"):
            fields[name][:] = 0
        fields["kv_positions"][:] = self.dummy_block * KV_BLOCK_TOKENS
        fields["slots"][:] = fields["output_slots"][:] = self.dummy_slot
        fields["top_p"][:] = 1.0
        fields["banned_tokens"][:] = 0
        for name in ("banned_rows", "checkpoint_sequences", "checkpoint_positions"):
            fields[name][:] = NO_ROW
        # An update that changes nothing: the dummy slot's first block is the dummy block.
        fields["update_places"][:] = self.dummy_slot * self.tables.array.shape[1]
        fields["update_blocks"][:] = self.dummy_block

    def _decode(self, fields: dict[str, np.ndarray], rows: DecodeRows) -> list[tuple[int, int]]:
        """One token for each decode row."""
        n = len(rows)
        if n:
            known = zip(rows.requests, rows.starts.tolist(), rows.pending.tolist(), strict=True)
            fields["tokens"][:n] = [PENDING if later else request.token_at(start) for request, start, later in known]
            fields["positions"][:n] = rows.starts
            fields["slots"][:n] = rows.slots
            fields["kv_positions"][:n] = self._kv_positions(rows.slots, rows.starts)
        return [(index, 1) for index in range(n)]

    def _prompts(self, fields: dict[str, np.ndarray], rows: list[Row], shape: PassShape) -> list[tuple[int, int]]:
        """The prompts' tokens one after another, behind the padded decode rows."""
        places = []
        first = shape.decode
        for index, row in enumerate(rows):
            stop = row.start + row.length
            share = row.request.tokens(row.start, stop)
            if len(share) != row.length:
                raise ValueError(f"request {row.request.id}: positions {row.start} to {stop} are not all known")
            positions = np.arange(row.start, stop, dtype=np.int64)
            here = slice(first, first + row.length)
            fields["tokens"][here] = share
            fields["positions"][here] = positions
            fields["kv_positions"][here] = self._kv_positions(np.int64(row.slot), positions)
            fields["slots"][shape.decode + index] = row.slot
            fields["starts"][index] = row.start
            places.append((first, row.length))
            first += row.length
        ends = np.cumsum([row.length for row in rows], dtype=np.int64)
        seqlens = fields["cu_seqlens"]
        seqlens[0] = 0
        seqlens[1 : len(rows) + 1] = ends
        seqlens[len(rows) + 1 :] = ends[-1] if rows else 0
        return places

    def _kv_positions(self, slots: np.ndarray | np.int64, positions: np.ndarray) -> np.ndarray:
        blocks = self.tables.array[slots, positions // KV_BLOCK_TOKENS]
        return blocks * KV_BLOCK_TOKENS + positions % KV_BLOCK_TOKENS

    def _checkpoints(self, fields: dict[str, np.ndarray], plan: StepPlan, step: StepMetadata) -> None:
        """Sort the plan's checkpoints by when they are taken: before, inside or after the pass."""
        for index, checkpoints in plan.decode.checkpoints.items():
            slot, start = int(plan.decode.slots[index]), int(plan.decode.starts[index])
            for checkpoint in checkpoints:
                check_inside(plan.decode.requests[index], checkpoint, start, start + 1)
                (step.before if checkpoint.position == start else step.after).append((slot, checkpoint.snapshot))
        for sequence, row in enumerate(plan.prefill):
            if row.restore is not None:
                step.restores.append((row.slot, row.restore))
            for checkpoint in sorted(row.checkpoints, key=lambda each: each.position):
                if checkpoint.position == row.start:
                    step.before.append((row.slot, checkpoint.snapshot))
                    continue
                index = len(step.inside)
                if index == self.entries:
                    raise ValueError(f"the pass saves more than {self.entries} checkpoints, this runner's limit")
                fields["checkpoint_sequences"][index] = sequence
                fields["checkpoint_positions"][index] = checkpoint.position
                step.inside.append(checkpoint.snapshot)

    def _sampling(self, fields: dict[str, np.ndarray], step: StepMetadata, output_indices: np.ndarray) -> None:
        """The sampling parameters of the rows that choose a token."""
        params = [request.sampling for request in step.requests]
        step.asked = [index for index, param in enumerate(params) if param.logprobs is not None]
        noisy = [index for index, param in enumerate(params) if param.temperature > 0]
        for index in noisy:
            param = params[index]
            fields["temperature"][index] = param.temperature
            fields["top_k"][index] = param.top_k
            fields["top_p"][index] = param.top_p
            fields["min_p"][index] = param.min_p
        if noisy:
            keys = noise_keys([params[i].seed for i in noisy], output_indices[noisy].tolist())
            fields["keys"][noisy] = keys
        banned = [
            (index, token)
            for index, (request, output_index) in enumerate(zip(step.requests, output_indices, strict=True))
            if output_index < params[index].min_tokens
            for token in sorted(request.eos_token_ids | params[index].stop_token_ids)
            if token < self.vocab
        ]
        for place, (index, token) in enumerate(banned[:MAX_BANNED]):
            fields["banned_rows"][place], fields["banned_tokens"][place] = index, token
        step.more_banned = banned[MAX_BANNED:]
        filtered = any(params[i].top_k or params[i].top_p < 1 or params[i].min_p > 0 for i in noisy)
        step.mode = "filter" if banned or filtered else "sample" if noisy else "greedy"
