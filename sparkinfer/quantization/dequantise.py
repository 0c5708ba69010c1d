"""The 16-bit form of a quantised checkpoint: the weights that its formats stand for, for engines that lack a format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from sparkinfer.errors import CheckpointError, ConfigError
from sparkinfer.models.config import ModelConfig, load_config, read_json
from sparkinfer.models.loader import SafetensorsSource
from sparkinfer.models.reader import CopyingReader
from sparkinfer.models.safetensors_file import (
    INDEX,
    FileWriter,
    NewTensor,
    dtype_name,
    index_text,
    shard_names,
    split_shards,
)
from sparkinfer.models.tensors import language_tensors
from sparkinfer.quantization.quantizer import COPIED


def dequantise_checkpoint(source: Path, target: Path, shard_bytes: int = 4 << 30) -> int:
    """Write the language model of `source` without quantisation, one tensor in memory at a time.

    A weight is rounded once to the checkpoint's own dtype, as the loader does on a CPU, so that both forms compute the
    same.

    Returns:
        Bytes of weights written.

    Raises:
        CheckpointError: the source is not quantised, incomplete or damaged.
        ConfigError: the target folder is not empty.
    """
    config = load_config(source)
    if config.quantization is None:
        raise CheckpointError(f"{source} is not quantised")
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} exists and is not empty: give a new folder")
    target.mkdir(parents=True, exist_ok=True)
    reader = SafetensorsSource(source, config, reader=CopyingReader())
    names = {
        NewTensor(reader.stored(name), dtype_name(reader.dtype_of(name)), shape): name
        for name, shape in _present(reader, config).items()
    }
    shards = split_shards(list(names), shard_bytes)
    for name, shard in zip(shard_names(len(shards)), shards, strict=True):
        writer = FileWriter(target / name, shard)
        try:
            for tensor in shard:
                writer.write_tensor(tensor.name, reader.get(names[tensor], tensor.shape))
        except BaseException:
            writer.abandon()
            raise
        writer.finish()
    reader.finish()
    for pattern in COPIED:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)
    if len(shards) > 1:
        (target / INDEX).write_text(index_text(shards))
    data = read_json(source / "config.json")
    data.pop("quantization_config", None)
    data.get("text_config", {}).pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(data, indent=2) + "\n")
    return sum(tensor.nbytes for tensor in names)


def _present(reader: SafetensorsSource, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the language model; experts as they are stored, single or fused."""
    found: dict[str, tuple[int, ...]] = {}
    for spec in language_tensors(config):
        if ".experts." not in spec.name or reader.has(spec.name):
            found[spec.name] = spec.shape
            continue
        prefix, _, name = spec.name.partition("experts.")
        rows, columns = spec.shape
        if name.endswith("down_proj.weight"):
            found[f"{prefix}experts.down_proj"] = (config.num_experts, rows, columns)
        else:
            found[f"{prefix}experts.gate_up_proj"] = (config.num_experts, 2 * rows, columns)
    return found
