"""The simulation: clients, server and engine as events around the real scheduler.

Only time is invented. Requests are admitted, packed, mixed, preempted and cached by `sparkinfer.scheduling` itself;
a step takes what the cost model says, and every sampled token is the same one.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from sparkinfer.errors import SparkinferError
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.scheduler import Scheduler
from sparkinfer.scheduling.types import EngineStats, Request, SamplingParams, StepPlan, StepResult

from ..records import Record
from .cost import Costs
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

    def __init__(self, workload: Workload, config: SchedulerConfig, costs: Costs) -> None:
        """Raises ConfigError on contradictory settings."""
        self._workload, self._costs = workload, costs
        self._scheduler = Scheduler(config)
        self._arrivals: list[tuple[float, int]] = []
        """(arrival in the engine, request number), a heap."""
        self._clients: dict[int, _Client] = {}
        self._front_free_s = self._client_free_s = -1e9
        self._next = 0
        self._decode_rows = 0

    def run(self) -> Outcome:
        """To the last token. Raises RequestError for a request that can never run."""
        self._begin()
        scheduler, now = self._scheduler, 0.0
        while self._arrivals or scheduler.has_work:
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
        load, host = self._workload, self._costs.host
        if load.concurrency:
            for number in range(min(load.concurrency, len(load.shapes))):
                self._send(number * host.issue)
        else:
            for shape in load.shapes:
                self._send(shape.at_s)

    def _send(self, start_s: float) -> None:
        """The next request leaves its client; one front end takes them in turn."""
        if self._next == len(self._workload.shapes):
            return
        number, self._next = self._next, self._next + 1
        self._clients[number] = _Client(number, start_s)
        host = self._costs.host
        ingest = host.ingest + host.ingest_token * self._workload.shapes[number].prompt_tokens
        arrival = max(start_s + ingest, self._front_free_s + host.front)
        self._front_free_s = arrival
        heapq.heappush(self._arrivals, (arrival, number))

    def _add(self, number: int) -> None:
        shape = self._workload.shapes[number]
        sampling = SamplingParams(shape.output_tokens, temperature=shape.temperature, ignore_eos=True)
        self._scheduler.add(Request(str(number), prompt_of(shape, number), sampling))

    def _step(self, plan: StepPlan, now: float) -> float:
        """Run a plan; returns when the next one may begin."""
        end = now + self._costs.pass_seconds(plan)
        sampled = plan.num_sampled
        self._decode_rows += plan.num_decode
        free = end + self._costs.host_seconds(plan)
        load, host = self._workload, self._costs.host
        for update in self._scheduler.commit(plan, StepResult(plan.step_id, [TOKEN] * sampled, [None] * sampled)):
            client = self._clients[int(update.request.id)]
            client.token_s.append(end + host.egress)
            if update.finish_reason is not None and load.concurrency:
                self._client_free_s = max(client.token_s[-1] + host.think, self._client_free_s + host.spacing)
                self._send(self._client_free_s)
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


def simulate(workload: Workload, config: SchedulerConfig, costs: Costs) -> Outcome:
    """Run one workload with one set of scheduler settings. Raises ConfigError and RequestError."""
    return Simulation(workload, config, costs).run()
