"""Passes timed by executing them: each as often as any other, however often the policies run it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from sparkinfer_eval.simulate import real

from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.types import Request, Row, SamplingParams, StepPlan


class Runner:
    """Each execution of a pass with as many prompt tokens takes a second less than the one before."""

    clock = 0.0
    executed: Counter[int]

    def __init__(self, *_: object, **__: object) -> None:
        self.config = SimpleNamespace(vocab_size=100)
        Runner.executed = Counter()

    def execute(self, plan: StepPlan) -> None:
        size = sum(row.length for row in plan.prefill)
        Runner.clock += 100.0 - Runner.executed[size]
        Runner.executed[size] += 1


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> real.RealPasses:
    monkeypatch.setattr(real, "ModelRunner", Runner)
    monkeypatch.setattr(real.time, "thread_time", lambda: Runner.clock)
    config = SchedulerConfig(max_num_seqs=2, num_kv_blocks=64, max_model_len=512)
    return real.RealPasses(Path(), config, "float32")


def prompt(length: int) -> StepPlan:
    request = Request("x", [1] * length, SamplingParams(1), frozenset())
    blocks = list(range(-(-length // 16)))
    return StepPlan(0, [Row(request, 0, blocks, 0, length, is_decode=False, samples=True, output_index=0)])


def test_what_a_policy_runs_often_is_timed_no_oftener(passes: real.RealPasses) -> None:
    each = real.EXECUTIONS["prompt"]
    for number in range(3):
        passes.next_round(first=number == 0)
        often = [passes.seconds(prompt(64)) for _ in range(10)]
        once = passes.seconds(prompt(128))
        assert once == 100.0 - (each * (number + 1) - 1)
        # Each of the ten took less than the one before, but all after the first few are for the runner's sake only.
        assert len(set(often)) == 1
    late = passes.seconds(prompt(192))
    assert late == 100.0 - (3 * each - 1)
    assert Runner.executed[192] == 3 * each


def test_every_pass_is_executed(passes: real.RealPasses) -> None:
    """The runner has to know every block."""
    passes.next_round(first=True)
    for number in range(1, 20):
        before = Runner.executed[64]
        passes.seconds(prompt(64))
        assert Runner.executed[64] > before, number


def test_another_load_is_timed_anew(passes: real.RealPasses) -> None:
    passes.next_round(first=True)
    passes.seconds(prompt(64))
    passes.next_round(first=False)
    before = passes.seconds(prompt(64))
    passes.next_round(first=True)
    Runner.executed.clear()
    assert passes.seconds(prompt(64)) > before
