"""Slots, snapshots, KV moves and pending tokens: what the runner keeps between steps."""

from __future__ import annotations

import pytest
import torch

from sparkinfer.errors import ConfigError, EnvironmentProblem
from sparkinfer.models.config import load_config
from sparkinfer.runner.memory import MemoryPlan
from sparkinfer.runner.model_runner import ModelRunner
from sparkinfer.scheduling.types import BlockMove, MoveKind, StepPlan


def state_of(driver, request):
    slot = driver.slot_of[request]
    caches = driver.runner.caches
    return caches.state[:, slot].clone(), caches.window[:, slot].clone()


def close(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("name", ["dense", "moe"])
@pytest.mark.parametrize("positions", [[16], [64], [48, 80, 112], [16, 32, 48, 64]])
def test_each_checkpoint_equals_a_fresh_prefill_up_to_it(checkpoint, make_driver, prompt, name, positions):
    folder, _ = checkpoint(name)
    tokens = prompt(120, 5)
    driver = make_driver(folder)
    other = driver.add(prompt(200, 6))
    request = driver.add(tokens)
    marks = [(position, snapshot) for snapshot, position in enumerate(positions)]
    driver.run([driver.row(other), driver.row(request, marks=marks)])
    for position, snapshot in marks:
        fresh = make_driver(folder)
        short = fresh.add(tokens[:position])
        fresh.run([fresh.row(short)])
        caches = driver.runner.caches
        close((caches.snapshot_state[snapshot], caches.snapshot_window[snapshot]), state_of(fresh, short))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 40])
def test_restore_continues_like_the_undisturbed_request(checkpoint, make_driver, prompt, length):
    """A second request shares 64 tokens: it takes their blocks and their checkpoint and computes only the rest."""
    folder, _ = checkpoint("dense")
    shared, tail = prompt(64, 7), prompt(length, 8)
    cold = make_driver(folder)
    undisturbed = cold.add(shared + tail)
    for _ in range(8):
        cold.run([cold.row(undisturbed)])
    warm = make_driver(folder)
    first = warm.add(shared + prompt(20, 9))
    warm.run([warm.row(first, marks=[(64, 2)])])
    second = warm.add(shared + tail)
    warm.blocks_of[second] = warm.blocks_of[first][:4]
    second.num_computed = 64
    warm.run([warm.row(second, restore=2), warm.row(first)])
    close(state_of(warm, second), state_of_after(make_driver(folder), shared + tail))
    for _ in range(7):
        warm.run([warm.row(second), warm.row(first)])
    assert second.output == undisturbed.output


def state_of_after(driver, tokens):
    request = driver.add(tokens)
    driver.run([driver.row(request)])
    return state_of(driver, request)


def test_a_new_request_does_not_inherit_its_slot_s_state(checkpoint, make_driver, prompt):
    folder, _ = checkpoint("dense")
    driver = make_driver(folder)
    with torch.inference_mode():
        driver.runner.caches.state.fill_(float("nan"))
        driver.runner.caches.window.fill_(float("nan"))
    request = driver.add(prompt(30, 1))
    assert torch.isfinite(driver.logits([driver.row(request)])).all()


def test_a_step_leaves_other_slots_and_blocks_bit_identical(checkpoint, make_driver, prompt):
    folder, _ = checkpoint("dense")
    driver = make_driver(folder)
    requests = [driver.add(prompt(20 + slot, slot), slot=slot) for slot in (0, 2, 3, 5)]
    driver.run([driver.row(request) for request in requests])
    caches = driver.runner.caches
    bystanders = [1, 2, 4]
    unused = driver.free_blocks
    with torch.inference_mode():
        caches.state[:, [1, 4]] = 123.0
        caches.window[:, [1, 4]] = 123.0
        caches.kv[:, :, unused] = 7.0
    before = [pool[:, bystanders].clone() for pool in (caches.state, caches.window)]
    members = [request for request in requests if driver.slot_of[request] != 2]
    driver.run([driver.row(request) for request in members])
    for pool, old in zip((caches.state, caches.window), before, strict=True):
        assert torch.equal(pool[:, bystanders], old)
    still_unused = [block for block in unused if block in set(driver.free_blocks)]
    assert (caches.kv[:, :, still_unused] == 7.0).all()


def test_pending_rows_take_the_token_from_the_device(checkpoint, make_driver, prompt):
    folder, _ = checkpoint("dense")
    plain, overlapped = make_driver(folder), make_driver(folder)
    expected = plain.add(prompt(20, 4))
    request = overlapped.add(prompt(20, 4))
    for _ in range(5):
        plain.run([plain.row(expected)])
    runner = overlapped.runner
    runner.launch(StepPlan(0, [overlapped.row(request)]))
    for index in range(1, 5):
        row = overlapped.row(request, 1, start=19 + index, is_decode=True, samples=True, pending=True)
        row.output_index = index
        runner.launch(StepPlan(index, [row]))
    assert [runner.collect().tokens[0] for _ in range(5)] == expected.output


