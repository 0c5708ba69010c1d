"""Faults that hybrid engines had, as far as they lie in the model runner: tests named after where each was seen.

docs/traps.md has the whole list and where each row is tested.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch

from sparkinfer.scheduling.types import BlockMove, MoveKind, StepPlan


def live(driver, request):
    slot = driver.slot_of[request]
    return driver.runner.caches.state[:, slot], driver.runner.caches.window[:, slot]


def saved(driver, snapshot):
    return driver.runner.caches.snapshot_state[snapshot], driver.runner.caches.snapshot_window[snapshot]


def assert_same_bits(got, expected):
    for mine, its in zip(got, expected, strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine, its)
        assert mine.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["dense", "moe"])
@pytest.mark.parametrize("position", [16, 48, 64, 80])
def test_sglang_33515_save_and_restore_are_bit_exact_in_the_live_dtype(
    checkpoint, make_driver, prompt, name, dtype, position
):
    """Positions on and off the scan's chunks: a block boundary is no chunk boundary. What goes to a snapshot and comes
    back from it has the bits and the dtype of what the slot held."""
    folder, _ = checkpoint(name, dtype)
    driver = make_driver(folder, dtype=str(dtype).removeprefix("torch."))
    tokens = prompt(position + 5, 3)
    first = driver.add(tokens)
    driver.run([driver.row(first, position)])
    held = tuple(part.clone() for part in live(driver, first))
    # Saved before the pass, as the slot holds it.
    driver.run([driver.row(first, marks=[(position, 0)])])
    assert_same_bits(saved(driver, 0), held)
    second = driver.add(tokens)
    driver.blocks_of[second] = driver.blocks_of[first][: position // 16]
    second.num_computed = position
    # Restored into another slot, and saved from there before anything is computed.
    driver.run([driver.row(second, restore=0, marks=[(position, 1)])])
    assert driver.slot_of[second] != driver.slot_of[first]
    assert_same_bits(saved(driver, 1), held)
    assert_same_bits(live(driver, second), live(driver, first))
    assert second.output == first.output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sglang_33515_kv_comes_back_from_the_host_bit_exact(checkpoint, make_driver, prompt, dtype):
    folder, _ = checkpoint("dense", dtype)
    driver = make_driver(folder, dtype=str(dtype).removeprefix("torch."), num_host_blocks=3)
    request = driver.add(prompt(48, 4))
    driver.run([driver.row(request)])
    old, kv = driver.blocks_of[request], driver.runner.caches.kv
    held = kv[:, :, old].clone()
    assert held.abs().max() > 0
    driver.runner.execute(StepPlan(90, [], [BlockMove(MoveKind.TO_HOST, b, h) for h, b in enumerate(old)]))
    new = [driver.free_blocks.pop() for _ in old]
    driver.runner.execute(StepPlan(91, [], [BlockMove(MoveKind.TO_DEVICE, b, h) for h, b in enumerate(new)]))
    assert driver.runner.host_kv.dtype == kv.dtype
    assert torch.equal(kv[:, :, new], held)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_vllm_39064_vllm_ascend_12040_a_step_writes_its_own_slots_only(checkpoint, make_driver, prompt, size):
    """A canary in every slot: those that are no members of a decode step keep every bit. (Padding of captured steps:
    tests/models/test_gpu_runner.py and test_gpu_on_device.py.)"""
    folder, _ = checkpoint("dense")
    driver = make_driver(folder)
    count = driver.runner.memory.num_slots
    requests = [driver.add(prompt(18 + slot, slot), slot=slot) for slot in range(count)]
    driver.run([driver.row(request) for request in requests])
    caches = driver.runner.caches
    for seed in range(3):
        members = set(random.Random(seed).sample(range(count), min(size, count - 1)))
        others = [slot for slot in range(count) if slot not in members]
        before = [pool.clone() for pool in (caches.state, caches.window)]
        driver.run([driver.row(request) for request in requests if driver.slot_of[request] in members])
        for pool, old in zip((caches.state, caches.window), before, strict=True):
            assert torch.equal(pool[:, others], old[:, others])
            assert not torch.equal(pool[:, sorted(members)], old[:, sorted(members)])


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_vllm_55178_55894_states_after_random_chunks_equal_one_shot_prefill(checkpoint, make_driver, prompt, name):
    """Prompts cut at random, off block and chunk boundaries and down to one token, beside rows that decode."""
    folder, _ = checkpoint(name)
    for seed in range(4):
        rng = random.Random(seed)
        driver, fresh = make_driver(folder), make_driver(folder)
        decoding = driver.add(prompt(20, 50 + seed))
        driver.run([driver.row(decoding)])
        tokens = prompt(rng.randrange(70, 140), seed)
        request, whole = driver.add(tokens), fresh.add(tokens)
        while request.num_computed < len(tokens):
            left = len(tokens) - request.num_computed
            driver.run([driver.row(decoding), driver.row(request, min(left, rng.choice([1, 2, 15, 16, 17, 33, 64])))])
        fresh.run([fresh.row(whole)])
        for got, expected in zip(live(driver, request), live(fresh, whole), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-4 * max(1.0, float(expected.abs().max())))
        assert request.output == whole.output


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_vllm_53787_trtllm_16976_rows_of_a_mixed_pass_go_to_their_own_kernels(checkpoint, make_driver, prompt, name):
    """The rows that decode go to the recurrent kernels and those of prompts to the chunked ones, in every layer."""
    folder, _ = checkpoint(name)
    driver = make_driver(folder)
    decoding = [driver.add(prompt(20 + number, number)) for number in range(3)]
    driver.run([driver.row(request) for request in decoding])
    fresh = [driver.add(prompt(length, length)) for length in (1, 17, 40)]
    rows: dict[str, list[int]] = {}
    kinds = {
        "recurrent_gated_delta_rule": 3, "causal_conv1d_update": 3, "attention_decode": 3,
        "chunk_gated_delta_rule": 58, "causal_conv1d_varlen": 58, "attention_prefill": 58,
    }  # fmt: skip
    ops, originals = driver.runner.ops, {kind: getattr(driver.runner.ops, kind) for kind in kinds}

    def spy(kind, first, *rest):
        rows.setdefault(kind, []).append(len(first))
        return originals[kind](first, *rest)

    try:
        for kind in kinds:  # The table of kernels is frozen, and all layers share it.
            object.__setattr__(ops, kind, functools.partial(spy, kind))
        driver.run([driver.row(request) for request in [*decoding, *fresh]])
    finally:
        for kind, original in originals.items():
            object.__setattr__(ops, kind, original)
    config = driver.runner.config
    for kind, count in kinds.items():
        layers = config.num_full_layers if kind.startswith("attention") else config.num_linear_layers
        assert rows[kind] == [count] * layers, kind
