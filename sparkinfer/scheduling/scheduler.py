"""The scheduler: turns requests into step plans and step results into tokens.

Continuous batching with chunked prefill. Up to `max_in_flight` plans may be scheduled before the first of them is
committed; what a plan in flight uses (blocks, slot, snapshots) is given back only after it commits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from sparkinfer.errors import RequestError, SparkinferError
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.passes import PassShape, choose_pass, prefill_shape
from sparkinfer.scheduling.planner import InFlight, Planner
from sparkinfer.scheduling.queue import order_key
from sparkinfer.scheduling.resources import Resources
from sparkinfer.scheduling.roster import Roster
from sparkinfer.scheduling.sequence import Phase, Sequence, make_sequence
from sparkinfer.scheduling.types import (
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


class Scheduler:
    """See the module. All methods run on the engine's thread. Raises ConfigError on contradictory settings."""

    def __init__(self, config: SchedulerConfig) -> None:
        config.validate()
        self.config = config
        self.resources = Resources(config)
        self.cache = self.resources.cache
        self.roster = Roster(config, self.resources)
        self._planner = Planner(config, self.resources, self.roster)
        self._in_flight: deque[InFlight] = deque()
        self._num_added = 0
        self._prefill_streak = 0
        self._counters = SchedulerStats()

    # -- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a fresh request. Raises RequestError when it can never run or its id is in use."""
        limit = self.config.max_model_len
        if request.id in self.roster.by_id:
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
        key = order_key(request.priority, self.roster.step, self._num_added, self.config.aging_steps)
        self._num_added += 1
        sequence = make_sequence(request, key, limit)
        self.roster.add(sequence)

    def abort(self, ids: Iterable[str]) -> list[Request]:
        """End requests at once and return those that were not finished; unknown ids are ignored.

        What steps in flight use of them is given back when those commit.
        """
        aborted = []
        for request_id in ids:
            sequence = self.roster.by_id.get(request_id)
            if sequence is None:
                continue
            self.roster.finish(sequence, FinishReason.ABORT)
            aborted.append(sequence.request)
        return aborted

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or a plan is in flight."""
        return bool(self.roster.by_id or self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """Plans scheduled and not committed."""
        return len(self._in_flight)

    def holders(self) -> list[Sequence]:
        """All sequences that are not finished, and finished ones that a plan in flight still uses."""
        return [*self.roster.by_id.values(), *self.roster.draining]

    def flights(self) -> list[InFlight]:
        """The plans in flight, oldest first."""
        return list(self._in_flight)

    def stats(self) -> SchedulerStats:
        """A copy of the counters with the current gauges."""
        counters, resources, cache = self._counters, self.resources, self.cache
        return SchedulerStats(
            running=len(self.roster.by_id) - len(self.roster.queue),
            waiting=len(self.roster.queue),
            kv_blocks_used=resources.blocks.num_used,
            kv_blocks_total=resources.blocks.total,
            slots_used=resources.slots.num_used,
            slots_total=resources.slots.total,
            steps=self.roster.step,
            prefill_tokens=counters.prefill_tokens,
            decode_tokens=counters.decode_tokens,
            preemptions=self.roster.num_preemptions,
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
        self.roster.refresh()
        flight = InFlight(StepPlan(step_id=self.roster.step, rows=[]))
        load = self._planner.load(self._prefill_streak)
        shape = choose_pass(load, self.config)
        if shape.decode:
            self._planner.add_decode_rows(flight)
            if not flight.plan.rows and load.head_left:  # The last decoding request has just been preempted.
                shape = prefill_shape(load, self.config)
            if shape.budget:
                self._planner.add_prefill_rows(flight, shape)
        else:
            self._planner.add_prefill_rows(flight, shape)
            if not flight.plan.rows:  # The prompt at the head cannot be admitted now.
                shape = PassShape(decode=True)
                self._planner.add_decode_rows(flight)
        self.resources.retire(self.roster.step)
        if not flight.plan.rows:
            return None
        flight.plan.moves, self.cache.moves = self.cache.moves, []
        self._prefill_streak = 0 if shape.decode else self._prefill_streak + 1
        self.roster.step += 1
        self._in_flight.append(flight)
        return flight.plan

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
                self.roster.finish(sequence, finish)
        self.roster.settle(sequence)

    def _commit_chunk(self, row: Row, sequence: Sequence) -> None:
        sequence.chunks_in_flight -= 1
        self._publish(row, sequence)
        self.roster.settle(sequence)

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
