"""The account of a GPU's memory, and the refusals of GPUs that cannot run the engine, with fakes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sparkinfer_kernels.sampler.gpu import make_workspace

from sparkinfer.errors import ConfigError, EnvironmentProblem
from sparkinfer.models.config import load_config
from sparkinfer.runner import gpu_check
from sparkinfer.runner.gpu_check import GpuFacts, check
from sparkinfer.runner.gpu_memory import LOGIT_BYTES, gpu_budget, pass_bytes, refuse_large_checkpoint
from sparkinfer.runner.gpu_sizes import PassLimits
from sparkinfer.runner.memory import MIB, MemoryPlan

LIMITS = PassLimits(max_num_seqs=4, prefill_chunk=512, mixed_chunk=128, mixed_max_prompts=2, pack_max_prompts=4)
H200 = GpuFacts("NVIDIA H200", (9, 0), (13, 0), (13, 0), 140_000 * MIB, 143_000 * MIB)
GIB = 1024 * MIB


def test_what_is_left_for_kv_is_what_the_words_say(checkpoint) -> None:
    config = load_config(checkpoint("dense")[0])
    memory = MemoryPlan.for_model(config, dtype="bfloat16", num_slots=4)
    budget = gpu_budget(config, memory, LIMITS, num_snapshots=3, free=20 * GIB, total=32 * GIB)
    taken = 5 * memory.slot_bytes + 6 * memory.snapshot_bytes + pass_bytes(config, LIMITS)
    taken += len(LIMITS.shapes()) * 24 * MIB
    assert budget.kv_bytes == 20 * GIB - int(0.04 * 32 * GIB) - taken
    assert budget.require_kv() == budget.kv_bytes
    assert f"KV cache {budget.kv_bytes // MIB}" in budget.describe()
    assert "free beside the weights 20480 - reserve 1310" in budget.describe()


def test_no_room_for_kv_is_refused_with_the_sum(checkpoint) -> None:
    config = load_config(checkpoint("dense")[0])
    memory = MemoryPlan.for_model(config, dtype="bfloat16", num_slots=4)
    budget = gpu_budget(config, memory, LIMITS, num_snapshots=3, free=GIB, total=32 * GIB)
    with pytest.raises(ConfigError, match=r"no device memory is left .*free beside the weights 1024.*lower SPARKINFER"):
        budget.require_kv()


def test_logits_and_the_sampler_fit_into_what_is_counted_for_them() -> None:
    vocab = 248_320
    for rows in (1, 4, 16, 32):
        workspace = make_workspace(rows, vocab, torch.device("cpu"))
        tensors = [value for value in map(workspace.__getattribute__, workspace.__slots__) if torch.is_tensor(value)]
        fp32_logits, bf16_product = 4 * rows * vocab, 2 * rows * vocab
        used = fp32_logits + bf16_product + sum(tensor.nbytes for tensor in tensors)
        assert used <= LOGIT_BYTES * rows * vocab


def test_larger_passes_take_more(checkpoint) -> None:
    for name in ("dense", "moe"):
        config = load_config(checkpoint(name)[0])
        assert pass_bytes(config, replace(LIMITS, prefill_chunk=4096)) > 4 * pass_bytes(config, LIMITS)


def test_a_checkpoint_larger_than_the_card_is_refused_with_the_numbers() -> None:
    refuse_large_checkpoint("m", 30 * GIB, 32 * GIB, 32 * GIB)
    with pytest.raises(ConfigError, match=r"m does not fit: its weights take 31744 MiB .* 32768 MiB free of 32768 MiB"):
        refuse_large_checkpoint("m", 31 * GIB, 32 * GIB, 32 * GIB)


def test_gpus_that_can_run_it() -> None:
    check(H200)
    check(replace(H200, capability=(8, 9)))
    check(replace(H200, capability=(12, 0), driver_cuda=(13, 2)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "A100", "capability": (8, 0)}, r"A100 has compute capability 8\.0; .* at least 8\.9"),
        ({"driver_cuda": (12, 8)}, r"driver is too old: it runs CUDA 12\.8, torch .* needs CUDA 13\.0"),
    ],
)
def test_gpus_that_cannot_say_so_in_one_line(change, words) -> None:
    with pytest.raises(EnvironmentProblem, match=words) as caught:
        check(replace(H200, **change))
    assert "\n" not in str(caught.value)
    assert "--device cpu" in str(caught.value)


def test_the_driver_is_judged_before_torch_fails_on_it(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu_check, "driver_version", lambda: 12040)
    with pytest.raises(EnvironmentProblem, match=r"CUDA 12\.4"):
        gpu_check.read_facts(torch.device("cuda"))


def test_a_cpu_build_of_torch_is_named(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(EnvironmentProblem, match="is a CPU build"):
        gpu_check.read_facts(torch.device("cuda"))
