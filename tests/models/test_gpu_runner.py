"""The GPU runner's logic on a CPU: padded passes over plain twins of its kernels against the CPU runner."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from sparkinfer.models.config import load_config
from sparkinfer.models.loader import open_source
from sparkinfer.models.qwen3_5_gpu import GpuModel, GpuOptions
from sparkinfer.runner import prompt_logprobs
from sparkinfer.runner.gpu_runner import GpuRunner
from sparkinfer.runner.gpu_sizes import PassLimits
from sparkinfer.runner.memory import MemoryPlan
from sparkinfer.scheduling.types import StepPlan

from .conftest import Driver
from .gpu_twins import twin_ops

LIMITS = PassLimits(max_num_seqs=6, prefill_chunk=300, mixed_chunk=200, mixed_max_prompts=3, pack_max_prompts=8)


@pytest.fixture
def make_gpu_driver():
    def make(folder, dtype=torch.float32, **changes):
        counts = {"num_slots": 6, "num_kv_blocks": 160, "num_snapshots": 4, **changes}
        config = load_config(folder)
        with torch.inference_mode():
            model = GpuModel(
                config,
                open_source(folder, config),
                device=torch.device("cpu"),
                ops=twin_ops(),
                options=GpuOptions(),
                max_positions=400,
                max_rows=LIMITS.max_rows,
                dtype=dtype,
            )
        memory = MemoryPlan.for_model(config, dtype=str(dtype)[6:], **counts)
        return Driver(GpuRunner(model, memory, LIMITS, max_model_len=400))

    return make


def state_of(driver, request):
    slot = driver.slot_of[request]
    return driver.runner.caches.state[:, slot].clone(), driver.runner.caches.window[:, slot].clone()


def close(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-4 * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("name", ["dense", "dense-odd", "dense-linear-only", "dense-attention-first", "moe"])
def test_mixed_passes_give_the_cpu_runner_s_logits_and_tokens(checkpoint, make_driver, make_gpu_driver, prompt, name):
    folder, _ = checkpoint(name)
    cpu, gpu = make_driver(folder), make_gpu_driver(folder)
    pairs = [[driver.add(prompt(length, length)) for driver in (cpu, gpu)] for length in (40, 3, 17)]
    late = [driver.add(prompt(50, 1), temperature=0.8, seed=7, top_k=20, top_p=0.9) for driver in (cpu, gpu)]
    for step in range(4):
        for side, driver in enumerate((cpu, gpu)):
            rows = [driver.row(pair[side]) for pair in pairs]
            if step == 1:
                rows.append(driver.row(late[side], 32))
            if step == 2:
                rows.append(driver.row(late[side]))
            if step == 3:
                rows.insert(1, driver.row(late[side]))
            driver.run(rows)
    for one, other in [*pairs, late]:
        assert one.output == other.output
        close(state_of(gpu, other), state_of(cpu, one))
    rows = [[driver.row(pair[side]) for pair in pairs] for side, driver in enumerate((cpu, gpu))]
    close([gpu.logits(rows[1])], [cpu.logits(rows[0])])


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_a_bfloat16_model_gives_logits_between_bfloat16_numbers(checkpoint, make_gpu_driver, prompt, name):
    driver = make_gpu_driver(checkpoint(name)[0], dtype=torch.bfloat16)
    request = driver.add(prompt(20, 1))
    driver.run([driver.row(request)])
    kept = driver.runner.passes._logits[:1].clone()
    asked = driver.logits([driver.row(request)])
    for logits in (asked, kept):
        assert logits.dtype == torch.float32
        assert (logits != logits.bfloat16().float()).float().mean() > 0.9


def test_vllm_39064_vllm_ascend_12040_padding_touches_nothing_but_the_dummies(checkpoint, make_gpu_driver, prompt):
    """A canary in every slot and block that takes no part, for each number of rows below each padded size."""
    folder, _ = checkpoint("dense")
    for count in range(1, 6):
        driver = make_gpu_driver(folder)
        members = [driver.add(prompt(20, slot), slot=slot) for slot in range(count)]
        caches = driver.runner.caches
        others, unused = list(range(count, 6)), None
        with torch.inference_mode():
            caches.state[:, others] = 123.0
            caches.window[:, others] = 123.0
            caches.kv[:, :, :160] = 7.0
        for _ in range(3):
            driver.run([driver.row(request) for request in members])
            unused = list(driver.free_blocks)
            assert (caches.state[:, others] == 123.0).all()
            assert (caches.window[:, others] == 123.0).all()
            assert (caches.kv[:, :, unused] == 7.0).all()


@pytest.mark.parametrize("positions", [[16], [16, 48, 80], [64]])
def test_each_checkpoint_equals_a_fresh_prefill_up_to_it(checkpoint, make_gpu_driver, prompt, positions):
    folder, _ = checkpoint("dense")
    tokens = prompt(100, 5)
    driver = make_gpu_driver(folder)
    other, request = driver.add(prompt(60, 6)), driver.add(tokens)
    marks = [(position, snapshot) for snapshot, position in enumerate(positions)]
    driver.run([driver.row(other), driver.row(request, marks=marks[::-1])])
    for position, snapshot in marks:
        fresh = make_gpu_driver(folder)
        short = fresh.add(tokens[:position])
        fresh.run([fresh.row(short)])
        caches = driver.runner.caches
        close((caches.snapshot_state[snapshot], caches.snapshot_window[snapshot]), state_of(fresh, short))


def test_checkpoints_before_and_after_a_row_and_a_restore(checkpoint, make_gpu_driver, prompt):
    folder, _ = checkpoint("dense")
    driver = make_gpu_driver(folder)
    request = driver.add(prompt(31, 3))
    driver.run([driver.row(request)])
    before = state_of(driver, request)
    driver.run([driver.row(request, marks=[(31, 0), (32, 1)])])
    caches = driver.runner.caches
    close((caches.snapshot_state[0], caches.snapshot_window[0]), before)
    close((caches.snapshot_state[1], caches.snapshot_window[1]), state_of(driver, request))
    # Another request takes over the first one's blocks and its state after 32 tokens: it continues alike.
    second = driver.add([*request.prompt, *request.output])
    driver.blocks_of[second] = driver.blocks_of[request][:2]
    second.num_computed = 32
    driver.run([driver.row(second, restore=1)])
    driver.run([driver.row(request)])
    assert second.output == request.output[2:]


def test_steps_in_flight_take_their_tokens_from_the_device(checkpoint, make_gpu_driver, prompt):
    folder, _ = checkpoint("dense")
    plain, overlapped = make_gpu_driver(folder), make_gpu_driver(folder)
    expected, request = plain.add(prompt(20, 4)), overlapped.add(prompt(20, 4))
    for _ in range(5):
        plain.run([plain.row(expected)])
    runner, tokens = overlapped.runner, []
    runner.launch(StepPlan(0, [overlapped.row(request)]))
    for index in range(1, 5):
        row = overlapped.row(request, 1, start=19 + index, is_decode=True, samples=True, pending=True)
        row.output_index = index
        runner.launch(StepPlan(index, [row]))
        tokens += runner.collect().tokens
    tokens += runner.collect().tokens
    assert tokens == expected.output


def test_no_more_steps_in_flight_than_there_is_pinned_memory_for(checkpoint, make_gpu_driver, prompt):
    driver = make_gpu_driver(checkpoint("dense")[0])
    row = driver.row(driver.add(prompt(20, 4)))
    for index in range(2):
        driver.runner.launch(StepPlan(index, [row]))
    with pytest.raises(ValueError, match="2 steps are under way"):
        driver.runner.launch(StepPlan(2, [row]))


def test_log_probabilities_and_bans_as_on_the_cpu(checkpoint, make_driver, make_gpu_driver, prompt):
    folder, _ = checkpoint("dense")
    results = []
    for driver in (make_driver(folder), make_gpu_driver(folder)):
        first = driver.add(prompt(10, 1), logprobs=3)
        second = driver.add(prompt(12, 2), min_tokens=2, stop_token_ids=frozenset(range(5, 150)))
        results.append([driver.run([driver.row(first), driver.row(second)]) for _ in range(3)])
    for cpu, gpu in zip(*results, strict=True):
        assert cpu.tokens == gpu.tokens
        assert gpu.logprobs[1] is None
        assert cpu.logprobs[0].top_ids == gpu.logprobs[0].top_ids
        assert gpu.logprobs[0].rank == cpu.logprobs[0].rank
        np.testing.assert_allclose(gpu.logprobs[0].top_logprobs, cpu.logprobs[0].top_logprobs, atol=1e-3)


def test_prompt_log_probabilities_as_on_the_cpu(checkpoint, make_driver, make_gpu_driver, prompt):
    folder, _ = checkpoint("dense")
    found = []
    for driver in (make_driver(folder), make_gpu_driver(folder)):
        first, second = driver.add(prompt(33, 1), prompt_logprobs=2), driver.add(prompt(8, 2))
        driver.run([driver.row(second)])
        driver.run([driver.row(second), driver.row(first)])
        driver.run([driver.row(second), driver.row(first)])
        found.append((first.prompt_logprobs, first.output, second.output))
    assert found[0][1:] == found[1][1:]
    for cpu, gpu in zip(found[0][0][1:], found[1][0][1:], strict=True):
        assert cpu.top_ids == gpu.top_ids
        assert gpu.logprob == pytest.approx(cpu.logprob, abs=1e-3)


def test_prompt_log_probabilities_are_read_when_the_device_has_them(checkpoint, make_gpu_driver, prompt, monkeypatch):
    """The host must wait for the event behind their copy: what it reads earlier is whatever lay there."""
    runner = (gpu := make_gpu_driver(checkpoint("dense")[0])).runner
    marks, waited, known = itertools.count(1), [], []
    store = prompt_logprobs.store

    def spied(asked, reports):
        known.extend(waited)
        store(asked, reports)

    monkeypatch.setattr(runner.queue, "mark", lambda stream: next(marks))
    monkeypatch.setattr(runner.queue, "host_wait", waited.append)
    monkeypatch.setattr(prompt_logprobs, "store", spied)
    # A chunk that ends before the prompt does samples nothing, so that nothing else waits for the device either.
    step = runner.submit(StepPlan(0, [gpu.row(gpu.add(prompt(40, 1), prompt_logprobs=2), 24)]))
    last = next(marks) - 1
    step.result()
    assert last in known


def test_a_pass_beyond_the_limits_is_refused(checkpoint, make_gpu_driver, prompt):
    folder, _ = checkpoint("dense")
    driver = make_gpu_driver(folder)
    request = driver.add(prompt(350, 1))
    with pytest.raises(ValueError, match="350 tokens of 1 prompts exceeds this runner's limits"):
        driver.run([driver.row(request)])