def test_kv_blocks_survive_a_stay_in_host_memory(checkpoint, make_driver, prompt):
    folder, _ = checkpoint("dense")
    plain, moved = make_driver(folder), make_driver(folder, num_host_blocks=3)
    expected, request = plain.add(prompt(40, 4)), moved.add(prompt(40, 4))
    for driver, one in ((plain, expected), (moved, request)):
        driver.run([driver.row(one)])
    old = moved.blocks_of[request]
    out = [BlockMove(MoveKind.TO_HOST, block, host) for host, block in enumerate(old)]
    moved.runner.execute(StepPlan(90, [], out))
    with torch.inference_mode():
        moved.runner.caches.kv[:, :, old] = 5.0
    new = [moved.free_blocks.pop() for _ in old]
    back = [BlockMove(MoveKind.TO_DEVICE, block, host) for host, block in enumerate(new)]
    moved.blocks_of[request] = new
    request.num_preemptions += 1
    rows = [moved.row(request)]
    request.output.append(moved.runner.execute(StepPlan(91, rows, back)).tokens[0])
    plain.run([plain.row(expected)])
    assert request.output == expected.output


def test_decode_checkpoints_before_and_after(checkpoint, make_driver, prompt):
    folder, _ = checkpoint("dense")
    driver = make_driver(folder)
    request = driver.add(prompt(31, 4))
    driver.run([driver.row(request)])
    at_31 = state_of(driver, request)
    driver.run([driver.row(request, marks=[(31, 0), (32, 1)])])
    caches = driver.runner.caches
    assert torch.equal(caches.snapshot_state[0], at_31[0])
    assert torch.equal(caches.snapshot_window[0], at_31[1])
    at_32 = state_of(driver, request)
    assert torch.equal(caches.snapshot_state[1], at_32[0])
    assert torch.equal(caches.snapshot_window[1], at_32[1])


def test_contradictory_rows_are_refused(checkpoint, make_driver, prompt):
    folder, _ = checkpoint("dense")
    driver = make_driver(folder)
    request = driver.add(prompt(40, 4))
    with pytest.raises(ValueError, match="lies outside its row"):
        driver.run([driver.row(request, 16, marks=[(32, 0)])])
    with pytest.raises(ValueError, match="computes 1 token"):
        driver.run([driver.row(request, 16, is_decode=True)])
    short = driver.row(request)
    short.blocks = short.blocks[:1]
    with pytest.raises(ValueError, match="1 blocks do not hold 40 tokens"):
        driver.run([short])


def test_memory_plan_is_what_the_runner_allocates(checkpoint, make_driver):
    folder, _ = checkpoint("moe")
    for dtype in ("float32", "bfloat16"):
        runner = make_driver(folder, dtype=dtype, num_host_blocks=5).runner
        caches, plan = runner.caches, runner.memory
        device = [caches.kv, caches.state, caches.window]
        host = [caches.snapshot_state, caches.snapshot_window, runner.host_kv]
        assert sum(tensor.nbytes for tensor in device) == plan.device_bytes
        assert sum(tensor.nbytes for tensor in host) == plan.host_bytes
        assert str(plan.kv_block_bytes) in plan.describe()
    plan = MemoryPlan.for_model(load_config(folder), dtype="float32", num_slots=2)
    assert plan.kv_blocks_in(10 * plan.kv_block_bytes + 1) == 10
    with pytest.raises(ConfigError, match="holds no block"):
        plan.kv_blocks_in(plan.kv_block_bytes - 1)


def test_impossible_settings_are_refused(checkpoint):
    folder, _ = checkpoint("dense")
    fit = {"max_num_seqs": 1, "num_kv_blocks": 1, "max_model_len": 16}
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        ModelRunner(folder, **{**fit, "max_model_len": 513})
    with pytest.raises(ConfigError, match="at least 1"):
        ModelRunner(folder, **{**fit, "max_num_seqs": 0})
    with pytest.raises(ConfigError, match="dtype"):
        ModelRunner(folder, **fit, dtype="int8")
    with pytest.raises(ConfigError, match="device"):
        ModelRunner(folder, **fit, device="abacus")
    if not torch.cuda.is_available():
        with pytest.raises(EnvironmentProblem, match="not present"):
            ModelRunner(folder, **fit, device="cuda")
