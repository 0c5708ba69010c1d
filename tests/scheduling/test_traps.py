"""Faults that hybrid engines had, as far as they lie in the scheduler: tests named after where each was seen.

Rows that concern states and captured steps are in tests/models/test_traps.py; docs/traps.md has the whole list, and
what waits for a drafter of real weights: here a scripted one proposes.
"""

from __future__ import annotations

import random

import pytest

from sparkinfer.scheduling.prefix_index import extend_hashes
from sparkinfer.scheduling.types import BlockMove, MoveKind, Request, StepPlan
from tests.scheduling.driver import Driver, family_tokens, small_config
from tests.scheduling.fake_model import POISON, check_no_reuse, expected_output, reference, state_after

LENGTHS = [16 * blocks + tail for blocks in (0, 2, 5) for tail in (0, 1, 2, 15, 16, 17) if blocks + tail]


def roomy(**changes: object) -> Driver:
    """Enough of everything, so that nothing is evicted."""
    defaults: dict[str, object] = {"num_kv_blocks": 200, "num_snapshots": 40, "max_in_flight": 1}
    return Driver(small_config(**(defaults | changes)))


def spec(script: list[int], **changes: object) -> Driver:
    """The same with a drafter that follows `script`, and a checkpoint at every boundary of the output."""
    defaults: dict[str, object] = {"num_kv_blocks": 200, "num_snapshots": 40, "max_in_flight": 1,
                                   "drafter_loaded": True, "decode_checkpoint_interval": 16}  # fmt: skip
    return Driver(small_config(**(defaults | changes)), script)


