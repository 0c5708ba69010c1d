"""From settings to a running engine: sizes of all pools, the model runner, the core."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from sparkinfer.engine.build_gpu import gpu_limits, gpu_memory, gpu_options, load_on_gpu
from sparkinfer.engine.core import EngineCore, OverlapRunner
from sparkinfer.engine.ipc import EngineOptions
from sparkinfer.engine.process import Engine
from sparkinfer.engine.step_trace import StepTrace, traced
from sparkinfer.errors import ConfigError, EnvironmentProblem
from sparkinfer.models.config import ModelConfig, load_config
from sparkinfer.models.output_matrix import float32_bytes
from sparkinfer.models.qwen3_5_gpu import GpuOptions
from sparkinfer.runner.gpu_memory import gpu_budget
from sparkinfer.runner.gpu_runner import GpuRunner
from sparkinfer.runner.memory import MIB, MemoryPlan
from sparkinfer.runner.model_runner import ModelRunner
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, Request, SamplingParams
from sparkinfer.settings import Settings
from sparkinfer.settings_check import default_threads

log = logging.getLogger("sparkinfer.engine")

MIXED_CHUNK_DENSE = 1024
MIXED_CHUNK_MOE = 4096
BACKLOG_CHUNK = 4096
"""On a CPU: reports/scheduling/mixing.md shows other budgets."""
SNAPSHOT_POOL_MB = 4096
SNAPSHOTS_PER_REQUEST = 16
"""The automatic pool of a small model stops at this many snapshots for each request that can run."""
HOST_SHARE = 4
"""Automatic pools take at most one part in this many of the host's free memory."""
WARM_UP_TOKENS = 1024
WARM_UP_REQUESTS = 4
IN_FLIGHT = {"cpu": 1, "cuda": 2}
"""Steps under way by device type: on a GPU the next step is launched while the one before runs."""


@dataclass(frozen=True)
class Sizes:
    """Counts that the memory allows. Lengths in tokens."""

    num_kv_blocks: int
    max_model_len: int
    num_snapshots: int
    num_host_blocks: int


def pick_device(name: str) -> str:
    """`auto` is the first GPU, else the CPU. Raises ConfigError or EnvironmentProblem."""
    if name == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and name.split(":")[0] != "cuda":
        raise ConfigError(f"--device {name!r} is not known: give auto, cpu, cuda or cuda:<number>")
    if name != "cpu" and not torch.cuda.is_available():
        raise EnvironmentProblem(f"--device {name}: torch {torch.__version__} finds no CUDA device here; use cpu")
    return name


