"""Who waits, who runs, who drains; and the ways from one to the other.

All running requests have one order, that of their keys. Memory pressure takes the latest of them; the earliest is
never a victim while another runs, so it ends, and then the next one is the earliest: no request waits for ever.
"""

from __future__ import annotations

import bisect

from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.preemption import latest
from sparkinfer.scheduling.queue import WaitingQueue
from sparkinfer.scheduling.resources import NOTHING_KEPT, Kept, Resources
from sparkinfer.scheduling.sequence import Phase, Sequence
from sparkinfer.scheduling.types import FinishReason, RequestState


def _key(sequence: Sequence) -> tuple[int, int]:
    return sequence.key


class Roster:
    """All sequences by phase.

    `prefilling` and `decoding` are in key order. Until the next `refresh`, `prefilling` may hold sequences that have
    left that phase since: they leave while somebody walks through the list.
    """

    def __init__(self, config: SchedulerConfig, resources: Resources) -> None:
        self.config = config
        self.resources = resources
        self.queue = WaitingQueue()
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self._decoding_keys: list[tuple[int, int]] = []
        """Of the same, so that a place is found without a look at ten sequences."""
        self.by_id: dict[str, Sequence] = {}
        """Sequences that are not finished."""
        self.draining: set[Sequence] = set()
        """Finished ones that a plan in flight still uses."""
        self.step = 0
        """Id of the next plan."""
        self.preempted_in = -1
        """The step in which somebody was preempted last."""
        self.num_preemptions = 0
        self._stale = False

    @property
    def others_run(self) -> bool:
        """Whether any request runs."""
        return len(self.by_id) > len(self.queue)

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits."""
        self.by_id[sequence.request.id] = sequence
        self.queue.push(sequence)

    def refresh(self) -> None:
        """Bring `prefilling` up to date."""
        if self._stale:
            self.prefilling = [s for s in self.prefilling if s.phase is Phase.PREFILL]
            self._stale = False

    def admit(self, sequence: Sequence, kept: Kept = NOTHING_KEPT) -> bool:
        """Let a waiting sequence run, if the resources allow it."""
        if not self.resources.admit(sequence, self.others_run, kept):
            return False
        self.queue.remove(sequence)
        sequence.request.state = RequestState.RUNNING
        sequence.phase = Phase.PREFILL
        bisect.insort(self.prefilling, sequence, key=_key)
        return True

    def start_decoding(self, sequence: Sequence) -> None:
        """The last chunk of the sequence's prompt has been scheduled."""
        sequence.phase = Phase.DECODE
        self.resources.table.join(sequence)
        place = bisect.bisect_left(self._decoding_keys, sequence.key)
        self._decoding_keys.insert(place, sequence.key)
        self.decoding.insert(place, sequence)
        self._stale = True  # It is still among those that prefill; the caller walks through them.

    def grow(self, sequence: Sequence) -> bool:
        """One more block for a decoding sequence, at the cost of a cached prefix or of the latest running sequence.

        False: not in this step.
        """
        while not self.resources.available:
            victim = latest(self.prefilling, self.decoding[-1:])
            if victim.in_flight:
                # Its memory comes back when its row commits; nobody else needs to go meanwhile.
                victim.preempting = True
                self.resources.table.rest(victim)
                return False
            self.preempt(victim)
            if victim is sequence:
                return False
        sequence.request.blocks.extend(self.resources.allocate(1))
        self.resources.table.changed[sequence.request.slot] = True
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Back to the waiting queue, to be recomputed from what the cache still has; its key stays."""
        self._leave_phase(sequence)
        self.resources.release(sequence)
        request = sequence.request
        request.num_computed = 0
        request.num_preemptions += 1
        request.state = RequestState.WAITING
        sequence.phase = Phase.WAITING
        sequence.preempting = False
        sequence.match_version = -1
        sequence.publishes = True
        self.preempted_in = self.step
        self.num_preemptions += 1
        self.queue.push(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence; its resources come back at once, or when its last row in flight commits."""
        request = sequence.request
        if sequence.phase is Phase.WAITING:
            self.queue.remove(sequence)
        else:
            self._leave_phase(sequence)
            self.resources.table.rest(sequence)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        sequence.phase = Phase.DONE
        del self.by_id[request.id]
        if sequence.in_flight:
            self.draining.add(sequence)
        else:
            self.resources.release(sequence)

    def _leave_phase(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.DECODE:
            place = bisect.bisect_left(self._decoding_keys, sequence.key)
            del self._decoding_keys[place], self.decoding[place]
        else:
            self._stale = True

    def settle(self, sequence: Sequence) -> None:
        """After the last row in flight: do what waited for it."""
        if sequence.in_flight:
            return
        if sequence.phase is Phase.DONE:
            if sequence in self.draining:
                self.draining.remove(sequence)
                self.resources.release(sequence)
        elif sequence.preempting:
            self.preempt(sequence)
