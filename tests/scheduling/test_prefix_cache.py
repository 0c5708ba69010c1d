"""Prefix cache: what hits, what does not, where checkpoints lie, what is evicted."""

from __future__ import annotations

import itertools

import pytest

from sparkinfer.errors import RequestError
from sparkinfer.scheduling.checkpoints import end_position, next_decode_position, prompt_positions, thinned
from sparkinfer.scheduling.eviction import recompute_cost
from sparkinfer.scheduling.prefix_index import prompt_hashes
from sparkinfer.scheduling.sequence import NEVER
from sparkinfer.scheduling.types import MAX_PASS_CHECKPOINTS, MoveKind, Request, SamplingParams
from tests.scheduling.driver import Driver, family_tokens, small_config


def driver(**changes: object) -> Driver:
    defaults: dict[str, object] = {"num_kv_blocks": 200, "num_snapshots": 40, "max_in_flight": 1}
    return Driver(small_config(**(defaults | changes)))


@pytest.mark.parametrize(
    ("length", "position"), [(1076, 1056), (1077, 1056), (777, 752), (32, 16), (31, 0), (48, 32), (16, 0), (1, 0)]
)
def test_end_checkpoint_moves_back_out_of_the_last_16_tokens(length: int, position: int) -> None:
    assert end_position(length) == position
    assert position == 0 or 16 <= length - position < 32


def test_checkpoints_inside_a_prompt() -> None:
    config = small_config(checkpoint_interval=64, branch_min_tokens=16)
    assert prompt_positions(200, 0, 0, config) == [64, 128, 176]
    assert prompt_positions(200, 128, 0, config) == [176]
    assert prompt_positions(200, 0, 96, config) == [64, 96, 128, 176]
    assert prompt_positions(200, 176, 0, config) == []
    assert prompt_positions(200, 0, 48, small_config(checkpoint_interval=0, branch_min_tokens=64)) == [176]
    anywhere = small_config(checkpoint_interval=0, branch_min_tokens=0)
    assert prompt_positions(37, 0, 16, anywhere) == [16], "one state is saved once"
    assert prompt_positions(37, 0, 32, anywhere) == [16], "and none behind the prompt's end"
    assert prompt_positions(200, 48, 48, anywhere) == [176]


@pytest.mark.parametrize(("snapshots", "interval", "length"), [(1, 64, 256), (2, 16, 200), (4, 16, 256)])
def test_few_snapshots_go_to_the_longest_prefix(snapshots: int, interval: int, length: int) -> None:
    """In one pass, and in chunks."""
    for chunk in (256, 64):
        engine = driver(
            num_snapshots=snapshots, checkpoint_interval=interval, branch_min_tokens=16, prefill_chunk=chunk,
            own_pass_tokens=1000, max_model_len=300, decode_checkpoint_interval=0,
        )  # fmt: skip
        text = family_tokens(0)[:length]
        other = family_tokens(1)[:64]
        engine.run(other, 1)
        engine.run(text, 1)
        assert engine.run(text, 1).num_cached == end_position(length)
        if snapshots > 1 and chunk == 256:
            assert engine.run(other, 1).num_cached == 48, "half the pool is left to others"


def test_checkpoints_while_generating() -> None:
    config = small_config(decode_checkpoint_interval=32)
    assert next_decode_position(40, 200, config) == 64
    assert next_decode_position(64, 200, config) == 96
    assert next_decode_position(96, 120, config) == 112, "the last boundary before the known end"
    assert next_decode_position(112, 120, config) == NEVER
    assert next_decode_position(40, 200, small_config(decode_checkpoint_interval=0)) == NEVER


def test_a_repeated_prompt_computes_only_its_tail() -> None:
    engine = driver()
    prompt = family_tokens(0)[:100]
    assert engine.run(prompt, 2).num_cached == 0
    assert engine.run(prompt, 2).num_cached == 80
    assert engine.scheduler.stats().prefix_hits_tokens == 80


def test_chats_hit_across_turns() -> None:
    engine = driver()
    chat = family_tokens(0)[:70]
    for _ in range(3):
        answer = engine.run(chat, 40, stops=False)
        before = len(chat)
        chat = [*chat, *answer.output, 3, 4, 5]
        warm = engine.run(chat, 1, stops=False)
        assert warm.num_cached > before, "the last answer is in the cache too"