def check_states(driver: Driver, requests: list[Request]) -> int:
    """Every published checkpoint on the way of these requests equals a fresh prefill; returns how many there are."""
    states: dict[bytes, int] = {}
    for request in requests:
        hashes: list[bytes] = []
        extend_hashes(hashes, request, request.num_tokens // 16)
        for block, digest in enumerate(hashes, 1):
            states[digest] = state_after(request.tokens(0, 16 * block))
    published = [node for node in driver.scheduler.cache.index if node.snapshot >= 0]
    for node in published:
        assert driver.runner.snapshots[node.snapshot] == states[node.hash], f"checkpoint at {node.position}"
    return len(published)


@pytest.mark.parametrize("drafter", [False, True])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_vllm_43559_53912_cache_and_speculation_on_off_three_warm_replays(in_flight: int, drafter: bool) -> None:
    """Tokens are the same cold and warm, with drafts and without, with generation that crosses block boundaries."""
    prompt = family_tokens(0)[:50]
    for tokens in (1, 13, 14, 15, 40):
        driver = roomy(max_in_flight=in_flight, drafter_loaded=drafter, decode_checkpoint_interval=16)
        cold = driver.run(prompt, tokens, cache=False, stops=False).output
        assert cold == list(reference(tuple(prompt), 0, tokens))
        for _ in range(4):
            assert driver.run(prompt, tokens, stops=False).output == cold
        turn = driver.run([*prompt, *cold, 5], tokens, stops=False)
        assert turn.num_cached >= (len(prompt) + tokens - 1) // 16 * 16 - 16
        assert driver.scheduler.stats().prefix_hits_tokens > 0
        assert (driver.scheduler.stats().draft_tokens > 0) == (drafter and tokens > 2)


def test_vllm_53505_every_checkpoint_equals_a_fresh_prefill() -> None:
    """For every prompt length and chunk size, the state saved at p is the one of a fresh prefill of p tokens."""
    found = 0
    for chunk in (32, 48, 64):
        driver = roomy(prefill_chunk=chunk, own_pass_tokens=chunk, decode_checkpoint_interval=16, num_kv_blocks=400)
        requests = [driver.run([*family_tokens(9)[:n], 5], 20, stops=False) for n in (15, 16, 31, 47, 63, 64, 65, 130)]
        found += check_states(driver, requests)
    assert found > 10


def test_vllm_53505_every_computed_scheduled_accepted() -> None:
    """Drafts that begin at every place of a block, of several numbers, accepted as far as can be: the state saved at p
    is the one of a fresh prefill, and the latest boundary that was passed has one."""
    found = 0
    for drafts in (1, 3, 7, 15, 16, 20):
        for accepted in range(drafts + 1):
            driver = spec([accepted], draft_tokens=drafts, num_kv_blocks=2000, num_snapshots=200)
            requests = [driver.run([*family_tokens(8)[:16], n, 1][: 16 + n], 40, stops=False) for n in range(1, 3)]
            requests += [driver.run([n, *family_tokens(9)[: 16 + n]], 36, stops=False) for n in range(16)]
            found += check_states(driver, requests)
    assert found > 1000


def test_sglang_37817_32052_drafts_that_cross_a_boundary_leave_its_checkpoint() -> None:
    """Whether a boundary falls on the last accepted token, among them or among the rejected ones, the latest checkpoint
    is at the last boundary that was passed, and holds the state of that position."""
    for accepted in (0, 1, 2, 5, 7):
        driver = spec([accepted, 7, 0])
        request = driver.add(family_tokens(2)[:29], 120, stops=False)
        crossed = 0
        while driver.scheduler.has_work:
            before = request.num_computed
            driver.step()
            if request.slot < 0 or request.num_computed // 16 == max(before, 29) // 16:
                continue
            crossed += 1
            node = driver.scheduler.roster.by_id[request.id].last_decode_node
            assert node is not None
            assert node.position == request.num_computed // 16 * 16
            assert driver.runner.snapshots[node.snapshot] == state_after(request.tokens(0, node.position))
        assert crossed >= 6
        driver.drain()


def test_sglang_37817_32052_a_state_of_rejected_drafts_is_never_published() -> None:
    """The boundary lies among the drafts, all of which are wrong: its snapshot is given back."""
    driver = spec([0], num_snapshots=2, checkpoint_interval=0)
    request = driver.add(family_tokens(2)[:28], 40, stops=False)
    driver.step()
    held = driver.scheduler.cache.snapshots.num_used
    for computed in (29, 30, 31):
        driver.launch()
        assert [c.position for c in driver.launched[-1].verify[0].checkpoints] == [32]
        driver.collect()
        assert request.num_computed == computed
        assert driver.scheduler.cache.snapshots.num_used == held
    driver.step()
    assert request.num_computed == 32
    assert driver.scheduler.cache.snapshots.num_used == held + 1
    driver.drain()


def test_sglang_39342_mixed_step_publishes_a_valid_checkpoint_or_none() -> None:
    """Prompts that end in a mixed step: their checkpoints hold the right state, and reuse equals cold."""
    driver = roomy(mixed_chunk=64)
    first = driver.add(family_tokens(1)[:20], 100, stops=False)
    driver.step()
    others = [driver.add(family_tokens(2 + i)[: 40 + i], 2, stops=False) for i in range(3)]
    mixed = 0
    while driver.scheduler.has_work:
        assert driver.launch()
        plan = driver.launched[-1]
        writes = [c for row in plan.rows if not row.is_decode for c in row.checkpoints]
        if plan.num_decode and writes:
            mixed += 1
            held = {node.snapshot for node in driver.scheduler.cache.index if node.snapshot >= 0}
            assert not held & {c.snapshot for c in writes}, "published before the step that writes it has committed"
        driver.collect()
    assert mixed
    assert check_states(driver, [first, *others]) >= 3
    for request in others:
        warm = driver.run(request.prompt, 2, stops=False)
        assert warm.num_cached > 0
        assert warm.output == request.output


def test_sglang_39342_aborted_step_publishes_nothing() -> None:
    """A request cancelled while the step that writes its checkpoint runs leaves no entry and no snapshot."""
    driver = roomy()
    request = driver.add(family_tokens(1)[:60], 5)
    driver.launch()
    driver.abort(request.id)
    driver.collect()
    assert len(driver.scheduler.cache.index) == 0
    assert driver.scheduler.cache.snapshots.num_used == 0
    driver.drain()


@pytest.mark.parametrize("length", LENGTHS)
def test_sglang_29633_nano_vllm_144_233_first_token_warm_equals_cold(length: int) -> None:
    """One-token tails and full hits compute at least one token and give the cold first token, also after preemption."""
    prompt = family_tokens(3)[:length]
    driver = roomy()
    cold = driver.run(prompt, 3, stops=False)
    assert cold.num_cached == 0
    longer = driver.run(prompt + [7] * 40, 3, stops=False)  # May leave a checkpoint at every boundary of the prompt.
    again = driver.run(longer.prompt, 3, stops=False)
    warm = driver.run(prompt, 3, stops=False)
    assert warm.output == cold.output
    assert again.output == longer.output
    assert warm.num_cached < length
    if length >= 32:
        assert warm.num_cached > 0
    resumed = driver.add(prompt, 20, stops=False)
    driver.step()
    driver.step()
    driver.scheduler.roster.preempt(driver.scheduler.roster.by_id[resumed.id])
    driver.check()
    driver.drain()
    assert resumed.num_preemptions == 1


@pytest.mark.parametrize("drafter", [False, True])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_vllm_metal_488_resumed_request_starts_from_its_own_state(cache: bool, in_flight: int, drafter: bool) -> None:
    """Requests preempted in mid-decode give the tokens of an undisturbed run (the driver compares each)."""
    driver = Driver(
        small_config(num_kv_blocks=20, max_in_flight=in_flight, watermark=0.0, drafter_loaded=drafter, draft_tokens=3)
    )
    requests = [driver.add(family_tokens(i)[:50], 150, stops=False, cache=cache) for i in range(4)]
    driver.drain()
    assert sum(r.num_preemptions for r in requests) > 0
    assert all(r.output == expected_output(r, 256) for r in requests)


def test_vllm_55178_55894_random_chunk_splits_mixed_with_decode_rows() -> None:
    """However prompts are cut, a row of a running request stays a decode row, and states equal one-shot prefill."""
    for seed in range(30):
        rng = random.Random(seed)
        driver = roomy(
            prefill_chunk=rng.choice([16, 32, 48, 112]), mixed_chunk=rng.choice([16, 32, 48]), own_pass_tokens=500
        )
        requests = []
        while len(requests) < 8 or driver.scheduler.has_work:
            if len(requests) < 8 and rng.random() < 0.3:
                prompt = [rng.randrange(97) for _ in range(rng.randrange(1, 200))]
                requests.append(driver.add(prompt, rng.randrange(1, 30), stops=False))
            if driver.launch():
                for row in driver.launched[-1].rows:
                    generating = row.start >= len(row.request.prompt)
                    assert row.is_decode == generating
                    assert not row.is_decode or row.length == 1
                driver.collect()
        check_states(driver, requests)


def test_vllm_53787_trtllm_16976_decode_rows_stay_decode_rows_and_mixing_loses_no_steps() -> None:
    """With mixing every decoding request has its row in every step, and the load takes no more steps than without."""
    steps = {}
    for mixed in (0, 64):
        driver = roomy(mixed_chunk=mixed, max_num_seqs=8)
        rng = random.Random(1)
        for i in range(24):
            driver.add([rng.randrange(97) for _ in range(40)], 8 + i % 9, stops=False)
        while driver.scheduler.has_work:
            decoding = {s.request.id for s in driver.scheduler.roster.decoding if s.request.id in driver.live}
            assert driver.launch()
            rows = {row.request.id for row in driver.launched[-1].rows if row.is_decode}
            if mixed:
                assert rows == decoding
            driver.collect()
        steps[mixed] = driver.steps
    assert steps[64] <= steps[0]


def test_mini_sglang_67_102_nothing_is_reused_before_the_step_that_reads_it_has_committed() -> None:
    """Two plans in flight under memory pressure: the runner checks each launched plan against the one before."""
    driver = Driver(small_config(num_kv_blocks=18, max_num_seqs=6, watermark=0.0))
    rng = random.Random(4)
    for _ in range(40):
        driver.random_arrival(rng)
        for _ in range(4):
            driver.step()
    driver.drain()
    assert driver.scheduler.stats().preemptions > 0


def test_mini_sglang_67_102_the_check_itself_can_fail() -> None:
    """A request that ends while a later row of it runs keeps its slot and blocks until that row commits."""
    driver = Driver(small_config(num_kv_blocks=40, num_snapshots=0, num_host_blocks=0))
    first = driver.add(family_tokens(0)[:20], 100)
    driver.launch()
    driver.launch()
    later: StepPlan = driver.launched[-1]
    assert later.rows[0].pending
    driver.scheduler.abort([first.id])
    del driver.live[first.id]
    driver.collect()
    assert driver.scheduler.resources.blocks.num_used > 0
    assert driver.scheduler.resources.slots.num_used == 1
    driver.add(family_tokens(1)[:20], 5)
    driver.launch()
    newest = driver.launched[-1]
    assert newest.rows[0].slot != later.rows[0].slot
    newest.rows[0].slot = later.rows[0].slot
    with pytest.raises(AssertionError, match="slot in use"):
        check_no_reuse(later, newest)


def plans_in_flight(**changes: object) -> tuple[StepPlan, StepPlan]:
    """Two plans in flight, the earlier of which writes a checkpoint; a copy of nothing, so tests may spoil them."""
    driver = Driver(small_config(num_kv_blocks=60, num_snapshots=6, **changes))
    driver.add(family_tokens(0)[:60], 20)
    driver.launch()
    driver.add(family_tokens(1)[:60], 20)
    driver.launch()
    earlier, later = driver.launched
    assert earlier.prefill[0].checkpoints
    assert later.prefill[0].checkpoints
    return earlier, later


def test_mini_sglang_67_102_reuse_of_blocks_and_of_pinned_buffers_would_be_seen() -> None:
    """Snapshots and host blocks lie in pinned memory: one that a step in flight reads or writes is nobody else's."""
    earlier, later = plans_in_flight()
    check_no_reuse(earlier, later)
    later.prefill[0].checkpoints = earlier.prefill[0].checkpoints
    with pytest.raises(AssertionError, match="a snapshot in use"):
        check_no_reuse(earlier, later)
    earlier, later = plans_in_flight()
    later.prefill[0].blocks = earlier.prefill[0].blocks
    with pytest.raises(AssertionError, match="a block in use"):
        check_no_reuse(earlier, later)
    earlier, later = plans_in_flight()
    earlier.moves.append(BlockMove(MoveKind.TO_DEVICE, 50, 3))
    later.moves.append(BlockMove(MoveKind.TO_HOST, 51, 3))
    with pytest.raises(AssertionError, match="a host block was reused"):
        check_no_reuse(earlier, later)
    earlier, later = plans_in_flight()
    later.moves.append(BlockMove(MoveKind.TO_HOST, earlier.prefill[0].blocks[0], 4))
    with pytest.raises(AssertionError, match="a move touches a block in use"):
        check_no_reuse(earlier, later)


def test_vllm_39064_fresh_rows_do_not_see_an_old_state() -> None:
    """A slot used before starts from zero: the row's start says so (vLLM #39064 as far as the scheduler goes)."""
    driver = roomy(max_num_seqs=1)
    driver.run(family_tokens(5)[:33], 3, stops=False)
    assert driver.runner.slots[0] != POISON
    driver.run(family_tokens(6)[:5], 3, stops=False)
