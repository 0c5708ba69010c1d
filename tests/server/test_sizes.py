"""How settings become counts, and the arithmetic shown when they cannot."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sparkinfer.engine.build import (
    Sizes,
    backlog_chunk,
    build_engine,
    pick_device,
    plan_sizes,
    require_host_memory,
    scheduler_config,
)
from sparkinfer.engine.build_gpu import gpu_limits
from sparkinfer.engine.ipc import EngineOptions
from sparkinfer.errors import ConfigError, EnvironmentProblem
from sparkinfer.models.config import ModelConfig, load_config
from sparkinfer.runner.memory import MIB, MemoryPlan
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.settings import Settings


@pytest.fixture(scope="module")
def config(model_dir: Path) -> ModelConfig:
    return load_config(model_dir)


def memory(num_slots: int = 4) -> MemoryPlan:
    """A model of 1 MiB a block and 2 MiB a snapshot."""
    return MemoryPlan(MIB, 2 * MIB, 2 * MIB, 0, num_slots, 0, 0)


def test_given_sizes_are_taken(config: ModelConfig, model_dir: Path) -> None:
    settings = Settings(
        max_num_seqs=4, kv_cache_mb=64, snapshot_pool_mb=7, max_model_len=500, prefix_cache_host_kv_mb=5
    )
    sizes = plan_sizes(settings, config, memory(), model_dir, "cpu")
    assert (sizes.num_kv_blocks, sizes.max_model_len, sizes.num_snapshots, sizes.num_host_blocks) == (64, 500, 3, 5)


def test_context_shrinks_to_a_given_pool(config: ModelConfig, model_dir: Path) -> None:
    sizes = plan_sizes(Settings(kv_cache_mb=10), config, memory(), model_dir, "cpu")
    assert sizes.max_model_len == 160


def test_automatic_pools_stop_at_what_can_be_used(config: ModelConfig, model_dir: Path) -> None:
    small = MemoryPlan(1, 1, 1, 0, 4, 0, 0)
    sizes = plan_sizes(Settings(max_num_seqs=4), config, small, model_dir, "cpu")
    assert sizes.max_model_len == config.max_positions
    assert sizes.num_kv_blocks == 2 * 4 * config.max_positions // 16
    assert sizes.num_snapshots == 64
    off = plan_sizes(Settings(max_num_seqs=4, prefix_cache=False), config, small, model_dir, "cpu")
    assert (off.num_kv_blocks, off.num_snapshots) == (4 * config.max_positions // 16, 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(kv_cache_mb=10, max_model_len=161), r"ceil\(161/16\) = 11 KV blocks .* 10 blocks.* at most 160"),
        (Settings(max_model_len=4096), "2048"),
        (Settings(kv_cache_mb=64, snapshot_pool_mb=1), r"SNAPSHOT_POOL_MB=1 is smaller than one .* 2\.0 MiB"),
    ],
)
def test_contradictions_show_the_sum(config: ModelConfig, model_dir: Path, settings: Settings, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_sizes(settings, config, memory(), model_dir, "cpu")


def test_pools_beyond_the_host_show_the_sum() -> None:
    plan = MemoryPlan(MIB, 2 * MIB, 2 * MIB, 10, 4, 3, 5)
    for on_cpu, needed in ((True, 29), (False, 11)):
        require_host_memory(plan, on_cpu, needed * MIB)
        with pytest.raises(EnvironmentProblem, match=f"would take {needed} MiB of host memory, and {needed - 1} MiB"):
            require_host_memory(plan, on_cpu, (needed - 1) * MIB)


def test_the_output_matrix_in_float32_is_part_of_the_sum_on_a_cpu() -> None:
    plan = MemoryPlan(MIB, 2 * MIB, 2 * MIB, 10, 4, 3, 5)
    require_host_memory(plan, True, 36 * MIB, 7 * MIB)
    with pytest.raises(EnvironmentProblem, match=r"would take 36 MiB .* output matrix in float32 7.0 MiB"):
        require_host_memory(plan, True, 35 * MIB, 7 * MIB)
    require_host_memory(plan, False, 11 * MIB, 7 * MIB)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (Settings(kv_cache_mb=10**8), EnvironmentProblem, "lower SPARKINFER_KV_CACHE_MB"),
        (Settings(max_num_seqs=10**8), EnvironmentProblem, "SPARKINFER_MAX_NUM_SEQS"),
        (Settings(snapshot_pool_mb=10**8), EnvironmentProblem, "SPARKINFER_SNAPSHOT_POOL_MB"),
        (Settings(kv_cache_dtype="fp8"), ConfigError, "for a GPU"),
        (Settings(state_dtype="bfloat16"), ConfigError, "for a GPU"),
    ],
)
def test_a_cpu_refuses_what_it_cannot_do(
    model_dir: Path, settings: Settings, error: type[Exception], words: str
) -> None:
    options = EngineOptions(
        model=str(model_dir), settings=settings, dtype="float32", device="cpu", seed=0, load_format="auto"
    )
    with pytest.raises(error, match=words):
        build_engine(options)


def test_scheduler_gets_every_policy(config: ModelConfig, model_dir: Path) -> None:
    settings = Settings(
        mixed_chunk=128, backlog_chunk=256, mixed_max_prompts=3, own_pass_tokens=99, prefill_chunk=640,
        pack_prefill=False, pack_moe=False, aging_steps=5, checkpoint_interval=32, decode_checkpoint_interval=48,
        kv_cache_mb=64, max_num_seqs=3, pack_max_prompts=5, prefill_passes_per_decode=2, watermark=0.25,
        spec_load_limit=6, draft_tokens=4, branch_min_tokens=80, attention_cost_tokens=999,
    )  # fmt: skip
    plan = scheduler_config(
        settings, config, memory(3), plan_sizes(settings, config, memory(3), model_dir, "cpu"), "cpu"
    )
    for name in (
        "mixed_chunk", "backlog_chunk", "mixed_max_prompts", "own_pass_tokens", "prefill_chunk", "pack_prefill",
        "pack_moe", "aging_steps", "checkpoint_interval", "decode_checkpoint_interval", "max_num_seqs",
        "pack_max_prompts",
        "prefill_passes_per_decode", "watermark", "spec_load_limit", "draft_tokens", "branch_min_tokens",
        "attention_cost_tokens",
    ):  # fmt: skip
        assert getattr(plan, name) == getattr(settings, name)
    assert (plan.kv_block_bytes, plan.snapshot_bytes, plan.num_kv_blocks) == (MIB, 2 * MIB, 64)
    plan.validate()


@pytest.mark.parametrize(
    ("settings", "device", "budget"),
    [
        (Settings(), "cpu", 4096),
        (Settings(), "cuda:0", 0),
        (Settings(backlog_chunk=2048), "cuda:0", 2048),
        (Settings(backlog_chunk=0), "cpu", 0),
        (Settings(mixed_chunk=0), "cpu", 0),
        (Settings(mixed_chunk=4096), "cpu", 0),
        (Settings(prefill_chunk=3072), "cpu", 3072),
        (Settings(prefill_chunk=2048), "cpu", 0),
        (Settings(deterministic=True, backlog_chunk=2048), "cuda:0", 0),
    ],
)
def test_budget_of_a_backlog(config: ModelConfig, settings: Settings, device: str, budget: int) -> None:
    assert backlog_chunk(settings, config, device) == budget
    assert backlog_chunk(Settings(), dataclasses.replace(config, num_experts=4), "cpu") == 0, "a MoE mixes 4096 anyway"


def test_every_policy_of_the_scheduler_has_a_setting() -> None:
    """What is left is counted from memory, comes with the model, or belongs to the kernels."""
    names = {field.name for field in dataclasses.fields(SchedulerConfig)}
    derived = {
        "num_kv_blocks", "num_snapshots", "num_host_blocks", "kv_block_bytes", "snapshot_bytes", "is_moe",
        "drafter_loaded", "chunk_align", "max_in_flight", "idle_check_interval_s",
    }  # fmt: skip
    assert names - derived == names & {field.name for field in dataclasses.fields(Settings)}


def test_passes_of_a_gpu_have_room_for_what_is_set() -> None:
    limits = gpu_limits(Settings(pack_max_prompts=7, mixed_max_prompts=9, max_num_seqs=12), 1024)
    assert limits.shape_for(0, 100, 7).sequences == 7
    assert limits.shape_for(1, 100, 9).sequences == 9
    with pytest.raises(ValueError, match="7 prompts"):
        limits.shape_for(0, 100, 8)


def test_devices() -> None:
    assert pick_device("cpu") == "cpu"
    for name in ("tpu", "cpu:7"):
        with pytest.raises(ConfigError, match=name):
            pick_device(name)
    import torch

    if not torch.cuda.is_available():
        assert pick_device("auto") == "cpu"
        with pytest.raises(EnvironmentProblem, match="no CUDA device"):
            pick_device("cuda:1")


@pytest.mark.parametrize(
    ("device", "asked", "steps"), [("cpu", None, 1), ("cuda:0", None, 2), ("cpu", 2, 2), ("cuda", 1, 1)]
)
def test_steps_in_flight_follow_the_device(config: ModelConfig, device: str, asked: int | None, steps: int) -> None:
    sizes = Sizes(num_kv_blocks=64, max_model_len=100, num_snapshots=4, num_host_blocks=0)
    assert scheduler_config(Settings(steps_in_flight=asked), config, memory(), sizes, device).max_in_flight == steps


def test_more_than_two_steps_in_flight_are_refused(config: ModelConfig) -> None:
    sizes = Sizes(num_kv_blocks=64, max_model_len=100, num_snapshots=4, num_host_blocks=0)
    with pytest.raises(ConfigError, match="max_in_flight is 3: it must be 1 or 2"):
        scheduler_config(Settings(steps_in_flight=3), config, memory(), sizes, "cpu").validate()
