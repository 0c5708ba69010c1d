"""The scheduler: turns requests into step plans and step results into tokens.

Continuous batching with chunked prefill. Up to `max_in_flight` plans may be scheduled before the first of them is
committed; what a plan in flight uses (blocks, slot, snapshots) is given back only after it commits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from sparkinfer.errors import RequestError, SparkinferError
from sparkinfer.scheduling.blocks import BlockPool, blocks_for
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.passes import LoadView, PassShape, choose_pass, chunk_length, is_long
from sparkinfer.scheduling.queue import WaitingQueue, order_key
from sparkinfer.scheduling.sequence import Phase, Sequence, make_sequence
from sparkinfer.scheduling.slots import SlotPool
from sparkinfer.scheduling.types import (
    KV_BLOCK_TOKENS,
    FinishReason,
    Request,
    RequestState,
    Row,
    StepPlan,
    StepResult,
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


@dataclass(slots=True)
class InFlight:
    """A plan that is not committed, with the sequences of its rows."""

    plan: StepPlan
    sequences: list[Sequence] = field(default_factory=list)


class Scheduler:
    """See the module. All methods run on the engine's thread. Raises ConfigError on contradictory settings."""

    def __init__(self, config: SchedulerConfig) -> None:
        config.validate()
        self.config = config
        self.blocks = BlockPool(config.num_kv_blocks)
        self.slots = SlotPool(config.max_num_seqs)
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

    def stats(self) -> SchedulerStats:
        """A copy of the counters with the current gauges."""
        counters = self._counters
        return SchedulerStats(
            running=len(self._by_id) - len(self._queue),
            waiting=len(self._queue),
            kv_blocks_used=self.blocks.num_used,
            kv_blocks_total=self.blocks.total,
            slots_used=self.slots.num_used,
            slots_total=self.slots.total,
            steps=self._step,
            prefill_tokens=counters.prefill_tokens,
            decode_tokens=counters.decode_tokens,
            preemptions=counters.preemptions,
        )

    # -- scheduling -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when nothing can run before a plan in flight commits (or at all)."""
        if len(self._in_flight) >= self.config.max_in_flight:
            return None
        if self._lists_stale:
            self._refresh_lists()
        flight = InFlight(StepPlan(step_id=self._step, rows=[]))
        shape = choose_pass(self._load(), self.config)
        if shape.decode:
            self._add_decode_rows(flight)
            if shape.budget:
                self._add_prefill_rows(flight, shape)
        else:
            self._add_prefill_rows(flight, shape)
            if not flight.plan.rows:  # The prompt at the head cannot be admitted now.
                shape = PassShape(decode=True)
                self._add_decode_rows(flight)
        if not flight.plan.rows:
            return None
        self._prefill_streak = 0 if shape.decode else self._prefill_streak + 1
        self._step += 1
        self._in_flight.append(flight)
        return flight.plan

    def _refresh_lists(self) -> None:
        self._prefilling = [s for s in self._prefilling if s.phase is Phase.PREFILL]
        self._decoding = sorted((s for s in self._decoding if s.phase is Phase.DECODE), key=lambda s: s.key)
        self._lists_stale = False

    def _load(self) -> LoadView:
        decoding = sum(1 for s in self._decoding if not s.preempting and s.request.num_computed < s.end_computed)
        head_left = next((s.tokens_left for s in self._prefilling if not s.preempting), 0)
        if head_left == 0:
            head = self._queue.head()
            head_left = head.tokens_left if head is not None and self.slots.num_free else 0
        return LoadView(decoding, len(self._by_id), head_left, self._prefill_streak)

    def _add_decode_rows(self, flight: InFlight) -> None:
        rows, sequences = flight.plan.rows, flight.sequences
        for sequence in self._decoding:
            request = sequence.request
            start = request.num_computed
            if start >= sequence.end_computed or sequence.preempting or sequence.phase is not Phase.DECODE:
                continue
            blocks = request.blocks
            if start >= len(blocks) * KV_BLOCK_TOKENS and not self._grow(sequence):
                continue
            in_flight_outputs = request.num_in_flight_outputs
            rows.append(
                Row(
                    request,
                    request.slot,
                    blocks,
                    start,
                    1,
                    True,
                    True,
                    start + 1 - sequence.prompt_len,
                    in_flight_outputs > 0,
                )
            )
            request.num_computed = start + 1
            request.num_in_flight_outputs = in_flight_outputs + 1
            sequence.in_flight += 1
            sequences.append(sequence)

    def _add_prefill_rows(self, flight: InFlight, shape: PassShape) -> None:
        budget, count = shape.budget, 0
        for sequence in self._prefilling:
            if count == shape.max_prompts:
                break
            if sequence.preempting or (not shape.alone and is_long(sequence.tokens_left, self.config)):
                continue
            length = self._add_prefill_row(flight, sequence, budget)
            if length == 0:
                break
            budget -= length
            count += 1
        rank = 0
        while count < shape.max_prompts and budget > 0 and rank < len(self._queue):
            sequence = self._queue.at(rank)
            if not shape.alone and is_long(sequence.tokens_left, self.config):
                rank += 1
                continue
            if chunk_length(0, sequence.tokens_left, budget, self.config.chunk_align) == 0:
                break
            if not self._admit(sequence):
                break
            budget -= self._add_prefill_row(flight, sequence, budget)
            count += 1
        if count:
            self._lists_stale = True

    def _add_prefill_row(self, flight: InFlight, sequence: Sequence, budget: int) -> int:
        """Add the sequence's next chunk; returns its length, 0 when the budget is too small for one."""
        request = sequence.request
        start, left = request.num_computed, sequence.tokens_left
        length = chunk_length(start, left, budget, self.config.chunk_align)
        if length == 0:
            return 0
        samples = length == left
        flight.plan.rows.append(
            Row(
                request=request,
                slot=request.slot,
                blocks=request.blocks,
                start=start,
                length=length,
                is_decode=False,
                samples=samples,
                output_index=len(request.output),
            )
        )
        flight.sequences.append(sequence)
        sequence.in_flight += 1
        request.num_computed = start + length
        if samples:
            request.num_in_flight_outputs += 1
            sequence.phase = Phase.DECODE
            self._decoding.append(sequence)
        return length

    # -- resources --------------------------------------------------------------------------------------------------

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and the blocks of all its known tokens, or leave it waiting."""
        request = sequence.request
        needed = blocks_for(request.num_tokens)
        others_run = len(self._by_id) > len(self._queue)
        reserve = self.config.watermark_blocks if others_run else 0
        if not self.slots.num_free or self.blocks.num_free < needed + reserve:
            return False
        self._queue.remove(sequence)
        request.blocks = self.blocks.allocate(needed)
        request.slot = self.slots.acquire()
        request.state = RequestState.RUNNING
        sequence.phase = Phase.PREFILL
        self._prefilling.append(sequence)
        return True

    def _grow(self, sequence: Sequence) -> bool:
        """One more block for a decoding sequence, if need be from the latest ones in key order."""
        while not self.blocks.num_free:
            victim = max(
                (s for group in (self._prefilling, self._decoding) for s in group if s.phase in RUNNING),
                key=lambda s: s.key,
            )
            if victim.in_flight:
                # Its blocks come back when its row commits; nobody else needs to go meanwhile.
                victim.preempting = True
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.request.blocks.extend(self.blocks.allocate(1))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the waiting queue, to be recomputed; its place in the order stays."""
        self._release(sequence)
        request = sequence.request
        request.num_computed = 0
        request.num_preemptions += 1
        request.state = RequestState.WAITING
        sequence.phase = Phase.WAITING
        sequence.preempting = False
        self._lists_stale = True
        self._counters.preemptions += 1
        self._queue.push(sequence)

    def _release(self, sequence: Sequence) -> None:
        request = sequence.request
        self.blocks.release(request.blocks)
        request.blocks = []
        if request.slot >= 0:
            self.slots.release(request.slot)
            request.slot = -1

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        request = sequence.request
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        sequence.phase = Phase.DONE
        self._lists_stale = True
        del self._by_id[request.id]
        if sequence.in_flight:
            self._draining.add(sequence)
        else:
            self._release(sequence)

    # -- results ----------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenUpdate]:
        """Take in the result of the oldest plan in flight. Raises SparkinferError when it does not fit that plan."""
        if not self._in_flight or self._in_flight[0].plan is not plan or result.step_id != plan.step_id:
            raise SparkinferError(f"result of step {result.step_id} committed out of order: plans commit as scheduled")
        sampled = sum(row.samples for row in plan.rows)
        if len(result.tokens) != sampled or len(result.logprobs) != sampled:
            raise SparkinferError(
                f"step {plan.step_id} samples {sampled} tokens, its result has {len(result.tokens)} tokens and "
                f"{len(result.logprobs)} logprobs: the model runner is at fault"
            )
        flight = self._in_flight.popleft()
        updates: list[TokenUpdate] = []
        counters = self._counters
        index = 0
        for row, sequence in zip(plan.rows, flight.sequences, strict=True):
            sequence.in_flight -= 1
            if row.is_decode:
                counters.decode_tokens += 1
            else:
                counters.prefill_tokens += row.length
            if row.samples:
                if sequence.phase is not Phase.DONE:
                    request, token = row.request, result.tokens[index]
                    request.output.append(token)
                    request.num_in_flight_outputs -= 1
                    finish = None
                    if token in sequence.stop_ids and row.output_index >= sequence.min_tokens:
                        finish = FinishReason.STOP
                    elif row.start + row.length >= sequence.end_computed:
                        finish = FinishReason.LENGTH
                    updates.append(TokenUpdate(request, token, result.logprobs[index], finish))
                    if finish is not None:
                        self._finish(sequence, finish)
                index += 1
            if not sequence.in_flight:
                self._settle(sequence)
        return updates

    def _settle(self, sequence: Sequence) -> None:
        """After the last row in flight: do what waited for it."""
        if sequence in self._draining:
            self._draining.remove(sequence)
            self._release(sequence)
        elif sequence.preempting and sequence.phase in RUNNING:
            self._preempt(sequence)


RUNNING = (Phase.PREFILL, Phase.DECODE)
