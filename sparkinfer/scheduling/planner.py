"""Builds the rows of a plan: decoding requests first, then prompt chunks, oldest first."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from sparkinfer.scheduling.blocks import blocks_for
from sparkinfer.scheduling.checkpoints import next_decode_position, thinned
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.passes import LoadView, PassShape, chunk_length, is_long
from sparkinfer.scheduling.prefix_index import PrefixNode
from sparkinfer.scheduling.resources import Kept, Resources
from sparkinfer.scheduling.roster import Roster
from sparkinfer.scheduling.sequence import NEVER, Phase, Sequence
from sparkinfer.scheduling.types import (
    KV_BLOCK_TOKENS,
    MAX_PASS_CHECKPOINTS,
    Checkpoint,
    DecodeRows,
    Row,
    StepPlan,
)


@dataclass(slots=True)
class InFlight:
    """A plan that is not committed, with the sequences of its rows and the nodes they restore from."""

    plan: StepPlan
    decoding: list[Sequence] = field(default_factory=list)
    """Sequences of the decode rows."""
    verifying: list[Sequence] = field(default_factory=list)
    """Of those with drafts."""
    prefilling: list[Sequence] = field(default_factory=list)
    restores: list[PrefixNode] = field(default_factory=list)


def _key(entry: tuple[Sequence, int, int]) -> tuple[int, int]:
    return entry[0].key


class Planner:
    """Adds rows to a plan, and notes in the requests what the plan will have computed."""

    def __init__(self, config: SchedulerConfig, resources: Resources, roster: Roster) -> None:
        self.config = config
        self.resources = resources
        self.cache = resources.cache
        self.table = resources.table
        self.roster = roster

    def load(self, prefill_streak: int) -> LoadView:
        """What the choice of the next pass depends on."""
        roster = self.roster
        begun = self._first_begun()
        head_left = begun.tokens_left if begun is not None else 0
        head = self._oldest_waiting(begun) if self.resources.slots.num_free else None
        if head is not None:
            left = self._left(head)
            if begun is None or is_long(left, self.config):  # A short one joins whatever pass comes next.
                head_left = left
        waiting = self._waiting() if self.config.backlog_chunk and head_left else 0
        return LoadView(self.table.num_active > 0, len(roster.by_id), head_left, prefill_streak, waiting)

    def _first_begun(self) -> Sequence | None:
        """The oldest prompt that is partly computed."""
        return next((s for s in self.roster.prefilling if s.phase is Phase.PREFILL and not s.preempting), None)

    def _oldest_waiting(self, begun: Sequence | None) -> Sequence | None:
        """The head of the waiting queue, if it is older than the first begun prompt."""
        head = self.roster.queue.head()
        return head if head is not None and (begun is None or head.key < begun.key) else None

    def _waiting(self) -> int:
        """Tokens left of the short prompts that a mixed step with room for all of them would carry.

        What the prefix cache holds of those that wait is counted too: a budget may be larger than what fills it.
        """
        roster, most = self.roster, self.config.mixed_max_prompts
        admissible = min(self.resources.slots.num_free, len(roster.queue))
        begun = (s.tokens_left for s in roster.prefilling if s.phase is Phase.PREFILL and not s.preempting)
        fresh = (roster.queue.at(rank).tokens_left for rank in range(admissible))
        short = (left for left in itertools.chain(begun, fresh) if not is_long(left, self.config))
        return sum(itertools.islice(short, most))

    def _left(self, waiting: Sequence) -> int:
        """Tokens that a waiting sequence would compute; only where it matters is the cache asked."""
        left = waiting.tokens_left
        if is_long(left, self.config):
            left -= self.cache.match(waiting).position
        return left

    def add_decode_rows(self, flight: InFlight) -> None:
        """A row for every decoding request that has a next token to compute and memory for it."""
        table = self.table
        slots = table.active.nonzero()[0]
        starts = table.start[slots]
        rows = (starts >= table.due[slots]).nonzero()[0]
        due = slots[rows]
        checkpoints: dict[int, tuple[Checkpoint, ...]] = {}
        stalled: list[int] = []
        if due.size:
            stalled = self._prepare(rows, due, checkpoints)
            if stalled or len(slots) != table.num_active:
                slots = table.active.nonzero()[0]
                slots = slots[~np.isin(slots, stalled)]
                starts = table.start[slots]
        after, flying, changed = starts + 1, table.flying[slots], table.changed[slots].nonzero()[0]
        table.start[slots] = after
        table.flying[slots] = flying + 1
        table.changed[slots[changed]] = False
        flight.decoding, requests, outputs, blocks = table.rows.lists(without=stalled)
        flight.plan.decode = DecodeRows(
            slots=slots,
            starts=starts,
            output_indices=after - table.prompt_len[slots],
            pending=flying > 0,
            requests=requests,
            outputs=outputs,
            blocks=blocks,
            checkpoints={int(slots.searchsorted(slot)): saved for slot, saved in checkpoints.items()},
            changed=changed.tolist(),
        )
        if due.size:
            self._rest_at_end(due)

    def _prepare(self, rows: np.ndarray, due: np.ndarray, checkpoints: dict[int, tuple[Checkpoint, ...]]) -> list[int]:
        """Blocks and checkpoints for the sequences that need one, oldest first; returns slots that must stand still.

        `due` has the sequences' slots, `rows` their places among the active ones. `checkpoints` is filled by slot.
        """
        table, blocks = self.table, self.resources.blocks
        stalled: list[int] = []
        if blocks.num_free >= len(due):
            # Memory for all: those that need a block and nothing else get it together.
            plain = table.start[due] < np.minimum(table.last[due], table.checkpoint_at[due])
            alike = due[plain]
            table.grow(rows[plain], alike, blocks.allocate(len(alike)))
            due = due[~plain]
        waiting = zip(table.sequences[due].tolist(), due.tolist(), table.start[due].tolist(), strict=True)
        for sequence, slot, start in sorted(waiting, key=_key):
            if sequence.phase is not Phase.DECODE or sequence.preempting:
                continue  # A victim of one before it.
            own = sequence.request.blocks
            if start >= len(own) * KV_BLOCK_TOKENS and not self.roster.grow(sequence):
                stalled.append(slot)
                continue
            if start + 1 == sequence.next_checkpoint and (saved := self._decode_checkpoint(sequence)):
                checkpoints[slot] = saved
            room = len(own) * KV_BLOCK_TOKENS
            table.looked_at(slot, room, sequence.end_computed - 1, sequence.next_checkpoint - 1)
        return stalled

    def _rest_at_end(self, due: np.ndarray) -> None:
        """Sequences whose last row is in the plan get no more."""
        table = self.table
        # Also those that the planner has not looked at: a victim, or one that stands still.
        maybe = due[table.start[due] > table.last[due]]
        for sequence, computed in zip(table.sequences[maybe].tolist(), table.start[maybe].tolist(), strict=True):
            if sequence is not None and computed >= sequence.end_computed:
                table.rest(sequence)

    def _decode_checkpoint(self, sequence: Sequence) -> tuple[Checkpoint, ...]:
        position = sequence.next_checkpoint
        sequence.next_checkpoint = next_decode_position(position, sequence.end_computed, self.config)
        snapshot = self.cache.reserve_snapshot(sequence, position)
        return () if snapshot is None else (Checkpoint(position, snapshot),)

    def add_prefill_rows(self, flight: InFlight, shape: PassShape) -> None:
        """Chunks of prompts up to the shape's budget: those begun first, then from the waiting queue.

        A pass for one prompt is for the oldest, be it begun or not.
        """
        self.roster.refresh()
        if shape.alone and (head := self._oldest_waiting(self._first_begun())) is not None and self._may_admit():
            self.roster.admit(head)
        budget, count = shape.budget, 0
        for sequence in self.roster.prefilling:
            if count == shape.max_prompts:
                break
            if sequence.preempting or sequence.phase is not Phase.PREFILL:
                continue
            if not shape.alone and is_long(sequence.tokens_left, self.config):
                continue
            length = self._add_prefill_row(flight, sequence, budget)
            if length == 0:
                break
            budget -= length
            count += 1
        self._admit_rows(flight, shape, budget, count)

    def _may_admit(self) -> bool:
        """Not in the step of a preemption: a victim would come back with the memory that it has just given up."""
        return self.roster.preempted_in != self.roster.step or not self.roster.others_run

    def _admit_rows(self, flight: InFlight, shape: PassShape, budget: int, count: int) -> None:
        """Fill the pass from the waiting queue. Strictly in order: nobody overtakes one that does not fit.

        Long prompts, which this pass cannot carry, are passed by those that leave them a slot and memory.
        """
        roster = self.roster
        if not self._may_admit():
            return
        rank = kept_blocks = 0
        while count < shape.max_prompts and budget > 0 and rank < len(roster.queue):
            sequence = roster.queue.at(rank)
            if not shape.alone and is_long(self._left(sequence), self.config):
                rank += 1  # It gets its own pass as soon as it is the oldest.
                if rank == shape.max_prompts:
                    break  # A thousand of them cost no thousand looks in every step.
                kept_blocks += blocks_for(sequence.request.num_tokens)
                continue
            if chunk_length(0, sequence.tokens_left, budget, self.config.chunk_align) == 0:
                break
            if not roster.admit(sequence, Kept(rank, kept_blocks)):
                break
            budget -= self._add_prefill_row(flight, sequence, budget)
            count += 1

    def _add_prefill_row(self, flight: InFlight, sequence: Sequence, budget: int) -> int:
        """Add the sequence's next chunk; returns its length, 0 when the budget is too small for one."""
        request = sequence.request
        start, left = request.num_computed, sequence.tokens_left
        length = chunk_length(start, left, budget, self.config.chunk_align)
        if length == 0:
            return 0
        samples = length == left
        row = Row(
            request=request,
            slot=request.slot,
            blocks=request.blocks,
            start=start,
            length=length,
            is_decode=False,
            samples=samples,
            output_index=len(request.output),
            checkpoints=self._prompt_checkpoints(flight, sequence, start + length),
        )
        if sequence.restore_node is not None:
            row.restore = sequence.restore_node.snapshot
            flight.restores.append(sequence.restore_node)
            sequence.restore_node = None
        flight.plan.prefill.append(row)
        flight.prefilling.append(sequence)
        request.num_computed = start + length
        if not samples:
            sequence.chunks_in_flight += 1
        else:
            request.num_in_flight_outputs += 1
            self.roster.start_decoding(sequence)
            sequence.next_checkpoint = NEVER
            if request.use_cache and sequence.publishes:
                sequence.next_checkpoint = next_decode_position(start + length, sequence.end_computed, self.config)
        return length

    def _prompt_checkpoints(self, flight: InFlight, sequence: Sequence, stop: int) -> tuple[Checkpoint, ...]:
        """Snapshots for the positions up to `stop`: the last one, worth most, first, and half the pool at most."""
        due = [position for position in sequence.checkpoints if position <= stop]
        del sequence.checkpoints[: len(due)]
        if not due:
            return ()
        left = MAX_PASS_CHECKPOINTS - sum(len(row.checkpoints) for row in flight.plan.prefill)
        most = min((left + 1) // 2, (self.config.num_snapshots + 1) // 2)
        found = []
        for position in reversed(thinned(due, most)):
            snapshot = self.cache.reserve_snapshot(sequence, position)
            if snapshot is not None:
                found.append(Checkpoint(position, snapshot))
        return tuple(reversed(found))
