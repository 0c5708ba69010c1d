"""From settings to what the GPU runner is built with."""

from __future__ import annotations

from pathlib import Path

import torch

from sparkinfer.engine.ipc import EngineOptions
from sparkinfer.models.config import ModelConfig
from sparkinfer.models.qwen3_5_gpu import GpuModel, GpuOptions
from sparkinfer.runner.gpu_sizes import PassLimits
from sparkinfer.runner.memory import MemoryPlan
from sparkinfer.runner.open_runner import load_gpu_model
from sparkinfer.settings import Settings


def gpu_options(settings: Settings) -> GpuOptions:
    """Where speed may cost accuracy."""
    return GpuOptions(
        fp8_prefill=settings.prefill_dtype == "fp8",
        fp8_kv=settings.kv_cache_dtype == "fp8",
        bf16_state=settings.state_dtype == "bfloat16",
        fp8_head=settings.head_dtype == "fp8",
    )


def gpu_memory(settings: Settings, config: ModelConfig) -> MemoryPlan:
    """Bytes of a KV block, a slot and a snapshot on a GPU, where activations are bfloat16."""
    return MemoryPlan.for_model(
        config,
        dtype="bfloat16",
        num_slots=settings.max_num_seqs,
        kv_bytes=1 if settings.kv_cache_dtype == "fp8" else None,
        state_bytes=2 if settings.state_dtype == "bfloat16" else 4,
    )


def gpu_limits(settings: Settings, mixed_chunk: int) -> PassLimits:
    """The largest passes that the scheduler will make."""
    return PassLimits(
        max_num_seqs=settings.max_num_seqs,
        prefill_chunk=settings.prefill_chunk,
        mixed_chunk=mixed_chunk,
        mixed_max_prompts=settings.mixed_max_prompts,
        pack_max_prompts=settings.pack_max_prompts,
        deterministic=settings.deterministic,
    )


def load_on_gpu(
    options: EngineOptions, config: ModelConfig, device: str, limits: PassLimits, gpu: GpuOptions
) -> GpuModel:
    """Load the checkpoint. Raises SparkinferError."""
    return load_gpu_model(
        Path(options.model),
        config,
        device=torch.device(device),
        dtype=options.dtype,
        max_model_len=options.settings.max_model_len or config.max_positions,
        limits=limits,
        options=gpu,
        load_format=options.load_format,
        seed=options.seed,
    )
