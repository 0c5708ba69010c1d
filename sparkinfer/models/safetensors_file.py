"""Safetensors files: headers checked against the file, shards by their index, and files written piece by piece.

Format: https://huggingface.co/docs/safetensors (8 bytes of length, a JSON header, the tensors without gaps).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import reprlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparkinfer.errors import CheckpointError
from sparkinfer.models.config import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
"""Names of the dtypes that this package reads and writes."""
SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
"""Bytes of an element; 1 for all others."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies: bytes `start` to `end` of `path`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    end: int


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a torch dtype. Raises KeyError for one that is not used here."""
    return {value: name for name, value in DTYPES.items()}[dtype]


def read_entries(folder: Path, first: str | None = None) -> dict[str, Entry]:
    """All tensors of a checkpoint folder by name.

    `first` is one that should be there: an error names it where the damaged file does not tell a name.

    Raises:
        CheckpointError: a shard is missing, truncated or malformed, or disagrees with the index; names the tensor.
    """
    found: dict[str, Entry] = {}
    for path, names in list(_shards(folder, first)):
        header = read_header(path, names, first)
        extra = sorted(set(header) - set(names)) if names is not None else []
        if extra:
            raise CheckpointError(
                f"{path}: tensor {extra[0]} is here, but the index places it elsewhere or does not name it: index and"
                " shards belong to different checkpoints"
            )
        found.update(header)
    return found


def _shards(folder: Path, first: str | None) -> Iterable[tuple[Path, list[str] | None]]:
    """The weight files, each with the tensors that the index expects in it (None: no index, take what is there)."""
    index = folder / INDEX
    if not index.exists():
        single = folder / SINGLE
        if not single.exists():
            raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}: {_called(first)} cannot be read")
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
        if Path(file).name != file:
            raise CheckpointError(f"{index}: tensor {names[0]} is placed in {file!r}, outside the folder")
        try:
            path.stat()
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist, but the index places tensor {names[0]} there: fetch the shard"
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{index}: tensor {names[0]} is placed in {file!r}, no usable file: {error}"
            ) from error
        yield path, names


def _called(name: str | None) -> str:
    """A tensor that an error is about."""
    return "any tensor" if name is None else f"tensor {name}"


def read_header(path: Path, names: Sequence[str] | None = None, first: str | None = None) -> dict[str, Entry]:
    """The tensors of one file, checked against its length and against the `names` that an index expects.

    `first` as in `read_entries`, where there is no index.

    Raises:
        CheckpointError: the file cannot be read, is truncated or malformed, or lacks one of `names`.
    """
    wanted = _called(names[0] if names else first)
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is no file: {wanted} cannot be read")
        with path.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            prefix = handle.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if 8 + length > size:
                raise CheckpointError(
                    f"{path} is truncated or no safetensors file ({size} bytes): {wanted} cannot be read"
                )
            text = handle.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {wanted} cannot be read: {error}") from error
    try:
        header = json.loads(text, object_pairs_hook=_unique)
        header.pop("__metadata__", None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} has a malformed safetensors header ({error}): {wanted} cannot be read"
        ) from error
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    for entry in entries.values():
        if entry.end > size:
            raise CheckpointError(f"{path} is truncated at {size} bytes: tensor {entry.name} is incomplete")
        if entry.end - entry.start != math.prod(entry.shape) * SIZES.get(entry.dtype, 1):
            raise CheckpointError(
                f"{path}: tensor {entry.name} has {entry.end - entry.start} bytes, but dtype {entry.dtype} and shape"
                f" {list(entry.shape)} need {math.prod(entry.shape) * SIZES.get(entry.dtype, 1)}"
            )
    _check_apart(path, entries)
    for name in names or ():
        if name not in entries:
            raise CheckpointError(f"{path}: tensor {name} is missing, but the index places it there")
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys differ. Raises ValueError otherwise: a reader would take one of two tensors."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in found if names.count(name) > 1)} is there twice")
    return found


def _check_apart(path: Path, entries: dict[str, Entry]) -> None:
    """Raises CheckpointError when two tensors share bytes."""
    ordered = sorted((entry for entry in entries.values() if entry.end > entry.start), key=lambda entry: entry.start)
    for first, second in itertools.pairwise(ordered):
        if second.start < first.end:
            raise CheckpointError(
                f"{path} has a malformed safetensors header: tensors {first.name} and {second.name} share bytes"
            )


def _entry(path: Path, name: str, value: Any, base: int) -> Entry:
    """Raises CheckpointError unless `value` has a dtype, a shape and the two offsets."""
    try:
        dtype, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        good = all(type(number) is int and number >= 0 for number in (*shape, start, end)) and start <= end
    except (ValueError, KeyError, TypeError):
        good = False
    if not good or not isinstance(dtype, str):
        raise CheckpointError(
            f"{path} has a malformed safetensors header: tensor {name} is {reprlib.repr(value)}, expected dtype, shape"
            " and data_offsets: fetch the file again"
        )
    return Entry(name, dtype, shape, path, base + start, base + end)


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor that is to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * SIZES.get(self.dtype, 1)


def layout(path: Path, tensors: Sequence[NewTensor]) -> tuple[bytes, dict[str, Entry]]:
    """Header of a file with `tensors`, and where each goes: widest dtypes first, so that all are aligned."""
    ordered = sorted(tensors, key=lambda tensor: -SIZES.get(tensor.dtype, 1))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    spans, offset = [], 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        spans.append((tensor, offset))
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    entries = {
        tensor.name: Entry(tensor.name, tensor.dtype, tensor.shape, path, base + start, base + start + tensor.nbytes)
        for tensor, start in spans
    }
    return struct.pack("<Q", len(text)) + text, entries


def split_shards(tensors: Sequence[NewTensor], shard_bytes: int) -> list[list[NewTensor]]:
    """Neighbours together, at most `shard_bytes` a shard where a single tensor is not larger."""
    shards: list[list[NewTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.nbytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.nbytes
    return shards


def shard_names(count: int) -> list[str]:
    """File names of `count` shards as `transformers` has them; a single one has no number."""
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def index_text(shards: Sequence[Sequence[NewTensor]]) -> str:
    """Content of the index of `shards`."""
    weight_map = {
        tensor.name: name for name, shard in zip(shard_names(len(shards)), shards, strict=True) for tensor in shard
    }
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=1)


class FileWriter:
    """Writes a safetensors file by tensors in any order, also from several threads; `finish` gives it its name."""

    def __init__(self, path: Path, tensors: Sequence[NewTensor]) -> None:
        self.path, self.temporary = path, path.with_name(path.name + ".part")
        header, self.entries = layout(path, tensors)
        self._file = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.truncate(self._file, max((entry.end for entry in self.entries.values()), default=len(header)))
            _write_all(self._file, header, 0)
        except OSError:
            self.abandon()
            raise

    def write(self, name: str, data: memoryview | bytes, offset: int = 0) -> None:
        """Write bytes of a tensor, `offset` bytes into it."""
        _write_all(self._file, data, self.entries[name].start + offset)

    def write_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor. Raises ValueError unless dtype and shape are those announced."""
        entry = self.entries[name]
        if tensor.dtype != DTYPES[entry.dtype] or tuple(tensor.shape) != entry.shape:
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} where {entry.dtype} {entry.shape} belongs")
        self.write(name, tensor_bytes(tensor))

    def finish(self, sync: bool = True) -> None:
        """Bring the file to the disk and to its final name."""
        if sync:
            os.fsync(self._file)
        os.close(self._file)
        self.temporary.rename(self.path)

    def abandon(self) -> None:
        """Close and delete the unfinished file."""
        os.close(self._file)
        self.temporary.unlink()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, row-major."""
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write_all(file: int, data: memoryview | bytes, position: int) -> None:
    view = memoryview(data)
    while len(view):
        done = os.pwrite(file, view, position)
        view, position = view[done:], position + done