def test_a_shared_beginning_hits_once_its_branch_point_is_known() -> None:
    engine = driver(checkpoint_interval=0)
    shared = family_tokens(0)[:120]
    cached = [engine.run(shared + [i] * 40, 1).num_cached for i in range(4)]
    assert cached[:2] == [0, 0], "the first makes KV, the second the checkpoint where they part"
    assert cached[2:] == [112, 112]


def test_salts_and_opt_out_do_not_share() -> None:
    engine = driver()
    prompt = family_tokens(0)[:100]
    engine.run(prompt, 2, salt="a")
    assert engine.run(prompt, 2, salt="b").num_cached == 0
    assert engine.run(prompt, 2, salt="").num_cached == 0
    assert engine.run(prompt, 2, salt="a", cache=False).num_cached == 0
    assert engine.run(prompt, 2, salt="a").num_cached == 80
    other = driver()
    other.run(prompt, 2, cache=False)
    assert len(other.scheduler.cache.index) == 0


def test_reset_drops_everything() -> None:
    engine = driver()
    prompt = family_tokens(0)[:100]
    engine.run(prompt, 2)
    engine.add(family_tokens(1)[:100], 30, stops=False)
    engine.step()
    engine.step()
    blocks, snapshots = engine.scheduler.reset_cache()
    assert blocks == 5 + 5, "those of the request that runs are none of the cache's any more"
    assert snapshots >= 3
    engine.check()
    engine.drain()
    assert engine.run(prompt, 2).num_cached == 0
    engine.scheduler.reset_cache()
    assert engine.scheduler.resources.blocks.num_used == 0
    assert engine.scheduler.stats().prefix_bytes == 0


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 5, 20])
def test_a_request_that_runs_during_a_reset_publishes_nothing_afterwards(steps: int, in_flight: int) -> None:
    """Neither what it had computed before, nor what it computes on top of that, prompt or answer."""
    engine = driver(max_in_flight=in_flight, decode_checkpoint_interval=16, prefill_chunk=64, own_pass_tokens=64)
    prompt = family_tokens(0)[:130]
    request = engine.add(prompt, 60, stops=False)
    for _ in range(steps):
        engine.step()
    engine.scheduler.reset_cache()
    engine.check()
    assert len(engine.scheduler.cache.index) == 0
    engine.drain()
    assert len(engine.scheduler.cache.index) == 0
    assert engine.scheduler.cache.snapshots.num_used == 0
    assert engine.run([*prompt, *request.output, 5], 2).num_cached == 0
    assert engine.run([*prompt, *request.output, 5], 2).num_cached > 0


def test_a_reset_while_a_step_restores_from_the_cache() -> None:
    """The step keeps its snapshot until it commits; nobody finds it any more, and then it is free."""
    engine = driver(max_in_flight=2)
    prompt = family_tokens(0)[:100]
    engine.run(prompt, 1)
    warm = engine.add([*prompt, 7], 3, stops=False)
    engine.launch()
    assert engine.launched[-1].prefill[0].restore is not None
    engine.scheduler.reset_cache()
    engine.check()
    assert engine.scheduler.cache.snapshots.num_used == 1 + len(engine.launched[-1].prefill[0].checkpoints)
    assert engine.add([*prompt, 8], 3, stops=False)
    engine.drain()
    assert warm.num_cached == 80
    assert engine.finished[-1].num_cached == 0


def test_a_request_preempted_after_a_reset_begins_anew_and_publishes() -> None:
    engine = driver()
    request = engine.add(family_tokens(0)[:100], 40, stops=False)
    for _ in range(3):
        engine.step()
    engine.scheduler.reset_cache()
    engine.scheduler.roster.preempt(engine.scheduler.roster.by_id[request.id])
    engine.launch()
    assert engine.launched[-1].prefill[0].start == 0
    engine.drain()
    assert engine.run([*request.prompt, *request.output, 5], 2).num_cached > 100


