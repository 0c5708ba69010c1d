"""No request waits for ever: over random traces, each ends within a bound computed from the work before it.

The bound of a request: the steps that all requests that may run before it need when run one after the other (its own
included), times the passes that may lie between two steps of one request. May run before it: those of a lower key,
and those that had arrived already. Aging makes that set finite under any stream of arrivals.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque

import pytest

from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.queue import order_key
from sparkinfer.scheduling.scheduler import Scheduler
from sparkinfer.scheduling.types import Request, SamplingParams, StepPlan, StepResult
from tests.scheduling.driver import random_config


def steps_alone(request: Request, config: SchedulerConfig) -> int:
    """Steps of a request that has the engine for itself, cut as small as any budget may cut it."""
    chunk = min(config.prefill_chunk, config.mixed_chunk or config.prefill_chunk)
    prefill = -(-len(request.prompt) // max(config.chunk_align, chunk // config.chunk_align * config.chunk_align))
    return prefill + request.sampling.max_tokens + 1


class Trace:
    """Arrivals at given steps; records when each request arrives and ends, in steps."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.plans: deque[StepPlan] = deque()
        self.cancelled: set[str] = set()
        self.requests: list[Request] = []
        self.arrived: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self.clock = 0

    def add(self, prompt_len: int, max_tokens: int, priority: int, family: int | None = None) -> None:
        """Prompts of one family begin with the same tokens; without one, nothing is shared."""
        number = len(self.requests)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        prompt = [number] * prompt_len if family is None else [1000 + family] * (prompt_len - 1) + [number]
        request = Request(f"r{number}", prompt, params, priority=priority)
        self.scheduler.add(request)
        self.requests.append(request)
        self.arrived[request.id] = self.clock

    def cancel(self, number: int) -> None:
        """End a request from outside, if it has not ended."""
        request = self.requests[number]
        if self.scheduler.abort([request.id]):
            self.cancelled.add(request.id)
            self.ended[request.id] = self.clock

    def step(self) -> None:
        """Schedule as far as the steps in flight allow, and commit the oldest."""
        while (plan := self.scheduler.schedule()) is not None:
            self.plans.append(plan)
        self.clock += 1
        if not self.plans:
            assert not self.scheduler.has_work, "work waits and nothing can be scheduled"
            return
        plan = self.plans.popleft()
        count = plan.num_sampled
        # No draft is ever right: speculation then gains nothing.
        result = StepResult(plan.step_id, [5] * count, [None] * count, [[5]] * len(plan.verify))
        for update in self.scheduler.commit(plan, result):
            if update.finish_reason is not None:
                self.ended[update.request.id] = self.clock

    def worst_share_of_bound(self) -> float:
        """Largest wait in units of its bound."""
        aging = self.config.aging_steps
        keys = [order_key(r.priority, self.arrived[r.id], i, aging) for i, r in enumerate(self.requests)]
        # Between two steps of the earliest request lie at most the prefill passes of others.
        gap = 1 + self.config.prefill_passes_per_decode
        # A step in flight may have been planned before a request came, ended or gave way.
        gap *= self.config.max_in_flight
        worst = 0.0
        for number, request in enumerate(self.requests):
            before = [
                other
                for i, other in enumerate(self.requests)
                if keys[i] <= keys[number] or self.arrived[other.id] <= self.arrived[request.id]
            ]
            bound = gap * sum(steps_alone(other, self.config) for other in before) + gap
            if request.id in self.cancelled:
                continue
            worst = max(worst, (self.ended[request.id] - self.arrived[request.id]) / bound)
        return worst


