"""The scheduler: turns requests into step plans and step results into tokens.

Continuous batching with chunked prefill. Up to `max_in_flight` plans may be scheduled before the first of them is
committed; what a plan in flight uses (blocks, slot, snapshots) is given back only after it commits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import compress
from typing import TypeVar

from sparkinfer.errors import RequestError, SparkinferError
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.passes import PassShape, choose_pass, prefill_shape, speculation_applies
from sparkinfer.scheduling.planner import InFlight, Planner
from sparkinfer.scheduling.queue import order_key
from sparkinfer.scheduling.resources import Resources
from sparkinfer.scheduling.roster import Roster
from sparkinfer.scheduling.sequence import Phase, Sequence, make_sequence
from sparkinfer.scheduling.speculation import Speculation
from sparkinfer.scheduling.types import (
    EngineStats,
    FinishReason,
    Request,
    RequestState,
    StepPlan,
    StepResult,
    TokenUpdates,
)

T = TypeVar("T")


class Scheduler:
    """See the module. All methods run on the engine's thread. Raises ConfigError on contradictory settings."""

    def __init__(self, config: SchedulerConfig) -> None:
        config.validate()
        self.config = config
        self.resources = Resources(config)
        self.cache = self.resources.cache
        self.roster = Roster(config, self.resources)
        self._planner = Planner(config, self.resources, self.roster)
        self._speculation = Speculation(config, self.resources, self.roster)
        self._in_flight: deque[InFlight] = deque()
        self._num_added = 0
        self._prefill_streak = 0
        self._prefill_tokens = 0
        self._decode_tokens = 0
        self._stop_ids: set[int] = set()
        """Every token that ends some request; may hold more until the next idle moment."""

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
        if not self.has_work:
            self._stop_ids.clear()
        self._stop_ids |= sequence.stop_ids
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

    def stats(self) -> EngineStats:
        """Counters since start and the current gauges."""
        resources, cache = self.resources, self.cache
        return EngineStats(
            running=len(self.roster.by_id) - len(self.roster.queue),
            waiting=len(self.roster.queue),
            kv_blocks_used=resources.blocks.num_used,
            kv_blocks_total=resources.blocks.total,
            slots_used=resources.slots.num_used,
            slots_total=resources.slots.total,
            steps=self.roster.step,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            preemptions=self.roster.num_preemptions,
            prefix_queries_tokens=cache.counters.queries_tokens,
            prefix_hits_tokens=cache.counters.hits_tokens,
            prefix_bytes=cache.num_bytes,
            prefix_evictions=cache.counters.evictions,
            snapshots_used=cache.snapshots.num_used,
            snapshots_total=cache.snapshots.total,
            draft_tokens=self._speculation.num_drafts,
            accepted_tokens=self._speculation.num_accepted,
            host_blocks_used=cache.host.num_used,
            host_blocks_total=cache.host.total,
            moves_to_host=cache.counters.moves_to_host,
            moves_to_device=cache.counters.moves_to_device,
        )

    def reset_cache(self) -> tuple[int, int]:
        """Empty the prefix cache; returns dropped (blocks, snapshots). Running requests go on, and enter nothing of
        what they have computed."""
        return self.resources.reset_cache(self.holders())

    # -- scheduling -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when nothing can run before a plan in flight commits (or at all)."""
        if len(self._in_flight) >= self.config.max_in_flight:
            return None
        self.roster.refresh()
        flight = InFlight(StepPlan(self.roster.step))
        load = self._planner.load(self._prefill_streak)
        shape = choose_pass(load, self.config)
        if shape.decode:
            if speculation_applies(load, self.config):
                self._speculation.add_rows(flight)
            self._planner.add_decode_rows(flight)
            if not flight.plan.num_rows and load.head_left:  # The last decoding request has just been preempted.
                shape = prefill_shape(load, self.config)
            if shape.budget:
                self._planner.add_prefill_rows(flight, shape)
        else:
            self._planner.add_prefill_rows(flight, shape)
            if not flight.plan.num_rows:  # The prompt at the head cannot be admitted now.
                shape = PassShape(decode=True)
                self._planner.add_decode_rows(flight)
        self.resources.retire(self.roster.step)
        if not flight.plan.num_rows:
            return None
        flight.plan.moves, self.cache.moves = self.cache.moves, []
        self._prefill_streak = 0 if shape.decode else self._prefill_streak + 1
        self.roster.step += 1
        self._in_flight.append(flight)
        return flight.plan

    # -- results ----------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> TokenUpdates:
        """Take in the result of the oldest plan in flight. Raises SparkinferError when it does not fit that plan."""
        flight = self._take_oldest(plan, result)
        for node in flight.restores:
            self.cache.unpin(node)
        updates = TokenUpdates()
        self._commit_decode(flight, result, updates)
        index = len(plan.decode)
        self._decode_tokens += index
        for row, sequence, tokens in zip(plan.verify, flight.verifying, result.verified, strict=True):
            self._decode_tokens += self._speculation.commit(row, sequence, tokens, updates)
        for row, sequence in zip(plan.prefill, flight.prefilling, strict=True):
            self._prefill_tokens += row.length
            if row.samples:
                request, token = row.request, result.tokens[index]
                request.num_in_flight_outputs -= 1
                self.resources.publish(sequence, row.checkpoints, decode=False)
                if sequence.phase is not Phase.DONE:
                    request.output.append(token)
                    finish = self._finish_with(sequence, token, row.output_index, row.start + row.length)
                    updates.add(request, token, result.logprobs[index], finish)
                index += 1
            else:
                sequence.chunks_in_flight -= 1
                self.resources.publish(sequence, row.checkpoints, decode=False)
            self.roster.settle(sequence)
        self.resources.committed(plan.step_id)
        self.resources.retire(self._in_flight[-1].plan.step_id if self._in_flight else None)
        return updates

    def _commit_decode(self, flight: InFlight, result: StepResult, updates: TokenUpdates) -> None:
        """Decode rows come first in the result. All pass their token on; few are looked at one by one."""
        decode, table, count = flight.plan.decode, self.resources.table, len(flight.decoding)
        if not count:
            return
        tokens, logprobs = result.tokens[:count], result.logprobs[:count]
        table.flying[decode.slots] -= 1
        special = set(decode.checkpoints)
        special.update(table.attention[decode.slots].nonzero()[0].tolist())
        if self._stop_ids and not self._stop_ids.isdisjoint(tokens):
            special.update(i for i, token in enumerate(tokens) if token in flight.decoding[i].stop_ids)
        # Cancelled while this plan was in flight: nobody takes these tokens.
        ended = {index for index in special if flight.decoding[index].phase is Phase.DONE}
        live = [index not in ended for index in range(count)] if ended else None
        deque(map(list.append, _kept(decode.outputs, live), _kept(tokens, live)), maxlen=0)
        reasons: list[FinishReason | None] = [None] * count
        for index in sorted(special):
            sequence = flight.decoding[index]
            if index in decode.checkpoints:
                self.resources.publish(sequence, decode.checkpoints[index], decode=True)
            if index not in ended:
                stop, output_index = int(decode.starts[index]) + 1, int(decode.output_indices[index])
                reasons[index] = self._finish_with(sequence, tokens[index], output_index, stop)
            self.roster.settle(sequence)
        updates.extend(_kept(decode.requests, live), _kept(tokens, live), _kept(logprobs, live), _kept(reasons, live))

    def _finish_with(self, sequence: Sequence, token: int, output_index: int, stop: int) -> FinishReason | None:
        """End a sequence if this token is its last one, and say why; its row computed up to `stop`."""
        finish = sequence.ends_with(token, output_index, stop)
        if finish is not None:
            self.roster.finish(sequence, finish)
        return finish

    def _take_oldest(self, plan: StepPlan, result: StepResult) -> InFlight:
        """The oldest plan in flight, if that is what `result` answers."""
        if not self._in_flight or self._in_flight[0].plan is not plan or result.step_id != plan.step_id:
            raise SparkinferError(f"result of step {result.step_id} committed out of order: plans commit as scheduled")
        sampled = plan.num_sampled
        if len(result.tokens) != sampled or len(result.logprobs) != sampled:
            raise SparkinferError(
                f"step {plan.step_id} samples {sampled} tokens, its result has {len(result.tokens)} tokens and "
                f"{len(result.logprobs)} logprobs: the model runner is at fault"
            )
        counts = [len(tokens) for tokens in result.verified]
        most = [row.length for row in plan.verify]
        if len(counts) != len(most) or not all(1 <= count <= limit for count, limit in zip(counts, most, strict=True)):
            raise SparkinferError(
                f"step {plan.step_id} verifies drafts in rows of {most} tokens, its result has {counts} tokens: the "
                "model runner is at fault"
            )
        return self._in_flight.popleft()


def _kept(column: list[T], live: list[bool] | None) -> list[T]:
    """The entries of live rows; all of them without `live`."""
    return column if live is None else list(compress(column, live))