def plan_sizes(
    settings: Settings, config: ModelConfig, memory: MemoryPlan, folder: Path, device: str, kv_bytes: int | None = None
) -> Sizes:
    """Decide all counts; `kv_bytes` is what a GPU has left for KV blocks.

    Raises ConfigError, with the arithmetic, for settings that cannot hold together.
    """
    budget = kv_bytes if kv_bytes is not None else psutil.virtual_memory().available // HOST_SHARE
    if settings.kv_cache_mb is not None:
        budget = settings.kv_cache_mb * MIB
    budget_blocks = memory.kv_blocks_in(budget)
    asked = settings.max_model_len
    if asked is not None and asked > config.max_positions:
        raise ConfigError(
            f"SPARKINFER_MAX_MODEL_LEN={asked} is beyond the model's max_position_embeddings, {config.max_positions}"
        )
    length = asked or min(config.max_positions, budget_blocks * KV_BLOCK_TOKENS)
    per_request = -(-length // KV_BLOCK_TOKENS)
    if per_request > budget_blocks:
        raise ConfigError(
            f"SPARKINFER_MAX_MODEL_LEN={length} needs ceil({length}/{KV_BLOCK_TOKENS}) = {per_request} KV blocks of "
            f"{memory.kv_block_bytes} bytes = {per_request * memory.kv_block_bytes / MIB:.1f} MiB, but the KV cache "
            f"has {budget_blocks} blocks: raise SPARKINFER_KV_CACHE_MB or lower SPARKINFER_MAX_MODEL_LEN to at most "
            f"{budget_blocks * KV_BLOCK_TOKENS}"
        )
    blocks = budget_blocks
    if settings.kv_cache_mb is None:
        # All requests at full length is as much as can ever be used, the prefix cache aside: it gets as much again.
        blocks = min(budget_blocks, per_request * settings.max_num_seqs * (2 if settings.prefix_cache else 1))
    return Sizes(blocks, length, _snapshots(settings, memory), _host_blocks(settings, memory))


def _snapshots(settings: Settings, memory: MemoryPlan) -> int:
    if not settings.prefix_cache:
        return 0
    pool_mb = settings.snapshot_pool_mb
    if pool_mb is None:
        pool_mb = min(SNAPSHOT_POOL_MB, psutil.virtual_memory().available // MIB // HOST_SHARE)
    count = memory.snapshots_in(pool_mb * MIB)
    if settings.snapshot_pool_mb is None:
        count = min(count, SNAPSHOTS_PER_REQUEST * settings.max_num_seqs)
    if count < 1:
        raise ConfigError(
            f"SPARKINFER_SNAPSHOT_POOL_MB={pool_mb} is smaller than one recurrent-state snapshot of this model, "
            f"{memory.snapshot_bytes} bytes = {memory.snapshot_bytes / MIB:.1f} MiB: raise it, or turn the prefix "
            "cache off with SPARKINFER_PREFIX_CACHE=0"
        )
    return count


def _host_blocks(settings: Settings, memory: MemoryPlan) -> int:
    size_mb = settings.prefix_cache_host_kv_mb
    if not size_mb:
        return 0
    count = size_mb * MIB // memory.kv_block_bytes
    if count < 1:
        raise ConfigError(
            f"SPARKINFER_PREFIX_CACHE_HOST_KV_MB={size_mb} is smaller than one KV block, {memory.kv_block_bytes} bytes"
        )
    return count


def require_host_memory(memory: MemoryPlan, on_cpu: bool, free_bytes: int, output_bytes: int = 0) -> None:
    """Refuse pools that the host cannot hold, before any is allocated; `on_cpu`: the device's pools lie there too,
    and beside them `output_bytes` of the output matrix in float32.

    Raises EnvironmentProblem with the arithmetic.
    """
    needed = memory.host_bytes + (memory.device_bytes + output_bytes if on_cpu else 0)
    if needed > free_bytes:
        output = f"; output matrix in float32 {output_bytes / MIB:.1f} MiB" if on_cpu and output_bytes else ""
        names = "SPARKINFER_SNAPSHOT_POOL_MB or SPARKINFER_PREFIX_CACHE_HOST_KV_MB"
        if on_cpu:
            names = f"SPARKINFER_KV_CACHE_MB, SPARKINFER_MAX_NUM_SEQS, {names}"
        raise EnvironmentProblem(
            f"the pools would take {needed / MIB:.0f} MiB of host memory, and {free_bytes / MIB:.0f} MiB are free "
            f"({memory.describe()}{output}): lower {names}"
        )


def mixed_chunk(settings: Settings, config: ModelConfig) -> int:
    """Prompt tokens of a mixed step."""
    if settings.deterministic:
        return 0
    if settings.mixed_chunk is not None:
        return settings.mixed_chunk
    return min(MIXED_CHUNK_MOE if config.num_experts else MIXED_CHUNK_DENSE, settings.prefill_chunk)


def backlog_chunk(settings: Settings, config: ModelConfig, device: str) -> int:
    """Prompt tokens of a mixed step while prompts pile up; 0: no more than otherwise.

    Raises ConfigError for fewer than a mixed step has anyway.
    """
    if settings.deterministic:
        return 0
    asked, usual = settings.backlog_chunk, mixed_chunk(settings, config)
    if asked is not None:
        if 0 < asked <= usual:
            raise ConfigError(
                f"SPARKINFER_BACKLOG_CHUNK={asked} is not above {usual}, which a mixed step of this model may carry "
                f"anyway (SPARKINFER_MIXED_CHUNK): use 0 (off) or more than {usual}"
            )
        return asked
    most = min(BACKLOG_CHUNK, settings.prefill_chunk)
    return most if torch.device(device).type == "cpu" and 0 < 2 * usual < most else 0


def scheduler_config(
    settings: Settings, config: ModelConfig, memory: MemoryPlan, sizes: Sizes, device: str
) -> SchedulerConfig:
    """The scheduler's settings for this model."""
    is_moe = config.num_experts > 0
    return SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        num_kv_blocks=sizes.num_kv_blocks,
        max_model_len=sizes.max_model_len,
        prefill_chunk=settings.prefill_chunk,
        mixed_chunk=mixed_chunk(settings, config),
        mixed_max_prompts=settings.mixed_max_prompts,
        backlog_chunk=backlog_chunk(settings, config, device),
        own_pass_tokens=settings.own_pass_tokens,
        pack_prefill=settings.pack_prefill and not settings.deterministic,
        pack_moe=settings.pack_moe,
        pack_max_prompts=settings.pack_max_prompts,
        prefill_passes_per_decode=settings.prefill_passes_per_decode,
        watermark=settings.watermark,
        spec_load_limit=settings.spec_load_limit,
        draft_tokens=settings.draft_tokens,
        is_moe=is_moe,
        aging_steps=settings.aging_steps,
        num_snapshots=sizes.num_snapshots,
        num_host_blocks=sizes.num_host_blocks,
        kv_block_bytes=memory.kv_block_bytes,
        snapshot_bytes=memory.snapshot_bytes,
        checkpoint_interval=settings.checkpoint_interval,
        decode_checkpoint_interval=settings.decode_checkpoint_interval,
        branch_min_tokens=settings.branch_min_tokens,
        attention_cost_tokens=settings.attention_cost_tokens,
        max_in_flight=settings.steps_in_flight or IN_FLIGHT[torch.device(device).type],
    )


def warm_up(runner: OverlapRunner, schedule: SchedulerConfig, vocab_size: int) -> None:
    """Run every kind of step once, so that no request pays for the libraries' first-use work.

    A core of its own does it: neither the caches nor the counters of the one that serves see these requests.
    """
    core = EngineCore(runner, schedule)
    length = min(WARM_UP_TOKENS, schedule.max_model_len - 2)
    count = min(WARM_UP_REQUESTS, schedule.max_num_seqs)
    for number in range(count):
        sampling = SamplingParams(
            max_tokens=2, temperature=float(number % 2), top_k=20, top_p=0.9, logprobs=1 if number < 2 else None
        )
        prompt = [(number + index) % vocab_size for index in range(max(1, length >> (2 * number)))]
        core.add(Request(f"warm-up-{number}", prompt, sampling, use_cache=False))
    while core.has_work:
        core.step()


def build_engine(options: EngineOptions) -> Engine:
    """Load the model and size everything. Raises SparkinferError."""
    settings, folder = options.settings, Path(options.model)
    device = pick_device(options.device)
    threads = settings.threads or default_threads()
    torch.set_num_threads(threads)
    config = load_config(folder)
    build = _build_on_cpu if torch.device(device).type == "cpu" else _build_on_gpu
    runner, schedule = build(options, config, device)
    warm_up(runner, schedule, config.vocab_size)
    driven: OverlapRunner = runner
    if settings.step_trace is not None:
        about = {"device": str(runner.device), "dtype": runner.dtype_name, "threads": threads}
        driven = traced(runner, StepTrace(Path(settings.step_trace), schedule, about), schedule)  # type: ignore[assignment]
    info = _info(config, runner, schedule, threads)
    return Engine(EngineCore(driven, schedule), frozenset(config.eos_token_ids), info)


def _build_on_cpu(options: EngineOptions, config: ModelConfig, device: str) -> tuple[ModelRunner, SchedulerConfig]:
    settings, folder = options.settings, Path(options.model)
    if gpu_options(settings) != GpuOptions():
        raise ConfigError(
            "SPARKINFER_PREFILL_DTYPE=fp8, SPARKINFER_KV_CACHE_DTYPE=fp8, SPARKINFER_HEAD_DTYPE=fp8 and "
            "SPARKINFER_STATE_DTYPE=bfloat16 are for a GPU: leave them out with --device cpu"
        )
    memory = MemoryPlan.for_model(config, dtype=options.dtype, num_slots=settings.max_num_seqs)
    sizes = plan_sizes(settings, config, memory, folder, device)
    output_bytes = float32_bytes(config.vocab_size, config.hidden_size)
    require_host_memory(_with_counts(memory, sizes), True, psutil.virtual_memory().available, output_bytes)
    schedule = scheduler_config(settings, config, memory, sizes, device)
    schedule.validate()
    runner = ModelRunner(
        folder,
        device=device,
        dtype=options.dtype,
        max_num_seqs=settings.max_num_seqs,
        num_kv_blocks=sizes.num_kv_blocks,
        max_model_len=sizes.max_model_len,
        num_snapshots=sizes.num_snapshots,
        num_host_blocks=sizes.num_host_blocks,
        load_format=options.load_format,
        seed=options.seed,
    )
    return runner, schedule


def _build_on_gpu(options: EngineOptions, config: ModelConfig, device: str) -> tuple[GpuRunner, SchedulerConfig]:
    settings, folder = options.settings, Path(options.model)
    memory = gpu_memory(settings, config)
    mixed = max(mixed_chunk(settings, config), backlog_chunk(settings, config, device))
    limits = gpu_limits(settings, mixed)
    model = load_on_gpu(options, config, device, limits, gpu_options(settings))
    budget = gpu_budget(config, memory, limits, _snapshots(settings, memory), *torch.cuda.mem_get_info(model.device))
    log.info("device memory, %s", budget.describe())
    sizes = plan_sizes(settings, config, memory, folder, device, budget.require_kv())
    schedule = scheduler_config(settings, config, memory, sizes, device)
    schedule.validate()
    memory = _with_counts(memory, sizes)
    require_host_memory(memory, False, psutil.virtual_memory().available)
    runner = GpuRunner(model, memory, limits, max_model_len=sizes.max_model_len)
    runner.warm_up(torch.get_num_threads())
    return runner, schedule


def _with_counts(memory: MemoryPlan, sizes: Sizes) -> MemoryPlan:
    """The plan with the counts that were decided."""
    return replace(
        memory,
        num_kv_blocks=sizes.num_kv_blocks,
        num_snapshots=sizes.num_snapshots,
        num_host_blocks=sizes.num_host_blocks,
    )


def _info(
    config: ModelConfig, runner: ModelRunner | GpuRunner, schedule: SchedulerConfig, threads: int
) -> dict[str, Any]:
    """What /v1/info says about the engine."""
    memory = runner.memory
    return {
        "architecture": config.architecture,
        "device": str(runner.device),
        "dtype": runner.dtype_name,
        "threads": threads,
        "torch": str(torch.__version__),
        "mixed_chunk": schedule.mixed_chunk,
        "backlog_chunk": schedule.backlog_chunk,
        "limits": {
            "max_model_len": schedule.max_model_len,
            "max_num_seqs": schedule.max_num_seqs,
            "vocab_size": config.vocab_size,
            "kv_tokens": memory.num_kv_blocks * KV_BLOCK_TOKENS,
            "snapshots": memory.num_snapshots,
        },
        "memory": {
            "kv_block_bytes": memory.kv_block_bytes,
            "kv_bytes": memory.num_kv_blocks * memory.kv_block_bytes,
            "slot_bytes": memory.slot_bytes,
            "slots_bytes": memory.num_slots * memory.slot_bytes,
            "snapshot_pool_bytes": memory.num_snapshots * memory.snapshot_bytes,
            "host_kv_bytes": memory.num_host_blocks * memory.kv_block_bytes,
            "plan": memory.describe(),
        },
    }
