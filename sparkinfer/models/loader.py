"""Weights of a checkpoint, by tensor name: from safetensors files, or seeded random ones of the same shape.

A model asks its `WeightSource` for each tensor it needs with the shape it expects, so every missing, misshapen or
foreign tensor is refused by name before anything runs.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from sparkinfer.errors import CheckpointError
from sparkinfer.models.config import ModelConfig, read_json

log = logging.getLogger(__name__)

FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
IGNORED_PREFIXES = ("mtp.", "model.visual.", "visual.")
"""Parts of a checkpoint that plain text decoding does not use: the multi-token-prediction head, the vision tower."""


class WeightSource(Protocol):
    """Where a model's tensors come from. Names are those of a text-only checkpoint (`model.layers.0...`)."""

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name` in its stored float dtype; raises CheckpointError unless it has `shape`."""

    def has(self, name: str) -> bool:
        """Whether a tensor of that name exists."""

    def finish(self) -> None:
        """Called when the model has all it needs; raises CheckpointError for language tensors nobody asked for."""


class SafetensorsSource:
    """A checkpoint folder in the layout of `transformers`: one `model.safetensors`, or shards with an index."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Read all headers. Raises CheckpointError for a missing shard or a truncated or malformed file."""
        self.folder = folder
        self._headers: dict[str, dict[str, Any]] = {}
        self._file_of: dict[str, Path] = {}
        for path, names in _shards(folder):
            header = _read_header(path, names)
            for name in names if names is not None else header:
                self._file_of[name] = path
                self._headers[name] = header[name]
        self._rename = "model.language_model." if config.multimodal else "model."
        self._used: set[str] = set()
        self._open: dict[Path, Any] = {}

    def _stored(self, name: str) -> str:
        """The name under which a text-only checkpoint's tensor is stored here."""
        return self._rename + name.removeprefix("model.") if name.startswith("model.") else name

    def has(self, name: str) -> bool:
        """See `WeightSource`."""
        return self._stored(name) in self._file_of

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See `WeightSource`."""
        stored = self._stored(name)
        path = self._file_of.get(stored)
        if path is None:
            raise CheckpointError(
                f"{self.folder}: tensor {stored} is missing; the checkpoint is incomplete or config.json"
                " does not belong to it"
            )
        header = self._headers[stored]
        if header["dtype"] not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{path}: tensor {stored} has dtype {header['dtype']}; supported: {', '.join(FLOAT_DTYPES)}"
                " (quantised checkpoints are not)"
            )
        if tuple(header["shape"]) != shape:
            raise CheckpointError(
                f"{path}: tensor {stored} has shape {header['shape']}, but config.json calls for {list(shape)}"
            )
        self._used.add(stored)
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            return self._open[path].get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {stored} cannot be read: {error}") from error

    def finish(self) -> None:
        """See `WeightSource`."""
        self._open.clear()
        rest = sorted(set(self._file_of) - self._used)
        ignored = [name for name in rest if name.startswith(IGNORED_PREFIXES)]
        # A tied model may store its output matrix all the same.
        foreign = [name for name in rest if not name.startswith(IGNORED_PREFIXES) and name != "lm_head.weight"]
        if foreign:
            more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            raise CheckpointError(
                f"{self._file_of[foreign[0]]}: tensor {foreign[0]}{more} has no place in the model that"
                " config.json describes"
            )
        if ignored:
            parts = sorted({name.removeprefix("model.").split(".")[0] for name in ignored})
            log.info("serving the language model only: %d tensors not loaded (%s)", len(ignored), ", ".join(parts))


def _shards(folder: Path) -> Iterable[tuple[Path, list[str] | None]]:
    """The weight files, each with the tensors that the index expects in it (None: no index, take what is there)."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise CheckpointError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")
        yield single, None
        return
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: `weight_map` is missing or empty")
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(str(file), []).append(name)
    for file, names in sorted(by_file.items()):
        path = folder / file
        if not path.exists():
            raise CheckpointError(
                f"{path} does not exist, but the index places tensor {names[0]} there: fetch the shard"
            )
        yield path, names


def _read_header(path: Path, names: list[str] | None) -> dict[str, dict[str, Any]]:
    """The tensors of a safetensors file by name, checked against the file's length and the index."""
    size = path.stat().st_size
    wanted = names[0] if names else "any tensor"
    with path.open("rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise CheckpointError(f"{path} is truncated or no safetensors file ({size} bytes): {wanted} cannot be read")
        try:
            header = json.loads(handle.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                if 8 + length + entry["data_offsets"][1] > size:
                    raise CheckpointError(f"{path} is truncated at {size} bytes: tensor {name} is incomplete")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} has a malformed safetensors header ({error}): {wanted} cannot be read"
            ) from error
    for name in names or ():
        if name not in header:
            raise CheckpointError(f"{path}: tensor {name} is missing, but the index places it there")
    return header


class DummySource:
    """Seeded random weights of real shape, for measuring without a checkpoint. Figures must say so."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._dtype = getattr(torch, config.dtype)
        self._generator = torch.Generator().manual_seed(seed)

    def has(self, name: str) -> bool:
        """Fused expert tensors exist here, per-expert ones do not."""
        return ".experts." not in name or name.endswith(("experts.gate_up_proj", "experts.down_proj"))

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Normal with standard deviation 0.02; norms, gates and decays get values a trained model could have."""
        if name.endswith("A_log"):
            return torch.empty(shape).uniform_(1.0, 16.0, generator=self._generator).log_()
        if name.endswith(("linear_attn.norm.weight", "dt_bias")):
            return torch.ones(shape)
        if name.endswith("norm.weight"):
            return torch.zeros(shape, dtype=self._dtype)
        return torch.empty(shape).normal_(0.0, 0.02, generator=self._generator).to(self._dtype)

    def finish(self) -> None:
        """Nothing can be left over."""


LOAD_FORMATS = ("auto", "safetensors", "dummy")


def open_source(folder: Path, config: ModelConfig, load_format: str = "auto", seed: int = 0) -> WeightSource:
    """The weights of `folder`, or random ones for `load_format="dummy"` (then only config.json is read).

    Raises:
        CheckpointError: for a damaged or incomplete checkpoint, or an unknown load format.
    """
    if load_format == "dummy":
        log.warning("load format dummy: random weights of real shape (seed %d); the text is meaningless", seed)
        return DummySource(config, seed)
    if load_format not in LOAD_FORMATS:
        raise CheckpointError(f"load format {load_format!r} is not known; choose one of {', '.join(LOAD_FORMATS)}")
    return SafetensorsSource(folder, config)
