"""What a decode step needs to know of every generating request, as arrays by state slot.

A request that only goes on generating is then scheduled and committed by a few array operations together with all
others; Python looks at it only where it needs a block, a checkpoint or its end. It is in the table from the plan that
samples its first token until it gives its slot back.
"""

from __future__ import annotations

import bisect
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from sparkinfer.scheduling.types import KV_BLOCK_TOKENS

if TYPE_CHECKING:
    from sparkinfer.scheduling.sequence import Sequence
    from sparkinfer.scheduling.types import Request

    RowLists = tuple[list[Sequence], list[Request], list[list[int]], list[list[int]]]


class ActiveRows:
    """The requests that get rows, in ascending order of slots, as the lists that a plan has.

    Few of a thousand come or go between two steps, so the lists are kept instead of gathered for each plan. Plans and
    this object share them; what a plan has never changes, for the first change after a plan makes new lists.
    """

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.sequences: list[Sequence] = []
        self.requests: list[Request] = []
        self.outputs: list[list[int]] = []
        self.blocks: list[list[int]] = []
        self._shared = False

    def __len__(self) -> int:
        return len(self.slots)

    def insert(self, sequence: Sequence) -> None:
        """One more request gets rows."""
        self._unshare()
        request = sequence.request
        row = bisect.bisect_left(self.slots, request.slot)
        self.slots.insert(row, request.slot)
        self.sequences.insert(row, sequence)
        self.requests.insert(row, request)
        self.outputs.insert(row, request.output)
        self.blocks.insert(row, request.blocks)

    def remove(self, slot: int) -> None:
        """A request gets no more rows."""
        self._unshare()
        row = bisect.bisect_left(self.slots, slot)
        for column in (self.slots, self.sequences, self.requests, self.outputs, self.blocks):
            del column[row]

    def replace_blocks(self, slot: int, blocks: list[int]) -> None:
        """A request that gets rows has another block list."""
        self._unshare()
        self.blocks[bisect.bisect_left(self.slots, slot)] = blocks

    def lists(self, without: list[int]) -> RowLists:
        """Sequences, requests, outputs and blocks for a plan, less those of some slots. The caller changes none."""
        if without:
            kept = [slot not in without for slot in self.slots]
            return (
                list(compress(self.sequences, kept)), list(compress(self.requests, kept)),
                list(compress(self.outputs, kept)), list(compress(self.blocks, kept)),
            )  # fmt: skip
        self._shared = True
        return self.sequences, self.requests, self.outputs, self.blocks

    def _unshare(self) -> None:
        if self._shared:
            self.sequences, self.requests = self.sequences.copy(), self.requests.copy()
            self.outputs, self.blocks = self.outputs.copy(), self.blocks.copy()
            self._shared = False


class DecodeTable:
    """Columns of `num_slots` entries; those of slots that are not in the table mean nothing, but `active` is False."""

    def __init__(self, num_slots: int) -> None:
        self.start = np.zeros(num_slots, dtype=np.int64)
        """The next position to compute: `Request.num_computed`."""
        self.due = np.zeros(num_slots, dtype=np.int64)
        """The next start position at which a block, a checkpoint or the end is due."""
        self.room = np.zeros(num_slots, dtype=np.int64)
        """Positions that the request's blocks hold."""
        self.last = np.full(num_slots, -1, dtype=np.int64)
        """The last position to compute; -1 until the planner has looked at the request once."""
        self.checkpoint_at = np.zeros(num_slots, dtype=np.int64)
        """The position whose row saves the next checkpoint."""
        self.prompt_len = np.zeros(num_slots, dtype=np.int64)
        self.flying = np.zeros(num_slots, dtype=np.int64)
        """Rows with a token in plans that are not committed: `Request.num_in_flight_outputs`."""
        self.active = np.zeros(num_slots, dtype=bool)
        """Gets rows: has a next token to compute, and is no victim."""
        self.attention = np.zeros(num_slots, dtype=bool)
        """A commit has more to do than to pass on a token: the request ended, is a victim, or is at its end."""
        self.changed = np.zeros(num_slots, dtype=bool)
        """The block list is not the one of the row before."""
        self.sequences = np.full(num_slots, None, dtype=object)
        self.rows = ActiveRows()
        """Those that are active."""

    @property
    def num_active(self) -> int:
        """Requests that get rows."""
        return len(self.rows)

    def join(self, sequence: Sequence) -> None:
        """The sequence generates from now on."""
        request = sequence.request
        slot = request.slot
        self.start[slot] = request.num_computed
        self.flying[slot] = request.num_in_flight_outputs
        self.due[slot] = 0
        self.last[slot] = -1
        self.prompt_len[slot] = sequence.prompt_len
        self.attention[slot] = False
        self.changed[slot] = True
        self.sequences[slot] = sequence
        request._table = self
        if request.num_computed < sequence.end_computed:
            self.active[slot] = True
            self.rows.insert(sequence)
        else:
            self.attention[slot] = True

    def rest(self, sequence: Sequence) -> None:
        """No more rows for the sequence, and a commit looks at it; nothing happens when it does not generate."""
        request = sequence.request
        if request._table is None:
            return
        slot = request.slot
        self.attention[slot] = True
        if self.active[slot]:
            self.active[slot] = False
            self.rows.remove(slot)

    def hold(self, sequence: Sequence) -> None:
        """A row with drafts is in the plan. It computes one position for certain, and no row follows until it commits;
        the planner then looks at the request anew."""
        slot = sequence.request.slot
        sequence.verifying = True
        self.start[slot] += 1
        self.flying[slot] += 1
        self.due[slot] = 0
        self.last[slot] = -1
        self.rest(sequence)

    def resume(self, sequence: Sequence, computed: int) -> None:
        """The row with drafts has committed: `computed` tokens have KV and state now."""
        slot = sequence.request.slot
        self.start[slot] = computed
        if computed < sequence.end_computed and not sequence.preempting:
            self.attention[slot] = False
            self.active[slot] = True
            self.rows.insert(sequence)

    def leave(self, sequence: Sequence) -> None:
        """The sequence gives its slot back."""
        request = sequence.request
        if request._table is None:
            return
        self.rest(sequence)
        slot = request.slot
        computed, outputs = request.num_computed, request.num_in_flight_outputs
        request._table = None
        request.num_computed, request.num_in_flight_outputs = computed, outputs
        self.sequences[slot] = None

    def looked_at(self, slot: int, room: int, last: int, checkpoint_at: int) -> None:
        """What the planner found when it looked at the request of a slot."""
        self.room[slot], self.last[slot], self.checkpoint_at[slot] = room, last, checkpoint_at
        self.due[slot] = min(room, last, checkpoint_at)

    def grow(self, rows: np.ndarray, slots: np.ndarray, blocks: list[int]) -> None:
        """One more block for each of some active requests, given by row and by slot."""
        own = self.rows.blocks
        for row, block in zip(rows.tolist(), blocks, strict=True):
            own[row].append(block)
        room = self.room[slots] + KV_BLOCK_TOKENS
        self.room[slots] = room
        self.changed[slots] = True
        self.due[slots] = np.minimum(np.minimum(room, self.last[slots]), self.checkpoint_at[slots])

    def blocks_replaced(self, sequence: Sequence) -> None:
        """The sequence's request has another block list."""
        request = sequence.request
        if request._table is not None:
            self.changed[request.slot] = True
            if self.active[request.slot]:
                self.rows.replace_blocks(request.slot, request.blocks)
