"""The simulation: clients, server and engine as events around the real scheduler.

Only time is invented. Requests are admitted, packed, mixed, preempted and cached by `sparkinfer.scheduling` itself;
a step takes what the cost model says, and every sampled token is the same one. With a seed, times scatter as the
measured ones did: which requests share a pass then varies from one simulation to the next, as it does between runs.

What is around the engine (server and load generator) does one thing after the other: on a machine of two CPUs they
share the one that the engine leaves. Sixteen answers that end with one step are sixteen turns of work, and tokens of
the steps meanwhile arrive behind it. The next requests leave when no ended answer is left to deal with, so that they
come in bursts, as they do in recorded runs; of a burst the server takes in all requests side by side.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import dataclass, field

from sparkinfer.errors import SparkinferError
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.scheduler import Scheduler
from sparkinfer.scheduling.types import EngineStats, Request, SamplingParams, StepPlan, StepResult

from ..records import Record
from .cost import Costs
from .steps import PAUSE_S
from .workload import Workload, prompt_of

TOKEN = 7
NS = 1e9


@dataclass(slots=True)
class _Client:
    """One request as its client sees it; times in seconds from the start."""

    number: int
    start_s: float
    token_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation gives: a record for each request, and the scheduler's own counters."""

    workload: Workload
    records: list[Record]
    stats: EngineStats
    mean_decode_rows: float


