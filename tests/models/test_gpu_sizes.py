"""Padded shapes of GPU passes cover everything a scheduler can plan, tightly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkinfer.runner.gpu_sizes import PassLimits, PassShape
from sparkinfer.scheduling.config import SchedulerConfig
from tests.scheduling.driver import Driver

LIMITS = PassLimits(max_num_seqs=32, prefill_chunk=8192, mixed_chunk=1024, mixed_max_prompts=8, pack_max_prompts=64)


def test_decode_sizes_as_documented() -> None:
    assert LIMITS.decode_sizes() == [1, 2, 4, 8, 16, 24, 32]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 9, 33, 100])
def test_decode_sizes_end_at_the_maximum(most: int) -> None:
    limits = PassLimits(most, 8192, 1024, 8, 64)
    assert limits.decode_sizes()[-1] == most
    assert limits.decode_sizes() == sorted(set(limits.decode_sizes()))
    assert limits.mixed_decode_sizes()[-1] == most


@pytest.mark.parametrize("limits", [LIMITS, PassLimits(3, 100, 48, 2, 4), PassLimits(5, 20000, 0, 8, 64)])
def test_every_pass_within_the_limits_has_a_captured_shape(limits: PassLimits) -> None:
    shapes = set(limits.shapes())
    for decode in range(limits.max_num_seqs + 1):
        most = limits.mixed_chunk if decode else limits.prefill_chunk
        for tokens in {0, 1, 2, 63, 64, 65, most // 2, most - 1, most}:
            if not 0 <= tokens <= most or decode + tokens == 0:
                continue
            shape = limits.shape_for(decode, tokens, min(1, tokens))
            assert shape in shapes
            assert shape.decode >= decode
            assert shape.tokens >= tokens
            assert (shape.tokens > 0) == (tokens > 0)


def test_a_mixed_step_has_room_for_every_prompt_that_the_scheduler_puts_into_it() -> None:
    """More prompts beside decoding requests than a pack without them may hold."""
    config = SchedulerConfig(
        max_num_seqs=128, num_kv_blocks=4096, max_model_len=512, mixed_chunk=4096, mixed_max_prompts=100
    )
    limits = PassLimits(128, config.prefill_chunk, config.mixed_chunk, config.mixed_max_prompts, 64)
    driver = Driver(config)
    driver.add([5] * 10, 40, stops=False)
    driver.step()
    for number in range(90):
        driver.add([number] * 10, 2, stops=False)
    assert driver.launch()
    plan = driver.launched[-1]
    assert len(plan.prefill) == 90
    shape = limits.shape_for(plan.num_decode, sum(row.length for row in plan.prefill), len(plan.prefill))
    assert shape in limits.shapes()
    assert shape.sequences == 100
    driver.collect()
    driver.drain()


def test_with_one_prompt_size_every_pass_is_padded_alike() -> None:
    limits = replace(LIMITS, mixed_chunk=0, one_prompt_size=True)
    assert {limits.shape_for(0, tokens, 3) for tokens in (1, 64, 5000, 8192)} == {PassShape(0, 8192, 32)}
    assert [shape.tokens for shape in limits.shapes() if shape.tokens] == [8192]


def test_largest_shape_comes_first() -> None:
    shapes = LIMITS.shapes()
    assert shapes[0] == PassShape(0, 8192, 32)
    assert LIMITS.max_rows == 8192


def test_a_pass_beyond_the_limits_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"1025 tokens of 1 prompts exceeds .* 1024 tokens, 8 prompts"):
        LIMITS.shape_for(1, 1025, 1)
    with pytest.raises(ValueError, match="33 decode rows"):
        LIMITS.shape_for(33, 0, 0)
    with pytest.raises(ValueError, match="9 prompts"):
        LIMITS.shape_for(1, 100, 9)
