"""Each rule of mixed steps and packed prefill, by its setting."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.passes import LoadView, PassShape, choose_pass, chunk_length, mixing_applies
from sparkinfer.scheduling.types import StepPlan
from tests.scheduling.driver import Driver


def config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {"max_num_seqs": 64, "num_kv_blocks": 8192, "max_model_len": 16384}
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


def load(decoding: bool = True, requests: int = 20, head_left: int = 1000, streak: int = 0) -> LoadView:
    return LoadView(decoding, requests, head_left, streak)


def test_defaults_are_those_of_the_seeds() -> None:
    assert choose_pass(load(), config()) == PassShape(decode=True, budget=1024, max_prompts=8)
    assert choose_pass(load(), config(mixed_chunk=4096)).budget == 4096


def test_no_prompt_waits_decode_only() -> None:
    assert choose_pass(load(head_left=0), config()) == PassShape(decode=True)


def test_mixed_chunk_0_separates_prefill_and_decode() -> None:
    off = config(mixed_chunk=0)
    assert not choose_pass(load(), off).decode
    assert choose_pass(load(streak=1), off) == PassShape(decode=True)
    assert not choose_pass(load(streak=1), config(mixed_chunk=0, prefill_passes_per_decode=2)).decode


def test_long_prompts_keep_a_pass_of_their_own() -> None:
    assert choose_pass(load(head_left=2049), config()) == PassShape(False, 8192, 1, alone=True)
    assert choose_pass(load(head_left=2048), config()).decode
    assert choose_pass(load(head_left=2049), config(own_pass_tokens=4096)).decode
    assert choose_pass(load(head_left=2049, streak=1), config()).decode, "and decoding requests go on in between"
    assert choose_pass(load(decoding=False, head_left=2049), config()).alone


@pytest.mark.parametrize(("requests", "mixed"), [(1, False), (8, False), (9, True)])
def test_small_loads_are_left_to_speculation_when_a_drafter_is_loaded(requests: int, mixed: bool) -> None:
    assert mixing_applies(load(requests=requests), config(drafter_loaded=True)) is mixed
    assert mixing_applies(load(requests=requests), config())
    assert mixing_applies(load(requests=requests), config(drafter_loaded=True, spec_load_limit=0))


def test_a_backlog_of_prompts_fills_a_larger_mixed_pass() -> None:
    on = config(backlog_chunk=5120)
    behind = LoadView(True, 20, 1000, 0, waiting=2561)
    assert choose_pass(behind, on) == PassShape(decode=True, budget=5120, max_prompts=8)
    assert choose_pass(replace(behind, waiting=2560), on).budget == 1024, "half of it waits, not more"
    assert choose_pass(behind, config()).budget == 1024, "the setting's 0 turns it off"
    long_first = replace(behind, head_left=2049)
    assert choose_pass(long_first, on).alone, "a long prompt still has its own pass"
    assert choose_pass(replace(long_first, prefill_streak=1), on).budget == 5120
    assert choose_pass(replace(behind, num_requests=8), replace(on, drafter_loaded=True)).decode is False


def test_packing_and_its_switches() -> None:
    burst = load(decoding=False)
    assert choose_pass(burst, config()) == PassShape(False, 8192, 64)
    assert choose_pass(burst, config(pack_prefill=False)).max_prompts == 1
    assert choose_pass(burst, config(is_moe=True)).max_prompts == 64
    assert choose_pass(burst, config(is_moe=True, pack_moe=False)).max_prompts == 1
    assert choose_pass(burst, config(is_moe=False, pack_moe=False)).max_prompts == 64


def test_packing_off_is_for_prefill_passes_and_a_mixed_step_has_its_own_number() -> None:
    """What docs/settings.md says of PACK_PREFILL and MIXED_MAX_PROMPTS."""
    assert choose_pass(load(), config(pack_prefill=False)).max_prompts == 8
    assert choose_pass(load(), config(pack_prefill=False, mixed_max_prompts=1)).max_prompts == 1
    assert choose_pass(load(decoding=False), config(pack_max_prompts=5)).max_prompts == 5


def test_chunks_end_their_prompt_or_on_an_aligned_position() -> None:
    assert chunk_length(0, 100, 100, 64) == 100
    assert chunk_length(0, 101, 100, 64) == 64
    assert chunk_length(48, 500, 100, 64) == 80
    assert chunk_length(64, 500, 63, 64) == 0


def plans_of(driver: Driver) -> list[StepPlan]:
    plans = []
    while driver.scheduler.has_work:
        assert driver.launch()
        plans.append(driver.launched[-1])
        driver.collect()
    return plans


def prompt(length: int, seed: int) -> list[int]:
    return [(seed * 31 + i * 7) % 97 for i in range(length)]


def driver(**changes: object) -> Driver:
    values: dict[str, object] = {
        "max_num_seqs": 32,
        "num_kv_blocks": 4096,
        "max_model_len": 8192,
        "prefill_chunk": 4096,
    }
    return Driver(config(**(values | changes)))


def test_one_mixed_step_carries_up_to_8_prompts_oldest_first_within_the_budget() -> None:
    engine = driver(mixed_chunk=1024)
    engine.add(prompt(10, 0), 40, stops=False)
    engine.step()
    waiting = [engine.add(prompt(100, 1 + i), 4, stops=False) for i in range(12)]
    first, second = plans_of(engine)[:2]
    assert [r.request for r in first.rows if not r.is_decode] == waiting[:8]
    assert [r.request for r in second.rows if not r.is_decode] == waiting[8:]
    assert first.num_decode == 1
    assert second.num_decode == 9, "a prompt that ended in a pass took its first token from it"
    assert all(r.samples for r in first.rows)


def test_budget_cuts_the_last_prompt_which_goes_on_first() -> None:
    engine = driver(mixed_chunk=1024)
    engine.add(prompt(10, 0), 40, stops=False)
    engine.step()
    a, b, c = (engine.add(prompt(700, 1 + i), 4, stops=False) for i in range(3))
    first, second = plans_of(engine)[:2]
    assert [(r.request, r.start, r.length) for r in first.rows[1:]] == [(a, 0, 700), (b, 0, 320)]
    assert [(r.request, r.start, r.length) for r in second.rows[2:]] == [(b, 320, 380), (c, 0, 640)]


@pytest.mark.parametrize("backlog", [0, 4096])
def test_a_backlog_is_what_the_next_prompts_need_and_clears_when_they_are_done(backlog: int) -> None:
    """Four of six prompts of 1000 tokens fit the larger budget; the two left are less than half of it."""
    engine = driver(mixed_chunk=1024, backlog_chunk=backlog)
    engine.add(prompt(10, 0), 60, stops=False)
    engine.step()
    waiting = [engine.add(prompt(1000, 1 + i), 20, stops=False) for i in range(6)]
    plans = [plan for plan in plans_of(engine) if plan.prefill]
    assert all(plan.num_decode for plan in plans), "decoding requests get a token from every pass"
    whole = [(request, 1000) for request in waiting]
    carried = [[(row.request, row.length) for row in plan.prefill] for plan in plans]
    if backlog:
        fifth, sixth = waiting[4:]
        assert carried == [[*whole[:4], (fifth, 64)], [(fifth, 936), (sixth, 64)], [(sixth, 936)]]
    else:
        assert carried == [[one] for one in whole]


def test_a_backlog_counts_only_what_a_mixed_pass_could_carry() -> None:
    """Not prompts beyond its number, not long ones, not those that have no slot."""
    engine = driver(mixed_chunk=1024, backlog_chunk=4096, mixed_max_prompts=2, max_num_seqs=4)
    engine.add(prompt(10, 0), 60, stops=False)
    engine.step()
    planner = engine.scheduler._planner
    engine.add(prompt(1000, 1), 20, stops=False)
    engine.add(prompt(3000, 2), 20, stops=False)
    assert planner.load(0).waiting == 1000
    for seed in range(3, 7):
        engine.add(prompt(1000, seed), 20, stops=False)
    assert planner.load(0).waiting == 2000, "two prompts a pass"
    assert driver(backlog_chunk=0).scheduler._planner.load(0).waiting == 0
    few = driver(mixed_chunk=1024, backlog_chunk=4096, max_num_seqs=3)
    few.add(prompt(10, 0), 60, stops=False)
    few.step()
    for seed in range(1, 7):
        few.add(prompt(1000, seed), 20, stops=False)
    assert few.scheduler._planner.load(0).waiting == 2000, "two slots are left"
    plans_of(few)
    plans_of(engine)


def test_a_burst_is_packed_and_a_long_prompt_runs_alone() -> None:
    engine = driver()
    shorts = [engine.add(prompt(500, i), 2, stops=False) for i in range(3)]
    long = engine.add(prompt(3000, 9), 2, stops=False)
    last = engine.add(prompt(300, 10), 2, stops=False)
    plans = plans_of(engine)
    assert [r.request for r in plans[0].rows] == [*shorts, last]
    alone = [p for p in plans if any(r.request is long and not r.is_decode for r in p.rows)]
    assert [[(r.start, r.length) for r in p.rows] for p in alone] == [[(0, 3000)]]


def test_a_long_prompt_that_is_the_oldest_is_next_whatever_has_begun() -> None:
    engine = driver(mixed_chunk=1024)
    engine.add(prompt(10, 0), 300, stops=False)
    engine.step()
    begun = engine.add(prompt(1984, 1), 4, stops=False)
    engine.step()
    urgent = engine.add(prompt(5000, 2), 4, stops=False, priority=-100)
    behind = engine.add(prompt(1984, 3), 4, stops=False, priority=100)
    carried = [[(row.request, row.length) for row in plan.prefill] for plan in plans_of(engine) if plan.prefill]
    assert carried == [
        [(urgent, 4096)],
        [(urgent, 904), (begun, 64)],
        [(begun, 896), (behind, 128)],
        [(behind, 1024)],
        [(behind, 832)],
    ]


def test_nobody_passes_a_long_prompt_that_then_would_not_fit() -> None:
    """The long one needs 250 of 300 blocks while one that it could not run beside holds 119."""
    engine = driver(mixed_chunk=1024, num_kv_blocks=300, max_model_len=4700, watermark=0.0)
    engine.add(prompt(64, 0), 300, stops=False)
    engine.step()
    engine.add(prompt(1900, 1), 60, stops=False)
    engine.step()
    long = engine.add(prompt(4000, 2), 4, stops=False)
    shorts = [engine.add(prompt(1500, 3 + i), 4, stops=False) for i in range(3)]
    order = list(dict.fromkeys(row.request for plan in plans_of(engine) for row in plan.prefill))
    assert order[1:] == [long, *shorts]


def test_short_prompts_pass_long_ones_that_fit_beside_them() -> None:
    engine = driver(mixed_chunk=1024)
    engine.add(prompt(10, 0), 300, stops=False)
    engine.step()
    first = engine.add(prompt(8000, 1), 4, stops=False)
    longs = [engine.add(prompt(4000, 2 + i), 4, stops=False) for i in range(7)]
    short = engine.add(prompt(500, 20), 4, stops=False)
    carried = [[row.request for row in plan.prefill] for plan in plans_of(engine) if plan.prefill]
    assert carried[:2] == [[first], [short]]
    assert list(dict.fromkeys(itertools.chain(*carried))) == [first, short, *longs]


def test_long_prompts_do_not_stop_decoding() -> None:
    """Chunks of a long prompt alternate with steps in which the others get a token."""
    engine = driver(prefill_chunk=1024)
    engine.add(prompt(10, 0), 60, stops=False)
    engine.step()
    engine.add(prompt(8000, 1), 2, stops=False)
    kinds = [plan.num_decode > 0 for plan in plans_of(engine)]
    assert all(any(pair) for pair in itertools.pairwise(kinds))


def test_mixing_off_never_mixes() -> None:
    engine = driver(mixed_chunk=0)
    for i in range(20):
        engine.add(prompt(50 + i, i), 5 + i, stops=False)
        engine.step()
    for plan in plans_of(engine):
        assert plan.num_decode in (0, len(plan.rows))


def test_priority_first_then_arrival() -> None:
    engine = driver(max_num_seqs=1)
    blocker = engine.add(prompt(20, 0), 3, stops=False)
    engine.step()
    late = engine.add(prompt(20, 1), 1, priority=1, stops=False)
    normal = [engine.add(prompt(20, 2 + i), 1, stops=False) for i in range(2)]
    urgent = engine.add(prompt(20, 5), 1, priority=-1, stops=False)
    plans_of(engine)
    assert engine.finished == [blocker, urgent, *normal, late]