def test_a_pass_saves_no_more_checkpoints_than_the_runner_has_room_for() -> None:
    engine = driver(
        num_kv_blocks=2000, max_model_len=30_000, prefill_chunk=32_768, own_pass_tokens=2048, num_snapshots=400,
        checkpoint_interval=64,
    )  # fmt: skip
    tokens = [number % 97 for number in range(20_000)]
    engine.add(tokens, 1)
    engine.launch()
    positions = [c.position for c in engine.launched[-1].prefill[0].checkpoints]
    assert len(positions) == MAX_PASS_CHECKPOINTS // 2
    assert positions[-1] == end_position(20_000)
    assert max(later - earlier for earlier, later in itertools.pairwise([0, *positions])) <= 192
    engine.collect()
    engine.drain()
    assert engine.run(tokens, 1).num_cached == positions[-1]
    packed = driver(num_kv_blocks=2000, max_model_len=1024, prefill_chunk=32_768, own_pass_tokens=2048, max_num_seqs=64,
                    num_snapshots=1000, checkpoint_interval=16)  # fmt: skip
    for number in range(32):
        packed.add([number] * 500, 1)
    packed.launch()
    saved = [len(row.checkpoints) for row in packed.launched[-1].prefill]
    assert len(saved) == 32
    assert sum(saved) == MAX_PASS_CHECKPOINTS
    packed.collect()
    packed.drain()


def test_thinned_positions_keep_the_last_one() -> None:
    assert thinned([16, 32, 48, 64, 80], 5) == [16, 32, 48, 64, 80]
    assert thinned([16, 32, 48, 64, 80], 2) == [32, 80]
    assert thinned([16, 32, 48], 1) == [48]
    assert thinned([16, 32, 48], 0) == []


def test_a_refusal_holds_only_while_the_cache_is_the_same() -> None:
    """The head waits for blocks; what the other one publishes makes it small enough."""
    engine = driver(num_kv_blocks=24, max_model_len=256, prefill_chunk=512, own_pass_tokens=512, mixed_chunk=64,
                    checkpoint_interval=0, decode_checkpoint_interval=0, watermark=0.0)  # fmt: skip
    prompt = family_tokens(0)[:220]
    engine.add(prompt, 30, stops=False)
    second = engine.add([*prompt, 5], 2, stops=False)
    for _ in range(2):
        engine.step()
    assert second.output, "it was refused once and fits as soon as the first one's prompt is in the cache"
    engine.drain()


def test_no_snapshots_no_cache() -> None:
    engine = driver(num_snapshots=0, num_host_blocks=0)
    prompt = family_tokens(0)[:100]
    engine.run(prompt, 2)
    assert engine.run(prompt, 2).num_cached == 0
    assert engine.scheduler.stats().prefix_queries_tokens == 0


def test_concurrent_equal_prompts_share_blocks_in_the_end() -> None:
    engine = driver(prefill_chunk=256, own_pass_tokens=1000, checkpoint_interval=0)
    prompt = family_tokens(0)[:100]
    requests: list[Request] = [engine.add(prompt, 20, stops=False) for _ in range(2)]
    engine.step()
    assert requests[0].blocks[:5] == requests[1].blocks[:5], "the second took over the first one's blocks"
    engine.check()
    engine.drain()
    assert requests[0].output == requests[1].output


def test_eviction_gives_up_the_cheapest_per_byte_first() -> None:
    engine = driver(num_snapshots=2, checkpoint_interval=0, decode_checkpoint_interval=0, snapshot_bytes=10_000)
    dear, cheap, new = family_tokens(0)[:200], family_tokens(1)[:40], family_tokens(2)[:60]
    engine.run(dear, 1)
    engine.run(cheap, 1)
    engine.run(new, 1)
    assert engine.scheduler.stats().prefix_evictions == 2, "a snapshot, and the KV block that led to nothing else"
    assert engine.run(dear, 1).num_cached == 176, "older, but five times the work for the same bytes"
    assert engine.run(cheap, 1).num_cached == 0


