"""The GPU engine against the CPU engine on the shipped models: needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparkinfer.runner.gpu_sizes import PassLimits
from sparkinfer.runner.open_runner import open_runner
from sparkinfer.scheduling.types import StepPlan

from .conftest import Driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ROOT = Path(__file__).resolve().parents[2]
COUNTS = {"max_num_seqs": 6, "num_kv_blocks": 300, "max_model_len": 1024, "num_snapshots": 4}
LIMITS = PassLimits(6, 1024, 512, 4, 6)


def drivers(name: str) -> tuple[Driver, Driver]:
    folder = ROOT / "models" / name
    cpu = open_runner(folder, device="cpu", dtype="float32", **COUNTS)
    gpu = open_runner(folder, device="cuda", limits=LIMITS, **COUNTS)
    return Driver(cpu), Driver(gpu)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.cpu().float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", ["spark-tiny-dense", "spark-tiny-moe"])
def test_logits_of_prompts_and_of_decoding(name: str) -> None:
    cpu, gpu = drivers(name)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 2000, (length,), generator=generator).tolist() for length in (300, 17, 64, 1)]
    sides = [[driver.add(prompt) for prompt in prompts] for driver in (cpu, gpu)]
    expected, got = (d.logits([d.row(r) for r in rs]) for d, rs in zip((cpu, gpu), sides, strict=True))
    errors = [("prompts", relative(got, expected))]
    # The same forced continuation on both sides: rounding must not lead them apart.
    for step in range(20):
        for one, other in zip(*sides, strict=True):
            one.output.append(expected[step % 300].argmax().item())
            other.output.append(one.output[-1])
        rows = [[d.row(r) for r in rs] for d, rs in zip((cpu, gpu), sides, strict=True)]
        errors.append((f"step {step}", relative(gpu.logits(rows[1]), cpu.logits(rows[0]))))
    print(name, *(f"{what} {error:.4f}" for what, error in errors))
    # Rounding flips a router's near-ties: single rows of a MoE model then differ by a whole expert.
    limit = 0.1 if "moe" in name else 0.03
    assert max(error for _, error in errors) < limit
    for one, other in zip(*sides, strict=True):
        states = [
            (d.runner.caches.state[:, d.slot_of[r]], d.runner.caches.window[:, d.slot_of[r]])
            for d, r in ((cpu, one), (gpu, other))
        ]
        for a, b in zip(*states, strict=True):
            assert relative(b, a) < limit


def test_logits_are_the_float32_product_of_the_hidden_states() -> None:
    _, gpu = drivers("spark-tiny-dense")
    model, request = gpu.runner.model, gpu.add(list(range(10, 40)))
    weight = model.lm_head.weights[0].values.double()
    for rows in (1, 6, 33, 100):
        hidden = torch.randn(rows, weight.shape[1], device="cuda").to(torch.bfloat16)
        with torch.inference_mode():
            logits = model.logits(hidden)
        assert logits.dtype == torch.float32
        expected = hidden.double() @ weight.t()
        # Rounded to bfloat16 they would be off by 2e-3.
        assert float((logits - expected).norm() / expected.norm()) < 1e-5
    gpu.run([gpu.row(request)])
    kept, asked = gpu.runner.passes._logits[:1].clone(), gpu.logits([gpu.row(request)])
    for logits in (kept, asked):
        assert logits.dtype == torch.float32
        assert float((logits != logits.bfloat16().float()).float().mean()) > 0.9


@pytest.mark.parametrize("name", ["spark-tiny-dense", "spark-tiny-moe"])
def test_vllm_39064_vllm_ascend_12040_captured_passes_repeat_bit_for_bit_and_leave_others_alone(name: str) -> None:
    _, gpu = drivers(name)
    gpu.runner.warm_up()
    caches = gpu.runner.caches
    generator = torch.Generator().manual_seed(1)
    for count in range(1, 6):
        requests = [gpu.add(torch.randint(5, 2000, (40,), generator=generator).tolist()) for _ in range(count)]
        members = [gpu.slot_of[request] for request in requests]
        others = [slot for slot in range(6) if slot not in members]
        with torch.inference_mode():
            caches.state[:, others] = 123.0
            caches.window[:, others] = 123.0
            caches.kv[:, :, gpu.free_blocks] = 7.0
        gpu.run([gpu.row(request) for request in requests])
        saved = [pool[:, members].clone() for pool in (caches.state, caches.window)]
        outputs = []
        for _ in range(2):
            with torch.inference_mode():
                for pool, old in zip((caches.state, caches.window), saved, strict=True):
                    pool[:, members] = old
            outputs.append(gpu.runner.execute(StepPlan(0, [gpu.row(request) for request in requests])).tokens)
            states = [pool[:, members].clone() for pool in (caches.state, caches.window)]
            outputs[-1] = (outputs[-1], [state.double().sum().item() for state in states])
        assert outputs[0] == outputs[1]
        assert (caches.state[:, others] == 123.0).all()
        assert (caches.window[:, others] == 123.0).all()
        unused = [block for block in gpu.free_blocks if block < 300]
        assert (caches.kv[:, :, unused] == 7.0).all()
        for request in requests:
            gpu.release(request)


def test_prompt_log_probabilities_of_a_device_that_is_behind() -> None:
    """The host asks for them while the device is still busy with what came before."""
    _, gpu = drivers("spark-tiny-dense")
    found = []
    for cycles in (0, 2_000_000_000):
        request = gpu.add(list(range(10, 90)), prompt_logprobs=3)
        with gpu.runner.queue.on(gpu.runner.queue.main):
            torch.cuda._sleep(cycles)
        gpu.runner.submit(StepPlan(0, [gpu.row(request, 64)])).result()
        found.append(request.prompt_logprobs[1:65])
    assert None not in found[0]
    assert found[0] == found[1]


def test_steps_in_flight_give_the_tokens_of_steps_in_turn() -> None:
    _, gpu = drivers("spark-tiny-dense")
    plain = gpu.add(list(range(10, 40)))
    for _ in range(40):
        gpu.run([gpu.row(plain)])
    request = gpu.add(list(range(10, 40)))
    gpu.runner.launch(StepPlan(0, [gpu.row(request)]))
    tokens = []
    for index in range(1, 40):
        row = gpu.row(request, 1, start=29 + index, is_decode=True, samples=True, pending=True)
        row.output_index = index
        gpu.runner.launch(StepPlan(index, [row]))
        tokens += gpu.runner.collect().tokens
    tokens += gpu.runner.collect().tokens
    assert tokens == plain.output
