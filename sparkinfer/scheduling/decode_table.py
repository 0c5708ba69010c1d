"""What a decode step needs to know of every generating request, as arrays by state slot.

A request that only goes on generating is then scheduled and committed by a few array operations together with all
others; Python looks at it only where it needs a block, a checkpoint or its end. It is in the table from the plan that
samples its first token until it gives its slot back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sparkinfer.scheduling.sequence import Sequence


class DecodeTable:
    """Columns of `num_slots` entries; those of slots that are not in the table mean nothing, but `active` is False."""

    def __init__(self, num_slots: int) -> None:
        self.start = np.zeros(num_slots, dtype=np.int64)
        """The next position to compute: `Request.num_computed`."""
        self.due = np.zeros(num_slots, dtype=np.int64)
        """The next start position at which a block, a checkpoint or the end is due."""
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
        self.num_active = 0

    def join(self, sequence: Sequence) -> None:
        """The sequence generates from now on."""
        request = sequence.request
        slot = request.slot
        self.start[slot] = request.num_computed
        self.flying[slot] = request.num_in_flight_outputs
        self.due[slot] = 0
        self.prompt_len[slot] = sequence.prompt_len
        self.attention[slot] = False
        self.changed[slot] = True
        self.sequences[slot], self.requests[slot], self.blocks[slot] = sequence, request, request.blocks
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
        self.sequences[slot] = self.requests[slot] = self.blocks[slot] = None

    def blocks_replaced(self, sequence: Sequence) -> None:
        """The sequence's request may have another block list."""
        request = sequence.request
        if request._table is not None and self.blocks[request.slot] is not request.blocks:
            self.blocks[request.slot] = request.blocks
            self.changed[request.slot] = True