def test_a_checkpoint_inside_makes_those_behind_it_cheap() -> None:
    """Two prompts share 160 tokens; once the state there is saved, each costs one block and goes before a new one."""
    engine = driver(num_snapshots=3, checkpoint_interval=0, decode_checkpoint_interval=0, snapshot_bytes=10_000)
    shared, other = family_tokens(0)[:160], family_tokens(1)[:60]
    first, second = [*shared, *[1] * 40], [*shared, *[2] * 40]
    for text in (first, second, other):
        engine.run(text, 1)
    held = {node.position: engine.scheduler.cache._clock.score(node) for node in engine.scheduler.cache.index}
    assert held[176] < held[32] < held[160]
    engine.run(family_tokens(2)[:90], 1)
    assert engine.run(other, 1).num_cached == 32


def test_what_is_not_used_for_long_goes_at_last() -> None:
    engine = driver(num_snapshots=2, checkpoint_interval=0, decode_checkpoint_interval=0, snapshot_bytes=10_000)
    dear = family_tokens(0)[:200]
    engine.run(dear, 1)
    for i in range(40):
        engine.run([i, *family_tokens(1)[:60]], 1)
    assert engine.run(dear, 1).num_cached == 0


def test_recompute_cost_counts_attention() -> None:
    assert recompute_cost(0, 100, 1 << 40) == pytest.approx(100)
    assert recompute_cost(32768, 32868, 32768) == pytest.approx(200, rel=0.01)


def test_kv_moves_to_the_host_and_back() -> None:
    engine = driver(num_kv_blocks=16, num_host_blocks=16, checkpoint_interval=0)
    prompt = family_tokens(0)[:100]
    engine.run(prompt, 2)
    moves = []
    for request in ([9] * 200, prompt):
        engine.add(request, 2)
        while engine.scheduler.has_work:
            assert engine.launch()
            moves.append([m.kind for m in engine.launched[-1].moves])
            engine.collect()
            engine.check()
    kinds = [kind for plan in moves for kind in plan]
    assert MoveKind.TO_HOST in kinds
    assert MoveKind.TO_DEVICE in kinds
    assert engine.finished[-1].num_cached == 80


def test_without_host_blocks_evicted_kv_is_gone() -> None:
    engine = driver(num_kv_blocks=16, num_host_blocks=0, checkpoint_interval=0)
    prompt = family_tokens(0)[:100]
    engine.run(prompt, 2)
    engine.run([9] * 220, 2)
    assert engine.run(prompt, 2).num_cached == 0
    assert engine.scheduler.stats().prefix_evictions > 0


def test_a_checkpoint_at_another_position_than_its_key_is_refused() -> None:
    engine = driver()
    request = engine.add(family_tokens(0)[:100], 30, stops=False)
    engine.step()
    cache, sequence = engine.scheduler.cache, engine.scheduler.roster.by_id[request.id]
    snapshot = cache.snapshots.reserve(64)
    with pytest.raises(ValueError, match="snapshot of position 64 published at 96"):
        cache.publish(sequence, 96, snapshot)


def test_a_preempted_request_resumes_from_its_checkpoint() -> None:
    engine = driver()
    request = engine.add(family_tokens(0)[:100], 60, stops=False)
    for _ in range(3):
        engine.step()
    engine.scheduler.roster.preempt(engine.scheduler.roster.by_id[request.id])
    engine.launch()
    assert engine.launched[-1].rows[0].start == 80
    engine.collect()
    engine.drain()
    assert request.num_cached == 0, "what counts is the first admission"


def test_hashes_that_come_with_a_request_are_those_of_the_cache() -> None:
    """One request brings them, the next one has them computed: the second hits."""
    for first, second in ((True, False), (False, True)):
        run, prompt = driver(), family_tokens(0)[:70]
        for brings in (first, second):
            hashes = prompt_hashes(prompt, "salt") if brings else b""
            request = Request("r", prompt, SamplingParams(1), cache_salt="salt", prompt_hashes=hashes)
            run.scheduler.add(request)
            run.live["r"] = request
            run.drain()
        assert request.num_cached == 48
    wrong = Request("x", prompt, SamplingParams(1), prompt_hashes=prompt_hashes(prompt[:32], ""))
    with pytest.raises(RequestError, match="32 bytes of hashes for a prompt of 70 tokens"):
        run.scheduler.add(wrong)
