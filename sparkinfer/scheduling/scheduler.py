"""The scheduler: turns requests into step plans and step results into tokens.

Continuous batching with chunked prefill. Up to `max_in_flight` plans may be scheduled before the first of them is
committed; what a plan in flight uses (blocks, slot, snapshots) is given back only after it commits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from sparkinfer.errors import RequestError, SparkinferError
from sparkinfer.scheduling.checkpoints import next_decode_position
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.passes import LoadView, PassShape, choose_pass, chunk_length, is_long, prefill_shape
from sparkinfer.scheduling.preemption import latest
from sparkinfer.scheduling.prefix_index import PrefixNode
from sparkinfer.scheduling.queue import WaitingQueue, order_key
from sparkinfer.scheduling.resources import Resources
from sparkinfer.scheduling.sequence import NEVER, Phase, Sequence, make_sequence
from sparkinfer.scheduling.types import (
    KV_BLOCK_TOKENS,
    Checkpoint,
    FinishReason,
    Request,
    RequestState,
    Row,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenUpdate,
)


@dataclass(slots=True)
class SchedulerStats:
    """Gauges and counters since start."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    slots_used: int = 0
    slots_total: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    prefix_bytes: int = 0
    prefix_evictions: int = 0
    snapshots_used: int = 0
    snapshots_total: int = 0


@dataclass(slots=True)
class InFlight:
    """A plan that is not committed, with the sequences of its rows and the nodes they restore from."""

    plan: StepPlan
    decoding: int = 0
    """Decode rows; they come first."""
    sequences: list[Sequence] = field(default_factory=list)
    restores: list[PrefixNode] = field(default_factory=list)


