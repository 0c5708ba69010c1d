"""The engine loop over the fake model, in turn and overlapped."""

from __future__ import annotations

import random

import pytest

from sparkinfer.engine.core import EngineCore
from sparkinfer.errors import ConfigError, SparkinferError
from sparkinfer.scheduling.invariants import IntegrityError
from sparkinfer.scheduling.types import Request, SamplingParams, StepPlan, StepResult
from tests.scheduling.driver import family_tokens, small_config
from tests.scheduling.fake_model import FakeRunner, expected_output


class InTurnOnly:
    """A runner without launch and collect."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner

    def execute(self, plan: StepPlan) -> StepResult:
        return self._runner.execute(plan)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_tokens_are_those_of_the_model(in_flight: int) -> None:
    config = small_config(max_in_flight=in_flight)
    core = EngineCore(FakeRunner(config), config)
    rng = random.Random(0)
    requests = []
    for i in range(20):
        prompt = family_tokens(i % 3)[: rng.randrange(1, 120)]
        requests.append(Request(f"r{i}", prompt, SamplingParams(rng.randrange(1, 60), seed=i), frozenset({0, 1})))
        core.add(requests[-1])
    tokens: dict[str, list[int]] = {}
    while core.has_work:
        for update in core.step():
            assert update.token is not None
            tokens.setdefault(update.request.id, []).append(update.token)
    assert all(tokens[r.id] == r.output == expected_output(r, 256) for r in requests)
    stats = core.stats()
    assert stats.running == stats.waiting == stats.slots_used == 0
    assert stats.steps > 20
    assert stats.prefix_queries_tokens == sum(len(r.prompt) for r in requests)
    assert stats.snapshots_total == 6
    core.reset_cache()
    assert core.stats().kv_blocks_used == 0
    assert not core.step()


def test_two_plans_in_flight_need_a_runner_that_overlaps() -> None:
    config = small_config(max_in_flight=2)
    with pytest.raises(ConfigError, match="no launch/collect"):
        EngineCore(InTurnOnly(FakeRunner(config)), config)
    EngineCore(InTurnOnly(FakeRunner(config)), small_config(max_in_flight=1))


def test_a_result_that_does_not_fit_its_plan_is_refused() -> None:
    config = small_config(max_in_flight=1)

    class Short(FakeRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            return StepResult(plan.step_id, [], [])

    core = EngineCore(Short(config), config)
    core.add(Request("a", [1, 2, 3], SamplingParams(4)))
    with pytest.raises(SparkinferError, match="samples 1 tokens, its result has 0"):
        core.step()


def test_books_are_checked_when_the_engine_runs_out_of_work() -> None:
    config = small_config(max_in_flight=1)
    core = EngineCore(FakeRunner(config), config)
    core.add(Request("a", [1, 2, 3], SamplingParams(3, ignore_eos=True)))
    core.step()
    core.step()
    core.scheduler.resources.blocks.allocate(1)  # A block that nobody owns.
    with pytest.raises(IntegrityError, match="block"):
        core.step()


def test_abort_returns_what_was_active() -> None:
    config = small_config()
    core = EngineCore(FakeRunner(config), config)
    core.add(Request("a", [1, 2, 3], SamplingParams(40, ignore_eos=True)))
    core.step()
    assert [r.id for r in core.abort(["a", "b"])] == ["a"]
    while core.has_work:
        assert not core.step()
    assert core.stats().slots_used == 0
