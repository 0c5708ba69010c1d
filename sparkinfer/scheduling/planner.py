"""Builds the rows of a plan: decoding requests first, then prompt chunks, oldest first."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkinfer.scheduling.checkpoints import next_decode_position
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.passes import LoadView, PassShape, chunk_length, is_long
from sparkinfer.scheduling.prefix_index import PrefixNode
from sparkinfer.scheduling.resources import Resources
from sparkinfer.scheduling.roster import Roster
from sparkinfer.scheduling.sequence import NEVER, Phase, Sequence
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, Checkpoint, Row, StepPlan


@dataclass(slots=True)
class InFlight:
    """A plan that is not committed, with the sequences of its rows and the nodes they restore from."""

    plan: StepPlan
    decoding: int = 0
    """Decode rows; they come first."""
    sequences: list[Sequence] = field(default_factory=list)
    restores: list[PrefixNode] = field(default_factory=list)


class Planner:
    """Adds rows to a plan, and notes in the requests what the plan will have computed."""

    def __init__(self, config: SchedulerConfig, resources: Resources, roster: Roster) -> None:
        self.config = config
        self.resources = resources
        self.cache = resources.cache
        self.roster = roster

    def load(self, prefill_streak: int) -> LoadView:
        """What the choice of the next pass depends on."""
        roster = self.roster
        decoding = any(not s.preempting and s.request.num_computed < s.end_computed for s in roster.decoding)
        head_left = next((s.tokens_left for s in roster.prefilling if not s.preempting), 0)
        if head_left == 0:
            head = roster.queue.head()
            head_left = self._left(head) if head is not None and self.resources.slots.num_free else 0
        return LoadView(decoding, len(roster.by_id), head_left, prefill_streak)

    def _left(self, waiting: Sequence) -> int:
        """Tokens that a waiting sequence would compute; only where it matters is the cache asked."""
        left = waiting.tokens_left
        if is_long(left, self.config):
            left -= self.cache.match(waiting).position
        return left

    def add_decode_rows(self, flight: InFlight) -> None:
        """A row for every decoding request that has a next token to compute and memory for it."""
        rows, sequences = flight.plan.rows, flight.sequences
        for sequence in self.roster.decoding:
            request = sequence.request
            start = request.num_computed
            checkpoints: tuple[Checkpoint, ...] = ()
            if start >= sequence.look_at:
                if not self._can_decode(sequence):
                    continue
                if start + 1 == sequence.next_checkpoint:
                    checkpoints = self._decode_checkpoint(sequence)
                self._set_look_at(sequence, start)
            outputs = request.num_in_flight_outputs
            # fmt: off
            rows.append(Row(
                request, request.slot, request.blocks, start, 1, True, True, start + 1 - sequence.prompt_len,
                outputs > 0, None, checkpoints,
            ))
            # fmt: on
            request.num_computed = start + 1
            request.num_in_flight_outputs = outputs + 1
            sequences.append(sequence)
        flight.decoding = len(rows)

    def _set_look_at(self, sequence: Sequence, start: int) -> None:
        """Where the next row after the one at `start` needs more than the common path."""
        last = sequence.end_computed - 1
        sequence.attention = start >= last
        room = len(sequence.request.blocks) * KV_BLOCK_TOKENS
        sequence.look_at = min(room, last if start < last else last + 1, sequence.next_checkpoint - 1)

    def _can_decode(self, sequence: Sequence) -> bool:
        """Whether the sequence has a next token to compute and a block for it; takes one where it is needed."""
        start = sequence.request.num_computed
        if sequence.phase is not Phase.DECODE or sequence.preempting or start >= sequence.end_computed:
            return False
        return start < len(sequence.request.blocks) * KV_BLOCK_TOKENS or self.roster.grow(sequence)

    def _decode_checkpoint(self, sequence: Sequence) -> tuple[Checkpoint, ...]:
        position = sequence.next_checkpoint
        sequence.next_checkpoint = next_decode_position(position, sequence.end_computed, self.config)
        snapshot = self.cache.reserve_snapshot(sequence, position)
        return () if snapshot is None else (Checkpoint(position, snapshot),)

    def add_prefill_rows(self, flight: InFlight, shape: PassShape) -> None:
        """Chunks of prompts up to the shape's budget: those begun first, then from the waiting queue."""
        self.roster.refresh()
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

    def _admit_rows(self, flight: InFlight, shape: PassShape, budget: int, count: int) -> None:
        """Fill the pass from the waiting queue. Strictly in order: nobody overtakes one that does not fit."""
        roster = self.roster
        if roster.preempted_in == roster.step and roster.others_run:
            return  # A victim would come back with the memory that it has just given up.
        rank = 0
        while count < shape.max_prompts and budget > 0 and rank < len(roster.queue):
            sequence = roster.queue.at(rank)
            if not shape.alone and is_long(self._left(sequence), self.config):
                rank += 1  # It gets its own pass as soon as it is the oldest.
                continue
            if chunk_length(0, sequence.tokens_left, budget, self.config.chunk_align) == 0:
                break
            if not roster.admit(sequence):
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
            checkpoints=self._prompt_checkpoints(sequence, start + length),
        )
        if sequence.restore_node is not None:
            row.restore = sequence.restore_node.snapshot
            flight.restores.append(sequence.restore_node)
            sequence.restore_node = None
        flight.plan.rows.append(row)
        flight.sequences.append(sequence)
        request.num_computed = start + length
        if not samples:
            sequence.chunks_in_flight += 1
        else:
            request.num_in_flight_outputs += 1
            self.roster.start_decoding(sequence)
            sequence.next_checkpoint = NEVER
            if request.use_cache:
                sequence.next_checkpoint = next_decode_position(start + length, sequence.end_computed, self.config)
        return length

    def _prompt_checkpoints(self, sequence: Sequence, stop: int) -> tuple[Checkpoint, ...]:
        found = []
        while sequence.checkpoints and sequence.checkpoints[0] <= stop:
            position = sequence.checkpoints.pop(0)
            snapshot = self.cache.reserve_snapshot(sequence, position)
            if snapshot is not None:
                found.append(Checkpoint(position, snapshot))
        return tuple(found)