class Simulation:
    """One workload through one scheduler."""

    def __init__(self, workload: Workload, config: SchedulerConfig, costs: Costs, seed: int | None = None) -> None:
        """Without a seed, every time is the typical one. Raises ConfigError on contradictory settings."""
        self._workload, self._costs = workload, costs
        self._host = costs.host if workload.concurrency or costs.open_host is None else costs.open_host
        self._rng = None if seed is None else random.Random(seed)
        self._scheduler = Scheduler(config)
        self._arrivals: list[tuple[float, int]] = []
        """(arrival in the engine, request number), a heap."""
        self._clients: dict[int, _Client] = {}
        self._free_s = 0.0
        """When what is around the engine has done all it was given so far."""
        self._to_send = 0
        """Next requests of a closed loop that wait until all ended answers have been dealt with."""
        self._send_s = 0.0
        """When that is."""
        self._crowded_s = 0.0
        """When ended answers and new requests have been dealt with."""
        self._next = 0
        self._decode_rows = 0
        self._ended_s = -math.inf
        """When the last pass ended."""

    def run(self) -> Outcome:
        """To the last token. Raises RequestError for a request that can never run."""
        self._begin()
        scheduler, now = self._scheduler, 0.0
        while self._arrivals or self._to_send or scheduler.has_work:
            coming = self._arrivals[0][0] if self._arrivals else math.inf
            self._take_turns(now if scheduler.has_work else max(now, coming))
            if not scheduler.has_work:
                now = max(now, self._arrivals[0][0])
            while self._arrivals and self._arrivals[0][0] <= now:
                self._add(heapq.heappop(self._arrivals)[1])
            plan = scheduler.schedule()
            if plan is None:
                raise SparkinferError(f"requests wait but nothing can be scheduled: {scheduler.stats()}")
            now = self._step(plan, now)
        stats = scheduler.stats()
        records = [self._record(client) for client in self._clients.values()]
        return Outcome(self._workload, records, stats, self._decode_rows / max(1, stats.steps))

    def _begin(self) -> None:
        """Send what does not wait for an answer."""
        load = self._workload
        if load.concurrency:
            self._send([number * self._host.issue for number in range(min(load.concurrency, len(load.shapes)))])
        else:
            self._send([shape.at_s for shape in load.shapes])
            self._free_s = self._crowded_s = 0.0  # Arrivals to come do not keep anybody busy yet.

    def _take_turns(self, until: float) -> None:
        """Send the next requests of a closed loop, if no ended answer is left to deal with before `until`."""
        if self._to_send and self._send_s <= until:
            gaps = [self._around("think"), *(self._around("spacing") for _ in range(self._to_send - 1))]
            self._to_send = 0
            self._send([self._send_s + gap for gap in itertools.accumulate(gaps)])

    def _send(self, starts: list[float]) -> None:
        """The next requests leave their clients; the server takes them in. It works on a closed loop's burst in turn:
        the first is through when half of the time is over."""
        together: list[tuple[float, int]] = []
        for start_s in starts:
            number, self._next = self._next, self._next + 1
            self._clients[number] = _Client(number, start_s)
            of_tokens = self._host.ingest_token * self._workload.shapes[number].prompt_tokens
            ingest, begin_s = self._around("ingest") + of_tokens, max(self._free_s, start_s)
            self._free_s = begin_s + (ingest if self._host.ingest_each is None else min(ingest, self._host.ingest_each))
            together.append((begin_s + ingest, number))
        last_s = max(at_s for at_s, _ in together)
        for at_s, number in together:
            shared_s = (at_s + last_s) / 2 if self._workload.concurrency else at_s
            heapq.heappush(self._arrivals, (shared_s, number))
        self._crowded_s = self._free_s

    def _around(self, name: str) -> float:
        """A cost around the engine."""
        middle: float = getattr(self._host, name)
        values = self._host.scatter.get(name)
        return middle if self._rng is None or not values else max(0.0, middle + self._rng.choice(values))

    def _factor(self, name: str) -> float:
        """How much longer than predicted something takes."""
        values = self._costs.scatter.get(name)
        return 1.0 if self._rng is None or not values else self._rng.choice(values)

    def _add(self, number: int) -> None:
        shape = self._workload.shapes[number]
        sampling = SamplingParams(shape.output_tokens, temperature=shape.temperature, ignore_eos=True)
        self._scheduler.add(Request(str(number), prompt_of(shape, number, self._costs.vocabulary), sampling))

    def _step(self, plan: StepPlan, now: float) -> float:
        """Run a plan; returns when the next one may begin."""
        rested = now - self._ended_s >= PAUSE_S
        alone = self._costs.pass_seconds(plan, rested) * self._factor("prompt" if plan.prefill else "decode")
        crowded, slower = max(0.0, self._crowded_s - now), self._host.crowding
        end = now + (alone * slower if alone * slower <= crowded else alone + crowded * (1 - 1 / slower))
        self._ended_s = end
        sampled = plan.num_sampled
        self._decode_rows += plan.num_decode
        planned = not self._workload.concurrency and self._costs.open_host_weights is not None
        between = self._costs.host_seconds(plan, planned) * self._factor("between, planned" if planned else "between")
        free = end + between
        self._take_turns(end)
        arrives = self._free_s = max(self._free_s, end) + self._around("egress")
        ended = 0
        for update in self._scheduler.commit(plan, StepResult(plan.step_id, [TOKEN] * sampled, [None] * sampled)):
            client = self._clients[int(update.request.id)]
            client.token_s.append(arrives)
            ended += update.finish_reason is not None
        if self._workload.concurrency:
            self._free_s += ended * self._host.turn
            self._to_send = min(self._to_send + ended, len(self._workload.shapes) - self._next)
            if ended:
                self._send_s = self._crowded_s = self._free_s
        return free

    def _record(self, client: _Client) -> Record:
        shape = self._workload.shapes[client.number]
        times = [round(second * NS) for second in client.token_s]
        return Record(
            request_id=str(client.number),
            phase="profiling",
            prompt_sha256="",
            prompt_tokens=shape.prompt_tokens,
            output_tokens=len(times),
            start_ns=round(client.start_s * NS),
            first_token_ns=times[0],
            end_ns=times[-1],
            finish_reason="length",
            token_ns=times,
        )


def simulate(workload: Workload, config: SchedulerConfig, costs: Costs, seed: int | None = None) -> Outcome:
    """Run one workload with one set of scheduler settings. Raises ConfigError and RequestError."""
    return Simulation(workload, config, costs, seed).run()
