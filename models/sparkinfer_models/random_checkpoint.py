"""Random checkpoints of real shape, seeded and written fast: what two engines can both load to be measured.

Every piece of every tensor has its own generator, so the bytes depend on seed and shape alone, not on the machine or
the number of threads. Weights have a standard deviation of 0.02 once dequantised; scales are those of a sound
quantizer; norms, decays and convolutions have values that keep activations and states in the usual range.

With `flat` scales that is all, and each of many layers turns what came before into something else: a rounding error
grows to the size of the signal. `depth` scales are those that networks are trained from (Radford et al. 2019): what
adds to the residual stream is divided by sqrt(2 * layers), embeddings have deviation 1. Rounding then stays small, so
that checks see faults beside it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from sparkinfer.models.config import parse_config
from sparkinfer.models.safetensors_file import (
    INDEX,
    SIZES,
    FileWriter,
    NewTensor,
    index_text,
    shard_names,
    split_shards,
)
from sparkinfer.models.tensors import Role, TensorSpec, language_tensors
from sparkinfer.quantization.choices import Choices
from sparkinfer.quantization.schemes import Format
from sparkinfer.quantization.stored import stored_tensors
from sparkinfer_models.real_shapes import word_tokenizer

STD = 0.02
PIECE = 1 << 23
"""Bytes that one task makes and writes."""
SHARD_BYTES = 4 << 30
NVFP4_RMS = math.sqrt(68.5 / 8)
"""Root mean square of the e2m1 values, all codes being equally likely."""
SCALE_CODES = 0x34
"""The first of eight e4m3 codes, 0.75 to 1.375, from which block scales are drawn."""


@dataclass(frozen=True, slots=True)
class Job:
    """A tensor to fill: how, and with what constant or deviation."""

    tensor: NewTensor
    kind: str
    """`bytes`, `scales`, `fp8`, `normal`, `constant` or `decay`."""
    value: float = 0.0


SCALES = ("flat", "depth")
ADDING = ("o_proj", "out_proj", "down_proj")
"""Projections whose outputs are added to the residual stream."""


def deviation(spec: TensorSpec, layers: int | None) -> float:
    """Of a matrix; `layers` of a model with `depth` scales, None for `flat` ones."""
    if layers is not None and spec.role is Role.EMBEDDING:
        return 1.0
    if layers is not None and spec.module.rpartition(".")[2] in ADDING:
        return STD / math.sqrt(2 * layers)
    return STD


def jobs(specs: Iterable[TensorSpec], choices: Choices | None, layers: int | None = None) -> Iterator[Job]:
    """All tensors of the checkpoint, in the order of the model; `layers` as in `deviation`."""
    for spec in specs:
        size = deviation(spec, layers)
        choice = choices.formats.get(spec.module) if choices else None
        kinds: tuple[tuple[str, float], ...]
        if choice is Format.NVFP4:
            kinds = (("bytes", 0.0), ("scales", 0.0), ("constant", _nvfp4_global(size)), ("constant", 10.0 / 2688))
        elif choice is Format.FP8:
            kinds = (("fp8", 0.0), ("constant", size / _fp8_rms()))
        else:
            yield _plain(spec, size)
            continue
        for tensor, (kind, value) in zip(stored_tensors(spec.module, spec.shape, choice), kinds, strict=True):
            yield Job(tensor, kind, value)


def _plain(spec: TensorSpec, size: float) -> Job:
    if spec.role is Role.DECAY:
        return Job(NewTensor(spec.name, "F32", spec.shape), "decay")
    tensor = NewTensor(spec.name, "BF16", spec.shape)
    if spec.role in (Role.NORM, Role.PLAIN_NORM, Role.DT_BIAS):
        return Job(tensor, "constant", 0.0 if spec.role is Role.NORM else 1.0)
    return Job(tensor, "normal", 0.5 if spec.role is Role.CONVOLUTION else size)


def _nvfp4_global(size: float) -> float:
    scales = [(1 + code / 8) * 2.0 ** (exponent - 7) for exponent, code in _scale_codes()]
    return size / (NVFP4_RMS * math.sqrt(sum(scale**2 for scale in scales) / len(scales)))


def _scale_codes() -> list[tuple[int, int]]:
    return [divmod(code, 8) for code in range(SCALE_CODES, SCALE_CODES + 8)]


def _fp8_rms() -> float:
    """Root mean square of e4m3 numbers whose codes are uniform but for the top bit of the exponent, which is 0."""
    total = 0.0
    for exponent in range(8):
        for mantissa in range(8):
            value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
            total += value**2
    return math.sqrt(total / 64)


def _generator(seed: int, name: str, piece: int) -> np.random.SFC64:
    digest = hashlib.blake2b(f"{seed}:{name}:{piece}".encode(), digest_size=16).digest()
    return np.random.SFC64(int.from_bytes(digest, "little"))


@cache
def _normal_quantiles(deviation: float) -> np.ndarray:
    """The 65536 quantiles of a normal distribution, in BF16 as uint16: a draw by inversion at the speed of memory."""
    normal = NormalDist(0.0, deviation)
    values = np.array([normal.inv_cdf((number + 0.5) / 65536) for number in range(65536)], np.float32)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def draw(job: Job, seed: int, piece: int, count: int) -> np.ndarray:
    """Bytes (uint8) of `count` elements of a tensor's piece."""
    source = _generator(seed, job.tensor.name, piece)
    if job.kind == "constant":
        return _as_bytes(np.full(count, job.value, np.float32), job.tensor.dtype)
    if job.kind == "decay":
        values = np.log(np.random.Generator(source).uniform(1.0, 16.0, count))
        return _as_bytes(values.astype(np.float32), job.tensor.dtype)
    if job.kind == "normal":
        uniform = source.random_raw(-(-count // 4)).view(np.uint16)[:count]
        return np.take(_normal_quantiles(job.value), uniform).view(np.uint8)
    raw = source.random_raw(-(-count // 8)).view(np.uint8)[:count]
    if job.kind == "scales":
        raw &= 7
        raw += SCALE_CODES
    elif job.kind == "fp8":
        raw &= 0xBF
    return raw


def _as_bytes(values: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 values as they are, or as BF16 by dropping the low half."""
    if dtype == "BF16":
        return np.ascontiguousarray(values.view(np.uint16)[1::2]).view(np.uint8)
    return values.view(np.uint8)


def _pieces(job: Job) -> Iterator[tuple[int, int, int]]:
    """(number, byte offset, elements) of each piece of a tensor."""
    size = SIZES.get(job.tensor.dtype, 1)
    step = PIECE // size
    total = math.prod(job.tensor.shape)
    for number, first in enumerate(range(0, total, step)):
        yield number, first * size, min(step, total - first)


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    default: Format | None,
    seed: int,
    threads: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    scales: str = SCALES[0],
) -> int:
    """Write config, tokenizer and weights; the index, or the single file, comes last.

    Args:
        folder: made if absent.
        config: content of `config.json` without a `quantization_config`.
        default: format of the linear layers that published checkpoints quantise; None for BF16.
        seed: of all weights.
        threads: writers; None for one a CPU.
        shard_bytes: of a file at most.
        scales: one of `SCALES`.

    Returns:
        Bytes of weights.

    Raises:
        ConfigError: the shape does not go with the format.
    """
    shape = parse_config(config)
    choices = None if default is None else Choices(shape, default)
    work = list(jobs(language_tensors(shape), choices, shape.num_layers if scales == "depth" else None))
    folder.mkdir(parents=True, exist_ok=True)
    quantised = {} if choices is None else {"quantization_config": choices.quantization_config()}
    # The last key is the one by which a report knows that the weights are random (sparkinfer_eval/plan/identity.py).
    content = {**config, **quantised, "random_weights": True}
    (folder / "config.json").write_text(json.dumps(content, indent=1) + "\n")
    word_tokenizer(folder, shape.vocab_size, config["eos_token_id"], config["pad_token_id"])
    shards = split_shards([job.tensor for job in work], shard_bytes)
    names = shard_names(len(shards))
    writers = [FileWriter(folder / name, shard) for name, shard in zip(names, shards, strict=True)]
    by_name = {tensor.name: writer for writer, shard in zip(writers, shards, strict=True) for tensor in shard}

    def fill(job: Job, number: int, offset: int, count: int) -> None:
        by_name[job.tensor.name].write(job.tensor.name, draw(job, seed, number, count).data, offset)

    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        tasks = [pool.submit(fill, job, *piece) for job in work for piece in _pieces(job)]
        for task in tasks:
            task.result()
    for writer in writers:
        writer.finish(sync=False)
    if len(shards) > 1:
        (folder / INDEX).write_text(index_text(shards))
    return sum(job.tensor.nbytes for job in work)
