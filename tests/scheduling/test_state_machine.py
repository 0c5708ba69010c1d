"""Hypothesis state machine: scheduler, prefix cache, fake model and scripted drafter through every kind of event, in
any order."""

from __future__ import annotations

import os
import random

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.scheduling.driver import FAMILIES, VOCAB, Driver, family_tokens, fuzz, random_config
from tests.scheduling.fuzz import totals

EXAMPLES = int(os.environ.get("SPARKINFER_STATE_MACHINE_EXAMPLES", "300"))
SCRIPT = st.lists(st.sampled_from([0, 1, 2, 3, 7, 14, 15, 16, 20]), min_size=1, max_size=5)
"""How many drafts of each next row are right."""
LENGTHS = st.one_of(st.integers(1, 130), st.sampled_from([1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]))


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are the events an engine sees. A step of the count is one that was collected; arrivals, cancellations and
    resets are none."""

    seen: dict[str, int]
    driver: Driver

    @initialize(seed=st.integers(0, 2**16), script=SCRIPT)
    def start(self, seed: int, script: list[int]) -> None:
        self.driver = Driver(random_config(random.Random(seed)), script)

    @rule(script=SCRIPT)
    def drafter_changes(self, script: list[int]) -> None:
        self.driver.drafter.follow(script)

    @rule(
        family=st.integers(0, FAMILIES - 1),
        length=LENGTHS,
        tail=st.lists(st.integers(0, VOCAB - 1), max_size=3),
        max_tokens=st.sampled_from([1, 2, 15, 16, 17, 33, 120]),
        salt=st.sampled_from(["", "tenant"]),
        cache=st.booleans(),
        priority=st.sampled_from([0, -1, 2]),
        stops=st.booleans(),
    )
    def arrive(
        self,
        family: int,
        length: int,
        tail: list[int],
        max_tokens: int,
        salt: str,
        cache: bool,
        priority: int,
        stops: bool,
    ) -> None:
        prompt = family_tokens(family)[:length] + tail
        self.driver.add(prompt, max_tokens, salt=salt, cache=cache, priority=priority, stops=stops)

    @precondition(lambda self: self.driver.histories)
    @rule(index=st.integers(0, 7), tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
    def next_turn(self, index: int, tail: list[int]) -> None:
        histories = self.driver.histories
        prompt = (histories[index % len(histories)] + tail)[: self.driver.config.max_model_len - 1]
        self.driver.add(prompt, 20)

    @rule(count=st.integers(1, 12))
    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @rule()
    def launch(self) -> None:
        self.driver.launch()

    @precondition(lambda self: self.driver.launched)
    @rule()
    def collect(self) -> None:
        self.driver.collect()

    @precondition(lambda self: self.driver.live)
    @rule(index=st.integers(0, 100))
    def cancel(self, index: int) -> None:
        live = list(self.driver.live)
        self.driver.abort(live[index % len(live)])

    @rule()
    def reset(self) -> None:
        self.driver.scheduler.reset_cache()

    @invariant()
    def balanced(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()
            totals(type(self).seen, self.driver)


def test_state_machine_runs_ten_thousand_steps() -> None:
    SchedulerMachine.seen = {}
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(", ".join(f"{value} {name}" for name, value in SchedulerMachine.seen.items()))
    assert SchedulerMachine.seen["steps"] >= (10_000 if EXAMPLES >= 300 else 30 * EXAMPLES)
    wanted = ("hit tokens", "preemptions", "evictions", "moves to host", "accepted drafts", "rejected drafts")
    untouched = [name for name in wanted if not SchedulerMachine.seen[name]]
    assert not untouched, f"never happened: {untouched}"


def test_random_lives_exercise_everything() -> None:
    seen: dict[str, int] = {}
    for seed in range(100):
        totals(seen, fuzz(10_000 + seed, 300))
    assert seen["steps"] >= 10_000
    untouched = [name for name, value in seen.items() if value == 0]
    assert not untouched, f"never happened: {untouched}"