class Scheduler:
    """See the module. All methods run on the engine's thread. Raises ConfigError on contradictory settings."""

    def __init__(self, config: SchedulerConfig) -> None:
        config.validate()
        self.config = config
        self.resources = Resources(config)
        self.cache = self.resources.cache
        self._queue = WaitingQueue()
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._lists_stale = False
        self._in_flight: deque[InFlight] = deque()
        self._by_id: dict[str, Sequence] = {}
        self._draining: set[Sequence] = set()
        self._num_added = 0
        self._step = 0
        self._prefill_streak = 0
        self._preempted_in = -1
        self._counters = SchedulerStats()

    # -- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a fresh request. Raises RequestError when it can never run or its id is in use."""
        limit = self.config.max_model_len
        if request.id in self._by_id:
            raise RequestError(f"request id {request.id!r} is in use: choose another one")
        if not request.prompt:
            raise RequestError("the prompt has no tokens", "prompt")
        if request.sampling.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.sampling.max_tokens}: ask for at least 1", "max_tokens")
        if len(request.prompt) >= limit:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens; with one output token it exceeds the context of {limit}",
                "prompt",
            )
        if request.state is not RequestState.WAITING or request.output or request.num_computed:
            raise RequestError(f"request {request.id!r} has already run: create a new one")
        key = order_key(request.priority, self._step, self._num_added, self.config.aging_steps)
        self._num_added += 1
        sequence = make_sequence(request, key, limit)
        self._by_id[request.id] = sequence
        self._queue.push(sequence)

    def abort(self, ids: Iterable[str]) -> list[Request]:
        """End requests at once and return those that were not finished; unknown ids are ignored.

        What steps in flight use of them is given back when those commit.
        """
        aborted = []
        for request_id in ids:
            sequence = self._by_id.get(request_id)
            if sequence is None:
                continue
            if sequence.phase is Phase.WAITING:
                self._queue.remove(sequence)
            self._finish(sequence, FinishReason.ABORT)
            aborted.append(sequence.request)
        return aborted

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or a plan is in flight."""
        return bool(self._by_id or self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """Plans scheduled and not committed."""
        return len(self._in_flight)

    def holders(self) -> list[Sequence]:
        """All sequences that are not finished, and finished ones that a plan in flight still uses."""
        return [*self._by_id.values(), *self._draining]

    def flights(self) -> list[InFlight]:
        """The plans in flight, oldest first."""
        return list(self._in_flight)

    def stats(self) -> SchedulerStats:
        """A copy of the counters with the current gauges."""
        counters, resources, cache = self._counters, self.resources, self.cache
        return SchedulerStats(
            running=len(self._by_id) - len(self._queue),
            waiting=len(self._queue),
            kv_blocks_used=resources.blocks.num_used,
            kv_blocks_total=resources.blocks.total,
            slots_used=resources.slots.num_used,
            slots_total=resources.slots.total,
            steps=self._step,
            prefill_tokens=counters.prefill_tokens,
            decode_tokens=counters.decode_tokens,
            preemptions=counters.preemptions,
            prefix_queries_tokens=cache.counters.queries_tokens,
            prefix_hits_tokens=cache.counters.hits_tokens,
            prefix_bytes=cache.num_bytes,
            prefix_evictions=cache.counters.evictions,
            snapshots_used=cache.snapshots.num_used,
            snapshots_total=cache.snapshots.total,
        )

    def reset_cache(self) -> tuple[int, int]:
        """Drop prefix-cache contents that no running request holds; returns dropped (blocks, snapshots)."""
        return self.cache.reset()

    # -- scheduling -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when nothing can run before a plan in flight commits (or at all)."""
        if len(self._in_flight) >= self.config.max_in_flight:
            return None
        if self._lists_stale:
            self._refresh_lists()
        flight = InFlight(StepPlan(step_id=self._step, rows=[]))
        load = self._load()
        shape = choose_pass(load, self.config)
        if shape.decode:
            self._add_decode_rows(flight)
            if not flight.plan.rows and load.head_left:  # The last decoding request has just been preempted.
                shape = prefill_shape(load, self.config)
            if shape.budget:
                self._add_prefill_rows(flight, shape)
        else:
            self._add_prefill_rows(flight, shape)
            if not flight.plan.rows:  # The prompt at the head cannot be admitted now.
                shape = PassShape(decode=True)
                self._add_decode_rows(flight)
        self.resources.retire(self._step)
        if not flight.plan.rows:
            return None
        flight.plan.moves, self.cache.moves = self.cache.moves, []
        self._prefill_streak = 0 if shape.decode else self._prefill_streak + 1
        self._step += 1
        self._in_flight.append(flight)
        return flight.plan

    def _refresh_lists(self) -> None:
        self._prefilling = sorted((s for s in self._prefilling if s.phase is Phase.PREFILL), key=lambda s: s.key)
        self._decoding = sorted((s for s in self._decoding if s.phase is Phase.DECODE), key=lambda s: s.key)
        self._lists_stale = False

    def _load(self) -> LoadView:
        decoding = any(not s.preempting and s.request.num_computed < s.end_computed for s in self._decoding)
        head_left = next((s.tokens_left for s in self._prefilling if not s.preempting), 0)
        if head_left == 0:
            head = self._queue.head()
            head_left = self._left(head) if head is not None and self.resources.slots.num_free else 0
        return LoadView(decoding, len(self._by_id), head_left, self._prefill_streak)

    def _left(self, waiting: Sequence) -> int:
        """Tokens that a waiting sequence would compute; only where it matters is the cache asked."""
        left = waiting.tokens_left
        if is_long(left, self.config):
            left -= self.cache.match(waiting).position
        return left

    def _add_decode_rows(self, flight: InFlight) -> None:
        rows, sequences = flight.plan.rows, flight.sequences
        for sequence in self._decoding:
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
        return start < len(sequence.request.blocks) * KV_BLOCK_TOKENS or self._grow(sequence)

    def _decode_checkpoint(self, sequence: Sequence) -> tuple[Checkpoint, ...]:
        position = sequence.next_checkpoint
        sequence.next_checkpoint = next_decode_position(position, sequence.end_computed, self.config)
        snapshot = self.cache.reserve_snapshot(sequence, position)
        return () if snapshot is None else (Checkpoint(position, snapshot),)

    def _add_prefill_rows(self, flight: InFlight, shape: PassShape) -> None:
        budget, count = shape.budget, 0
        for sequence in self._prefilling:
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
        if len(flight.sequences) > 0:
            self._lists_stale = True

    def _admit_rows(self, flight: InFlight, shape: PassShape, budget: int, count: int) -> None:
        """Fill the pass from the waiting queue. Strictly in order: nobody overtakes one that does not fit."""
        if self._preempted_in == self._step and len(self._by_id) > len(self._queue):
            return  # A victim would come back with the memory that it has just given up.
        rank = 0
        while count < shape.max_prompts and budget > 0 and rank < len(self._queue):
            sequence = self._queue.at(rank)
            if not shape.alone and is_long(self._left(sequence), self.config):
                rank += 1  # It gets its own pass as soon as it is the oldest.
                continue
            if chunk_length(0, sequence.tokens_left, budget, self.config.chunk_align) == 0:
                break
            if not self.resources.admit(sequence, others_run=len(self._by_id) > len(self._queue)):
                break
            self._queue.remove(sequence)
            sequence.request.state = RequestState.RUNNING
            sequence.phase = Phase.PREFILL
            self._prefilling.append(sequence)
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
            sequence.phase = Phase.DECODE
            sequence.look_at = 0
            sequence.next_checkpoint = NEVER
            if request.use_cache:
                sequence.next_checkpoint = next_decode_position(start + length, sequence.end_computed, self.config)
            self._decoding.append(sequence)
        return length

    def _prompt_checkpoints(self, sequence: Sequence, stop: int) -> tuple[Checkpoint, ...]:
        found = []
        while sequence.checkpoints and sequence.checkpoints[0] <= stop:
            position = sequence.checkpoints.pop(0)
            snapshot = self.cache.reserve_snapshot(sequence, position)
            if snapshot is not None:
                found.append(Checkpoint(position, snapshot))
        return tuple(found)

    # -- memory pressure --------------------------------------------------------------------------------------------

    def _grow(self, sequence: Sequence) -> bool:
        """One more block for a decoding sequence, if need be from the latest running one in the order of keys.

        The earliest is never a victim while another runs, so it ends, and then the next one is the earliest: no
        request waits for ever.
        """
        while not self.resources.available:
            victim = latest(self._prefilling, self._decoding)
            if victim.in_flight:
                # Its memory comes back when its row commits; nobody else needs to go meanwhile.
                victim.preempting = victim.attention = True
                victim.look_at = 0
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.request.blocks.extend(self.resources.allocate(1))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the waiting queue, to be recomputed from what the cache still has; its key stays."""
        self.resources.release(sequence)
        request = sequence.request
        request.num_computed = 0
        request.num_preemptions += 1
        request.state = RequestState.WAITING
        sequence.phase = Phase.WAITING
        sequence.preempting = sequence.attention = False
        sequence.look_at = 0
        sequence.match_version = -1
        self._lists_stale = True
        self._preempted_in = self._step
        self._counters.preemptions += 1
        self._queue.push(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        request = sequence.request
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        sequence.phase = Phase.DONE
        sequence.attention = True
        sequence.look_at = 0
        self._lists_stale = True
        del self._by_id[request.id]
        if sequence.in_flight:
            self._draining.add(sequence)
        else:
            self.resources.release(sequence)

    # -- results ----------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenUpdate]:
        """Take in the result of the oldest plan in flight. Raises SparkinferError when it does not fit that plan."""
        flight, decoding = self._take_oldest(plan, result)
        for node in flight.restores:
            self.cache.unpin(node)
        updates: list[TokenUpdate] = []
        rows, sequences, tokens, logprobs = plan.rows, flight.sequences, result.tokens, result.logprobs
        # Decode rows come first and all have a token: the common path of a step is this loop.
        for row, sequence, token, logprob in zip(rows[:decoding], sequences, tokens, logprobs, strict=False):
            if sequence.attention or row.checkpoints or token in sequence.stop_ids:
                self._commit_row(row, sequence, token, logprob, updates)
                continue
            request = row.request
            request.output.append(token)
            request.num_in_flight_outputs -= 1
            updates.append(TokenUpdate(request, token, logprob, None))
        self._counters.decode_tokens += decoding
        index = decoding
        for row, sequence in zip(rows[decoding:], sequences[decoding:], strict=True):
            self._counters.prefill_tokens += row.length
            if row.samples:
                self._commit_row(row, sequence, tokens[index], logprobs[index], updates)
                index += 1
            else:
                self._commit_chunk(row, sequence)
        self.resources.committed(plan.step_id)
        self.resources.retire(self._in_flight[-1].plan.step_id if self._in_flight else None)
        return updates

    def _commit_row(
        self, row: Row, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, updates: list[TokenUpdate]
    ) -> None:
        """A row with a token, of a sequence that may have ended since, or may end with it."""
        request = row.request
        request.num_in_flight_outputs -= 1
        self._publish(row, sequence)
        if sequence.phase is not Phase.DONE:
            request.output.append(token)
            finish = None
            if token in sequence.stop_ids and row.output_index >= sequence.min_tokens:
                finish = FinishReason.STOP
            elif row.start + row.length >= sequence.end_computed:
                finish = FinishReason.LENGTH
            updates.append(TokenUpdate(request, token, logprobs, finish))
            if finish is not None:
                self._finish(sequence, finish)
        self._settle(sequence)

    def _commit_chunk(self, row: Row, sequence: Sequence) -> None:
        sequence.chunks_in_flight -= 1
        self._publish(row, sequence)
        self._settle(sequence)

    def _take_oldest(self, plan: StepPlan, result: StepResult) -> tuple[InFlight, int]:
        """The oldest plan in flight, if that is what `result` answers, and its number of decode rows."""
        if not self._in_flight or self._in_flight[0].plan is not plan or result.step_id != plan.step_id:
            raise SparkinferError(f"result of step {result.step_id} committed out of order: plans commit as scheduled")
        decoding = self._in_flight[0].decoding
        sampled = decoding + sum(row.samples for row in plan.rows[decoding:])
        if len(result.tokens) != sampled or len(result.logprobs) != sampled:
            raise SparkinferError(
                f"step {plan.step_id} samples {sampled} tokens, its result has {len(result.tokens)} tokens and "
                f"{len(result.logprobs)} logprobs: the model runner is at fault"
            )
        return self._in_flight.popleft(), decoding

    def _publish(self, row: Row, sequence: Sequence) -> None:
        """The step that wrote the row's snapshots has committed: enter them, unless the request has ended before."""
        for checkpoint in row.checkpoints:
            if sequence.phase is Phase.DONE:
                self.cache.drop_snapshot(checkpoint.snapshot)
                continue
            node = self.cache.publish(sequence, checkpoint.position, checkpoint.snapshot)
            if row.is_decode:
                self.cache.replace_decode_checkpoint(sequence, node)

    def _settle(self, sequence: Sequence) -> None:
        """After the last row in flight: do what waited for it."""
        if sequence.in_flight:
            return
        if sequence.phase is Phase.DONE:
            if sequence in self._draining:
                self._draining.remove(sequence)
                self.resources.release(sequence)
        elif sequence.preempting:
            self._preempt(sequence)