def random_trace(seed: int) -> Trace:
    """A burst, a stream or both, in a scarce engine."""
    rng = random.Random(seed)
    config = random_config(rng)
    values = {name: getattr(config, name) for name in config.__slots__}
    trace = Trace(SchedulerConfig(**(values | {"aging_steps": rng.choice([1, 5, 40])})))
    rate, count, cancels = rng.choice([0.05, 0.3, 1.0]), rng.randrange(2, 14), rng.choice([0.0, 0.0, 0.02])
    families = rng.choice([0, 1, 3])
    while len(trace.requests) < count or trace.scheduler.has_work:
        while len(trace.requests) < count and rng.random() < rate:
            family = rng.randrange(families) if families else None
            trace.add(rng.choice([1, 16, 30, 100, 220]), rng.choice([1, 3, 10, 30]), rng.choice([0, 0, -2, 3]), family)
        trace.step()
        if trace.requests and rng.random() < cancels:
            trace.cancel(rng.randrange(len(trace.requests)))
        assert trace.clock < 10_000
    return trace


def run_traces(first: int, count: int) -> tuple[float, Counter[str]]:
    """The largest wait in units of its bound, and what the traces exercised."""
    worst, seen = 0.0, Counter[str]()
    for seed in range(first, first + count):
        trace = random_trace(seed)
        assert len(trace.ended) == len(trace.requests)
        share = trace.worst_share_of_bound()
        assert share <= 1, f"trace {seed}: a wait of {share:.2f} times its bound"
        worst = max(worst, share)
        stats, config = trace.scheduler.stats(), trace.config
        seen["preemptions"] += stats.preemptions
        seen["cancelled"] += len(trace.cancelled)
        seen["hit tokens"] += stats.prefix_hits_tokens
        seen["traces with two steps in flight"] += config.max_in_flight == 2
        seen["traces with mixed steps"] += config.mixed_chunk > 0
    return worst, seen


def test_ten_thousand_random_traces_wait_within_their_bound() -> None:
    worst, seen = run_traces(0, 10_000)
    print(f"worst wait {worst:.2f} of its bound; {dict(seen)}")
    assert worst > 0.2, "a bound that nothing comes near shows nothing"
    assert all(seen[name] > 100 for name in ("preemptions", "cancelled", "hit tokens"))
    assert all(seen[name] > 1000 for name in ("traces with two steps in flight", "traces with mixed steps"))


@pytest.mark.parametrize("aging", [5, 50])
def test_low_priority_ends_under_endless_urgent_arrivals(aging: int) -> None:
    """Urgent requests arrive faster than they can be served; aging lets an old one of low priority pass."""
    config = SchedulerConfig(
        max_num_seqs=2, num_kv_blocks=40, max_model_len=256, prefill_chunk=64, mixed_chunk=64, aging_steps=aging
    )
    trace = Trace(config)
    trace.add(20, 5, priority=3)
    trace.add(20, 5, priority=0)
    while "r0" not in trace.ended:
        trace.add(20, 5, priority=0)
        trace.step()
        assert trace.clock < 40 * aging, "starved"


def test_a_long_prompt_is_not_passed_for_ever() -> None:
    """Short prompts keep coming, and one of them is always partly computed when the long one could begin."""
    trace = Trace(SchedulerConfig(max_num_seqs=32, num_kv_blocks=32_000, max_model_len=16_384))
    trace.add(64, 16_000, 0)  # Decodes all the while, so that passes are mixed.
    lengths = itertools.chain([1984] * 14, itertools.cycle([1280, 1984, 1984, 1984, 1984]))
    for step in range(200):
        while step and len(trace.scheduler.roster.queue) < 4:
            trace.add(next(lengths), 4, 0)
        if step == 5:
            trace.add(5000, 4, 0)
            long = trace.requests[-1].id
        trace.step()
    assert trace.ended[long] - trace.arrived[long] < 40, "about 22 steps for what was there before it, and its own"


def test_strict_priority_is_what_aging_0_says() -> None:
    """Without aging the same load starves the request: the document says so, and the test above could fail."""
    config = SchedulerConfig(max_num_seqs=1, num_kv_blocks=40, max_model_len=256, aging_steps=0)
    trace = Trace(config)
    trace.add(20, 5, priority=0)
    trace.add(20, 5, priority=3)
    for _ in range(500):
        trace.add(20, 5, priority=0)
        trace.step()
    assert "r1" not in trace.ended
