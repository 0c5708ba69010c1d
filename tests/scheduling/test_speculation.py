"""Rows with drafts: who gets them, what comes back, and what each rule costs."""

from __future__ import annotations

import pytest

from sparkinfer.errors import ConfigError, SparkinferError
from sparkinfer.scheduling.passes import LoadView, speculation_applies
from sparkinfer.scheduling.types import Request, Row, SamplingParams, StepPlan, StepResult
from tests.scheduling.driver import Driver, family_tokens, small_config
from tests.scheduling.fake_model import expected_output


def engine(script: list[int], **changes: object) -> Driver:
    """A driver with enough memory and a drafter that follows `script`."""
    defaults: dict[str, object] = {"num_kv_blocks": 200, "num_snapshots": 40, "max_in_flight": 1,
                                   "drafter_loaded": True, "max_num_seqs": 12}  # fmt: skip
    return Driver(small_config(**(defaults | changes)), script)


def next_plan(driver: Driver) -> StepPlan:
    """Launch one plan and collect it."""
    assert driver.launch()
    plan = driver.launched[-1]
    driver.collect()
    return plan


@pytest.mark.parametrize(("requests", "applies"), [(1, True), (8, True), (9, False)])
def test_loads_of_eight_requests_or_fewer_verify_drafts_where_a_drafter_is_loaded(requests: int, applies: bool) -> None:
    load = LoadView(True, requests, 0, 0)
    assert speculation_applies(load, small_config(drafter_loaded=True)) is applies
    assert not speculation_applies(load, small_config())
    for loaded in (True, False):
        driver = engine([7], drafter_loaded=loaded)
        for number in range(requests):
            driver.add([number] * 20, 20, stops=False)
        next_plan(driver)
        plan = next_plan(driver)
        while plan.num_decode != requests:
            plan = next_plan(driver)
        assert len(plan.verify) == (requests if applies and loaded else 0)
        assert len(plan.decode) == requests - len(plan.verify)


@pytest.mark.parametrize("accepted", [0, 1, 3, 7])
def test_accepted_drafts_and_the_token_after_them_come_back(accepted: int) -> None:
    driver = engine([accepted])
    request = driver.add(family_tokens(0)[:21], 60, stops=False)
    next_plan(driver)
    (row,) = next_plan(driver).verify
    assert (row.start, row.length, row.num_drafts, row.output_index) == (21, 8, 7, 1)
    assert len(request.output) == 1 + accepted + 1
    assert request.num_computed == 21 + accepted + 1
    (row,) = next_plan(driver).verify
    assert row.start == 21 + accepted + 1
    driver.drain()
    stats = driver.scheduler.stats()
    assert (stats.draft_tokens, stats.accepted_tokens) == (driver.drafter.proposed, driver.drafter.right)
    assert driver.steps == (1 + -(-59 // (accepted + 1)))


def test_no_draft_reaches_beyond_the_last_token_and_the_last_token_is_plain() -> None:
    driver = engine([0])
    request = driver.add(family_tokens(0)[:21], 6, stops=False)
    next_plan(driver)
    plans = []
    while driver.scheduler.has_work:
        plans.append(next_plan(driver))
    assert [[row.num_drafts for row in plan.verify] for plan in plans] == [[4], [3], [2], [1], []]
    assert len(plans[-1].decode) == 1
    assert request.output == expected_output(request, 256)


def test_a_stop_token_among_the_accepted_ones_ends_the_request_there() -> None:
    ended_early = 0
    for seed in range(40):
        driver = engine([20], draft_tokens=20)
        request = driver.run(family_tokens(seed)[:30], 100, seed=seed)  # The driver compares the output.
        ended_early += request.finish_reason == "stop"
    assert ended_early > 5


def test_requests_for_logprobs_take_plain_rows_beside_the_others() -> None:
    driver = engine([7])
    asks = Request("asks", [3] * 20, SamplingParams(20, ignore_eos=True, logprobs=2))
    driver.scheduler.add(asks)
    driver.live[asks.id] = asks
    other = driver.add([4] * 20, 20, stops=False)
    next_plan(driver)
    plan = next_plan(driver)
    assert plan.decode.requests == [asks]
    assert [row.request for row in plan.verify] == [other]
    driver.drain()


def test_nobody_is_preempted_for_drafts() -> None:
    """At the block's end with an empty pool the drafts stay inside the block."""
    driver = engine([0], num_kv_blocks=16, num_snapshots=0, num_host_blocks=0, watermark=0.0)
    old = driver.add([1] * 120, 100, stops=False)
    young = driver.add([2] * 120, 8, stops=False)
    while not (old.output and young.output):
        next_plan(driver)
    assert driver.scheduler.resources.blocks.num_free == 0
    cut = 0
    while len(old.output) < 7:
        plan = next_plan(driver)
        assert len(plan.verify) + len(plan.decode) == 2
        for row in plan.verify:
            assert row.start + row.length <= 128
            cut += row.start + 8 > 128
    assert cut
    assert young.num_preemptions == old.num_preemptions == 0
    driver.drain()


def test_two_in_flight_a_request_with_drafts_in_flight_has_no_second_row() -> None:
    driver = engine([2], max_in_flight=2)
    driver.add(family_tokens(0)[:20], 40, stops=False)
    assert driver.launch()
    assert driver.launch()
    assert driver.launched[-1].verify[0].pending
    driver.collect()
    assert not driver.launch()
    driver.add(family_tokens(1)[:20], 40, stops=False)
    assert driver.launch(), "a prompt goes on meanwhile"
    assert [row.is_decode for row in driver.launched[-1].rows] == [False]
    driver.drain()


def test_a_result_that_does_not_fit_the_rows_is_the_runners_fault() -> None:
    for verified in ([], [[]], [[1] * 9], [[1], [1]]):
        driver = engine([0])
        driver.add(family_tokens(0)[:20], 40, stops=False)
        next_plan(driver)
        plan = driver.scheduler.schedule()
        assert plan is not None
        with pytest.raises(SparkinferError, match="model runner is at fault"):
            driver.scheduler.commit(plan, StepResult(plan.step_id, [], [], verified))


def test_settings_and_rows_are_checked() -> None:
    with pytest.raises(ConfigError, match="draft_tokens is 0"):
        small_config(draft_tokens=0).validate()
    request = Request("r", [1], SamplingParams(1))
    plain = Row(request, 0, [0], 3, 1, True, True, 0)
    verify = Row(request, 1, [1], 3, 4, True, True, 0, num_drafts=3)
    prompt = Row(request, 2, [2], 0, 5, False, True, 0)
    plan = StepPlan(0, [plain, verify, prompt])
    assert (plan.num_rows, plan.num_decode, plan.num_tokens, plan.num_sampled) == (3, 2, 10, 2)
    assert plan.rows[1:] == [verify, prompt]
    for rows in ([verify, plain], [prompt, verify]):
        with pytest.raises(ValueError, match="in this order"):
            StepPlan(0, rows)
