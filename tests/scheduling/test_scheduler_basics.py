"""The scheduler with a runner that only answers tokens."""

from __future__ import annotations

import pytest

from sparkinfer.engine.core import EngineCore
from sparkinfer.errors import ConfigError, RequestError
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.scheduler import Scheduler
from sparkinfer.scheduling.types import FinishReason, Request, SamplingParams, StepPlan, StepResult


class CountingRunner:
    """Answers the output index, or what `script` says for a request."""

    def __init__(self, script: dict[str, list[int]] | None = None) -> None:
        self.script = script or {}
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        tokens = []
        for row in plan.rows:
            if row.samples:
                script = self.script.get(row.request.id)
                tokens.append(script[row.output_index] if script else 1000 + row.output_index)
        return StepResult(plan.step_id, tokens, [None] * len(tokens))


def config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {"max_num_seqs": 4, "num_kv_blocks": 64, "max_model_len": 512, "prefill_chunk": 128}
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


def request(name: str, prompt: int = 20, max_tokens: int = 4, **changes: object) -> Request:
    sampling = {k: changes.pop(k) for k in list(changes) if k in ("min_tokens", "stop_token_ids", "ignore_eos")}
    return Request(name, list(range(prompt)), SamplingParams(max_tokens, **sampling), **changes)  # type: ignore[arg-type]


def drain(core: EngineCore) -> dict[str, tuple[list[int], FinishReason | None]]:
    ends: dict[str, tuple[list[int], FinishReason | None]] = {}
    for _ in range(10_000):
        if not core.has_work:
            break
        for update in core.step():
            if update.finish_reason:
                ends[update.request.id] = (update.request.output, update.finish_reason)
    assert not core.has_work
    stats = core.stats()
    assert stats.slots_used == 0
    return ends


def test_requests_run_to_their_length() -> None:
    core = EngineCore(CountingRunner(), config())
    for i in range(10):
        core.add(request(f"r{i}", prompt=1 + 37 * i, max_tokens=1 + i))
    ends = drain(core)
    assert {k: (len(v), r) for k, (v, r) in ends.items()} == {f"r{i}": (1 + i, FinishReason.LENGTH) for i in range(10)}
    assert core.stats().kv_blocks_used == 0


def test_ends() -> None:
    script = {
        "eos": [5, 6, 2, 7],
        "ignored": [5, 2, 6, 7],
        "stop": [9, 8, 7, 6],
        "min": [2, 2, 2, 2],
    }
    core = EngineCore(CountingRunner(script), config())
    eos = frozenset({2})
    core.add(request("eos", eos_token_ids=eos))
    core.add(request("ignored", eos_token_ids=eos, ignore_eos=True))
    core.add(request("stop", eos_token_ids=eos, stop_token_ids=frozenset({8})))
    core.add(request("min", eos_token_ids=eos, min_tokens=2))
    core.add(request("context", prompt=510, max_tokens=100))
    ends = drain(core)
    assert ends["eos"] == ([5, 6, 2], FinishReason.STOP)
    assert ends["ignored"] == ([5, 2, 6, 7], FinishReason.LENGTH)
    assert ends["stop"] == ([9, 8], FinishReason.STOP)
    assert ends["min"] == ([2, 2, 2], FinishReason.STOP)
    assert ends["context"] == ([1000, 1001], FinishReason.LENGTH)


def test_rows_decode_first_and_chunks_align() -> None:
    runner = CountingRunner()
    core = EngineCore(runner, config(mixed_chunk=64))
    core.add(request("a", prompt=10, max_tokens=20))
    core.step()
    core.add(request("b", prompt=200))
    core.add(request("c", prompt=30))
    drain(core)
    for plan in runner.plans:
        kinds = [row.is_decode for row in plan.rows]
        assert kinds == sorted(kinds, reverse=True)
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            assert row.samples or (row.start + row.length) % 64 == 0
    assert any(plan.num_decode and plan.num_decode < len(plan.rows) for plan in runner.plans)


def test_abort() -> None:
    scheduler = Scheduler(config(max_num_seqs=1))
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    plan = scheduler.schedule()
    assert plan is not None
    assert [r.id for r in scheduler.abort(["a", "b", "unknown"])] == ["a", "b"]
    assert scheduler.resources.slots.num_used == 1, "the step in flight still uses the slot"
    assert not scheduler.commit(plan, StepResult(plan.step_id, [1], [None]))
    assert scheduler.resources.slots.num_used == 0
    assert scheduler.resources.blocks.num_used == 0
    assert not scheduler.has_work


def test_preemption_lets_everybody_finish() -> None:
    core = EngineCore(CountingRunner(), config(num_kv_blocks=32, max_model_len=512))
    for i in range(8):
        core.add(request(f"r{i}", prompt=100, max_tokens=200))
    ends = drain(core)
    assert all(tokens == list(range(1000, 1200)) for tokens, _ in ends.values())
    assert len(ends) == 8
    assert core.stats().preemptions > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_model_len": 4096}, "needs ceil\\(4096/16\\) = 256 KV blocks, but num_kv_blocks is 64"),
        ({"mixed_chunk": 8}, "mixed_chunk is 8 tokens, a KV block holds 16"),
        ({"prefill_chunk": 15}, "prefill_chunk is 15 tokens"),
        ({"mixed_chunk": 0, "backlog_chunk": 128}, "backlog_chunk is 128 but mixed_chunk is 0"),
        ({"mixed_chunk": 128, "backlog_chunk": 128}, "backlog_chunk is 128: it must be more than mixed_chunk, 128"),
        ({"mixed_chunk": 64, "backlog_chunk": 9000}, "backlog_chunk is 9000: .* at most prefill_chunk"),
        ({"prefill_chunk": 32}, "below chunk_align 64"),
        ({"chunk_align": 40}, "multiple of the KV block"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"num_host_blocks": 4}, "num_snapshots is 0"),
        ({"watermark": 0.9}, "watermark"),
        ({"max_in_flight": 3}, "max_in_flight"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**changes).validate()


def test_requests_that_cannot_run_are_refused() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("a"))
    for bad in (request("a"), request("b", prompt=0), request("c", prompt=512), request("d", max_tokens=0)):
        with pytest.raises(RequestError):
            scheduler.add(bad)
