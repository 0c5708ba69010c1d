"""The runner of a device: `ModelRunner` on a CPU, `GpuRunner` on a GPU."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import NotRequired, TypedDict, Unpack

import torch

from sparkinfer.errors import ConfigError
from sparkinfer.models.config import ModelConfig, load_config
from sparkinfer.models.loader import open_source
from sparkinfer.models.qwen3_5_gpu import GpuModel, GpuOptions
from sparkinfer.runner.gpu_check import check, read_facts
from sparkinfer.runner.gpu_memory import affords_copy, copied_bytes, expert_bytes, refuse_large_checkpoint
from sparkinfer.runner.gpu_runner import GpuRunner
from sparkinfer.runner.gpu_sizes import PassLimits
from sparkinfer.runner.memory import MIB, MemoryPlan
from sparkinfer.runner.model_runner import ModelRunner, device_of

log = logging.getLogger(__name__)

DEFAULT_CHUNK = 8192
DEFAULT_PROMPTS = 64


def load_gpu_model(
    folder: Path,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: str,
    max_model_len: int,
    limits: PassLimits,
    options: GpuOptions,
    load_format: str = "auto",
    seed: int = 0,
) -> GpuModel:
    """Check the GPU and load a checkpoint onto it.

    Raises:
        EnvironmentProblem: the GPU or its driver is too old.
        ConfigError: a dtype the kernels do not have, or a checkpoint larger than the card.
        CheckpointError: the folder is missing, incomplete or malformed.
    """
    from sparkinfer_kernels.gpu_ops import triton_ops

    facts = read_facts(device)
    check(facts)
    if (config.dtype if dtype == "auto" else dtype) != "bfloat16":
        raise ConfigError(
            f"dtype {dtype!r} (the checkpoint's is {config.dtype}): on a GPU activations are bfloat16; give "
            "--dtype bfloat16, or --device cpu"
        )
    stored = 0
    if load_format != "dummy":
        stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        if config.quantization is not None:
            stored += expert_bytes(config)
        refuse_large_checkpoint(str(folder), stored, facts.free_bytes, facts.total_bytes)
    if config.quantization is not None and not options.fp8_prefill and affords_copy(config, stored, facts.free_bytes):
        log.info("a bf16 copy of the weights, %d MiB, serves passes of many rows", copied_bytes(config) // MIB)
        options = replace(options, bf16_copy=True)
    started = time.monotonic()
    with torch.inference_mode():
        model = GpuModel(
            config,
            open_source(folder, config, load_format, seed, device),
            device=device,
            ops=triton_ops(),
            options=options,
            max_positions=max_model_len,
            max_rows=limits.max_rows,
        )
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    taken = facts.free_bytes - torch.cuda.mem_get_info(device)[0]
    log.info("%s: weights loaded in %.1f s, %d MiB on the device", facts.name, time.monotonic() - started, taken // MIB)
    return model


class PoolSizes(TypedDict):
    """What sizes a runner's pools; see `ModelRunner`."""

    max_num_seqs: int
    num_kv_blocks: int
    max_model_len: int
    num_snapshots: NotRequired[int]
    num_host_blocks: NotRequired[int]


def open_runner(
    model_dir: Path | str,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    load_format: str = "auto",
    seed: int = 0,
    backend: str | None = None,
    limits: PassLimits | None = None,
    options: GpuOptions | None = None,
    **sizes: Unpack[PoolSizes],
) -> ModelRunner | GpuRunner:
    """Load a model and allocate all pools; arguments and errors as in `ModelRunner`.

    `limits` (default: 8192 prompt tokens of 64 prompts, beside decode rows too) and `options` concern a GPU only;
    `backend` names the CPU's kernels. With `dtype` auto a GPU computes in bfloat16.
    """
    where = device_of(device)
    if where.type == "cpu":
        return ModelRunner(
            model_dir, device=device, dtype=dtype, load_format=load_format, seed=seed, backend=backend, **sizes
        )
    folder, requests, length = Path(model_dir), sizes["max_num_seqs"], sizes["max_model_len"]
    config, options = load_config(folder), options or GpuOptions()
    limits = limits or PassLimits(requests, DEFAULT_CHUNK, DEFAULT_CHUNK, DEFAULT_PROMPTS, DEFAULT_PROMPTS)
    model = load_gpu_model(
        folder,
        config,
        device=where,
        dtype=dtype,
        max_model_len=length,
        limits=limits,
        options=options,
        load_format=load_format,
        seed=seed,
    )
    memory = MemoryPlan.for_model(
        config,
        dtype="bfloat16",
        num_slots=requests,
        num_kv_blocks=sizes["num_kv_blocks"],
        num_snapshots=sizes.get("num_snapshots", 0),
        num_host_blocks=sizes.get("num_host_blocks", 0),
        kv_bytes=options.kv_dtype(model.dtype).itemsize,
        state_bytes=options.state_dtype.itemsize,
    )
    return GpuRunner(model, memory, limits, max_model_len=length)
