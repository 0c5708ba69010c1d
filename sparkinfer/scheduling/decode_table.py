"""What a decode step needs to know of every generating request, as arrays by state slot.

A request that only goes on generating is then scheduled and committed by a few array operations together with all
others; Python looks at it only where it needs a block, a checkpoint or its end. It is in the table from the plan that
samples its first token until it gives its slot back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparkinfer.scheduling.types import KV_BLOCK_TOKENS

if TYPE_CHECKING:
    from sparkinfer.scheduling.sequence import Sequence


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
        self.requests = np.full(num_slots, None, dtype=object)
        self.blocks = np.full(num_slots, None, dtype=object)
        self.outputs = np.full(num_slots, None, dtype=object)
        self.num_active = 0

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
        self.sequences[slot], self.requests[slot] = sequence, request
        self.blocks[slot], self.outputs[slot] = request.blocks, request.output
        request._table = self
        if request.num_computed < sequence.end_computed:
            self.active[slot] = True
            self.num_active += 1
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
            self.num_active -= 1

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
            self.num_active += 1

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
        self.sequences[slot] = self.requests[slot] = self.blocks[slot] = self.outputs[slot] = None

    def looked_at(self, slots: list[int], room: list[int], last: list[int], checkpoint_at: list[int]) -> None:
        """What the planner found when it looked at the requests of some slots."""
        self.room[slots], self.last[slots], self.checkpoint_at[slots] = room, last, checkpoint_at
        self._set_due(slots)

    def grow(self, slots: np.ndarray, blocks: list[int]) -> None:
        """One more block for each of the requests of some slots."""
        for own, block in zip(self.blocks[slots].tolist(), blocks, strict=True):
            own.append(block)
        self.room[slots] += KV_BLOCK_TOKENS
        self.changed[slots] = True
        self._set_due(slots)

    def _set_due(self, slots: np.ndarray | list[int]) -> None:
        self.due[slots] = np.minimum(np.minimum(self.room[slots], self.last[slots]), self.checkpoint_at[slots])

    def blocks_replaced(self, sequence: Sequence) -> None:
        """The sequence's request may have another block list."""
        request = sequence.request
        if request._table is not None and self.blocks[request.slot] is not request.blocks:
            self.blocks[request.slot] = request.blocks
            self.changed[request.slot] = True
