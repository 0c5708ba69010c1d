"""Quantise a checkpoint folder piece by piece: never more than some rows of one matrix are in memory.

The layout of the new files follows from the headers of the old ones and the chosen formats, so that every piece has its
place before any is computed. A file gets its name when it is whole; `config.json` and the index come last. What a
killed run left is taken up again, down to the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sparkinfer import __version__
from sparkinfer.errors import CheckpointError, ConfigError, EnvironmentProblem
from sparkinfer.identity import file_digests, source_digest
from sparkinfer.models.config import ModelConfig, load_config, read_json
from sparkinfer.models.loader import FLOAT_DTYPES, SafetensorsSource
from sparkinfer.models.reader import load_order, read_bytes
from sparkinfer.models.safetensors_file import (
    DTYPES,
    INDEX,
    SIZES,
    Entry,
    FileWriter,
    NewTensor,
    index_text,
    layout,
    read_entries,
    shard_names,
    split_shards,
    tensor_bytes,
)
from sparkinfer.models.tensors import Role, TensorSpec, language_tensors
from sparkinfer.quantization import fp8, nvfp4
from sparkinfer.quantization.calibrate import (
    NotFiniteError,
    calibrate,
    calibration_text,
    calibration_tokens,
)
from sparkinfer.quantization.choices import Choices, Rule
from sparkinfer.quantization.grouping import fused_with
from sparkinfer.quantization.saved import InputStatistics, SavedLayers
from sparkinfer.quantization.schemes import Format
from sparkinfer.quantization.stored import stored_tensors, values

WORK = ".quantize"
"""Folder in the new checkpoint with what a run needs to be taken up again; removed at the end."""
COPIED = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("chat_template*", "*processor_config.json", "LICENSE*"),
)
"""Files beside the weights that the new folder needs too."""
READ = ("config.json", "generation_config.json", "tokenizer.json")
"""Files of the source, beside the weights, that decide what is written."""
ELEMENTS = 1 << 22
"""Weights that are quantised at once."""

FLOOR = 1.0
"""Added to every column's importance, as a share of the mean: rare inputs are not in the text, yet they come."""

Progress = Callable[[str, int, int], None]
"""Told (what is being done, units done, units in all)."""


@dataclass(frozen=True)
class Options:
    """What to make."""

    format: Format
    rules: tuple[Rule, ...] = ()
    calibration: tuple[Path, ...] = ()
    calibration_tokens: int = 8192
    search: bool = True
    device: str = "cpu"
    shard_bytes: int = 4 << 30
    elements: int = ELEMENTS


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer's weight [N, K] in the source: some rows of a stored tensor, which may hold several matrices."""

    module: str
    """Name in a text-only checkpoint."""
    entry: Entry
    first: int
    """Row of the stored tensor, seen as [rows, K], where it begins."""
    shape: tuple[int, int]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """[stop - start, K] as stored."""
        width = self.shape[1] * SIZES[self.entry.dtype]
        flat = read_bytes(self.entry, (self.first + start) * width, (stop - start) * width)
        return flat.view(DTYPES[self.entry.dtype]).view(stop - start, self.shape[1])


@dataclass(frozen=True, slots=True)
class Result:
    """What was written."""

    source_bytes: int
    bytes: int
    modules: dict[str, int]
    """Number of modules by format; `kept` for those that stay in 16 bits."""
    notes: list[str]
    resumed: int
    """Files that an earlier run had finished."""


class _HeadersOnly:
    """A reader for what needs no weights: zeros of a tensor's shape, in no memory."""

    def read(self, entry: Entry) -> torch.Tensor:
        return torch.zeros((), dtype=DTYPES[entry.dtype]).expand(entry.shape)

    def close(self) -> None:
        """See `Reader`."""


class Quantizer:
    """One conversion; see `run`."""

    def __init__(self, source: Path, target: Path, options: Options, progress: Progress | None = None) -> None:
        """Decide everything that needs no weights.

        Raises:
            CheckpointError: the source is damaged, incomplete or quantised already, or holds a foreign tensor.
            ConfigError: a pattern does not fit, or the target folder holds something else.
        """
        self.source, self.target, self.options = source, target, options
        self.progress = progress or (lambda *_: None)
        self.config: ModelConfig = load_config(source)
        if self.config.quantization is not None:
            raise CheckpointError(f"{source} is quantised already ({self.config.quantization.method})")
        if target.resolve() == source.resolve():
            raise ConfigError(f"{target} is the source: give another folder to write to")
        self.entries = read_entries(source)
        shapes = {name: entry.shape for name, entry in self.entries.items()}
        self.choices = Choices(self.config, options.format, options.rules, shapes)
        if not any(self.choices.formats.values()):
            raise ConfigError("no layer is left to quantise: " + "; ".join(self.choices.notes or ["all are kept"]))
        self._note_other_parts()
        self._mixed = self.choices.mixed()
        self.matrices = self._find_matrices()
        self.work = list(self._plan())
        self.shards = split_shards([tensor for _, _, new in self.work for tensor in new], options.shard_bytes)
        self._amax: dict[str, float] = {}
        self._statistics: dict[str, InputStatistics] = {}

    def _note_other_parts(self) -> None:
        """Says what of a multimodal checkpoint is not quantised."""
        others = [name.removeprefix("model.") for name in self.choices.others]
        if others:
            parts = ", ".join(sorted({name.split(".")[0] for name in others}))
            self.choices.notes.append(
                f"only the language model is quantised: {len(others)} other tensors ({parts}) are copied as they are"
            )

    def _find_matrices(self) -> dict[str, Matrix]:
        """Every linear layer's weight, wherever it is stored.

        Raises CheckpointError for every tensor that the loader would refuse by its name, shape or dtype.
        """
        found = {}
        loader = SafetensorsSource(self.source, self.config, reader=_HeadersOnly())
        for spec in language_tensors(self.config):
            name, first, shape = spec.name, 0, spec.shape
            if ".experts." in name and not loader.has(name):
                name, first, shape = self._fused_expert(spec)
                if not loader.has(name):
                    name, shape = spec.name, spec.shape
            loader.get(name, shape)
            if spec.role is Role.LINEAR:
                rows, columns = spec.shape
                found[spec.module] = Matrix(spec.module, self.entries[loader.stored(name)], first, (rows, columns))
        loader.finish()
        return found

    def _fused_expert(self, spec: TensorSpec) -> tuple[str, int, tuple[int, ...]]:
        """The tensor of all experts, the row where an expert's matrix begins in it, and its shape."""
        prefix, _, rest = spec.module.partition(".experts.")
        number, _, name = rest.partition(".")
        rows, columns = spec.shape
        height = rows if name == "down_proj" else 2 * rows
        first = int(number) * height + (rows if name == "up_proj" else 0)
        fused = f"{prefix}.experts." + ("down_proj" if name == "down_proj" else "gate_up_proj")
        return fused, first, (self.config.num_experts, height, columns)

    def _plan(self) -> Iterator[tuple[Entry, Matrix | None, list[NewTensor]]]:
        """For every stored tensor, layer by layer, what becomes of it: matrices to quantise, or a copy."""
        inside: dict[str, list[Matrix]] = {}
        for matrix in self.matrices.values():
            inside.setdefault(matrix.entry.name, []).append(matrix)
        for entry in sorted(self.entries.values(), key=load_order):
            chosen = [m for m in inside.get(entry.name, []) if self.choices.formats[m.module] is not None]
            if not chosen:
                yield entry, None, [NewTensor(entry.name, entry.dtype, entry.shape)]
            for matrix in chosen:
                choice = self.choices.formats[matrix.module]
                assert choice is not None
                # vLLM reads experts of a mixed checkpoint by the names of its plain FP8 reader.
                modelopt = self._mixed and ".experts." not in matrix.module
                yield entry, matrix, stored_tensors(self.choices.stored(matrix.module), matrix.shape, choice, modelopt)

    def run(self) -> Result:
        """Calibrate, quantise, write.

        Raises:
            CheckpointError: a weight (copied ones too) or an input of a layer holds NaN or infinity, or a weight cannot
                be read.
            ConfigError: the calibration text is too short, or another run writes to the target folder.
            EnvironmentProblem: the target folder cannot be written, or the disk is full.
        """
        try:
            with self._alone():
                return self._run()
        except OSError as error:
            raise EnvironmentProblem(
                f"{error.filename or self.target} cannot be written ({error.strerror or error}): make room or give"
                " another folder; the same command goes on where this one ended"
            ) from error

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Holds the target folder against a second run, for as long as this process lives. Raises ConfigError."""
        self.target.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.target, os.O_RDONLY)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another run writes to {self.target}: wait for it, or give another folder") from None
            yield
        finally:
            os.close(folder)

    def _run(self) -> Result:
        self._prepare_target()
        if self._calibrated:
            self._statistics = self._calibrate()
        names = shard_names(len(self.shards))
        done = [name for name, shard in zip(names, self.shards, strict=True) if _is_whole(self.target / name, shard)]
        total = sum(tensor.nbytes for shard in self.shards for tensor in shard)
        written = 0
        self.progress("quantising", 0, total)
        for name, shard in zip(names, self.shards, strict=True):
            if name not in done:
                self._write_shard(
                    self.target / name, shard, lambda count: self.progress("quantising", count, total), written
                )
            written += sum(tensor.nbytes for tensor in shard)
            self.progress("quantising", written, total)
        self._finish()
        counts: dict[str, int] = {}
        for choice in self.choices.formats.values():
            key = "kept" if choice is None else choice.value
            counts[key] = counts.get(key, 0) + 1
        size = sum(entry.end - entry.start for entry in self.entries.values())
        return Result(size, total, counts, self.choices.notes, len(done))

    def _identity(self) -> dict[str, Any]:
        """What a run that is taken up again must have been asked for, too."""
        headers = hashlib.sha256()
        for name, entry in sorted(self.entries.items()):
            stat = entry.path.stat()
            headers.update(
                f"{name} {entry.dtype} {entry.shape} {entry.start} {stat.st_size} {stat.st_mtime_ns}\n".encode()
            )
        asked = asdict(self.options)
        for speed in ("device", "elements"):
            asked.pop(speed)
        text = hashlib.sha256(calibration_text(list(self.options.calibration)).encode()).hexdigest()
        return {
            "source": headers.hexdigest(),
            "files": file_digests({n: self.source / n for n in READ if (self.source / n).is_file()}),
            "options": repr(asked),
            "calibration": text,
            "program": f"{__version__} {source_digest()}",
        }

    @property
    def _calibrated(self) -> bool:
        return any(choice is Format.NVFP4 for choice in self.choices.formats.values())

    @cached_property
    def _tokens(self) -> torch.Tensor:
        """[n, SEQUENCE] int64 of the calibration text."""
        text = calibration_text(list(self.options.calibration))
        return calibration_tokens(self.source, text, self.options.calibration_tokens)

    def _prepare_target(self) -> None:
        plan, identity = self.target / WORK / "plan.json", self._identity()
        if plan.exists():
            if read_json(plan) != identity:
                raise ConfigError(
                    f"{self.target} holds an unfinished run with other options, another source, another calibration"
                    " text or another version of this program: take those, or remove the folder"
                )
            return
        # A run that was killed before it had a plan has left at most the folder for it.
        if self.target.exists() and any(path.name != WORK for path in self.target.iterdir()):
            raise ConfigError(f"{self.target} exists and is not empty: give a new folder")
        if self._calibrated:
            # A text or tokenizer that will not do is refused before the plan binds the folder to it.
            _ = self._tokens
        plan.parent.mkdir(parents=True, exist_ok=True)
        _write_text(plan, json.dumps(identity))

    def _calibrate(self) -> dict[str, InputStatistics]:
        """Statistics of all layers' inputs; layers that an earlier run has done are not run again."""
        try:
            return calibrate(
                self.source,
                self.config,
                self._tokens,
                torch.device(self.options.device),
                lambda done, layers: self.progress("calibrating", done, layers),
                SavedLayers(self.target / WORK),
            )
        except NotFiniteError:
            # A damaged matrix is named before the layer that it feeds.
            for matrix in self.matrices.values():
                self._matrix_amax(matrix)
            raise

    def _write_shard(self, path: Path, shard: Sequence[NewTensor], report: Callable[[int], None], before: int) -> None:
        wanted = {tensor.name for tensor in shard}
        writer = FileWriter(path, shard)
        try:
            for entry, matrix, new in self.work:
                # A module whose tensors fall into two files is computed twice, which spares keeping it.
                mine = {tensor.name for tensor in new} & wanted
                if not mine:
                    continue
                if matrix is None:
                    self._copy(writer, entry)
                else:
                    self._quantise(writer, matrix, new, mine)
                before += sum(tensor.nbytes for tensor in new if tensor.name in mine)
                report(before)
        except BaseException:
            writer.abandon()
            raise
        writer.finish()

    def _copy(self, writer: FileWriter, entry: Entry) -> None:
        size, step = entry.end - entry.start, self.options.elements * 4
        for offset in range(0, size, step):
            data = read_bytes(entry, offset, min(step, size - offset))
            if entry.dtype in FLOAT_DTYPES and not bool(torch.isfinite(data.view(DTYPES[entry.dtype])).all()):
                raise CheckpointError(f"{entry.path}: tensor {entry.name} holds NaN or infinity: fetch the file again")
            writer.write(entry.name, memoryview(data.numpy()), offset)  # type: ignore[arg-type]

    def _quantise(self, writer: FileWriter, matrix: Matrix, new: list[NewTensor], mine: set[str]) -> None:
        """Quantise a matrix by groups of rows and write each to its place."""
        rows, columns = matrix.shape
        scales: tuple[float, float] | None = None
        if self.choices.formats[matrix.module] is Format.NVFP4:
            scales = nvfp4.global_scale_for(self._fused_amax(matrix)), self._input_scale(matrix.module)
        step = max(1, self.options.elements // columns // fp8.BLOCK) * fp8.BLOCK
        for start in range(0, rows, step):
            weight = matrix.rows(start, min(rows, start + step)).to(self.options.device)
            for tensor, value in zip(new, values(self._parts(matrix, weight, scales)), strict=True):
                if tensor.name not in mine:
                    continue
                # Scalars are the same for all groups; everything else is row-major, by rows or by blocks of rows.
                offset = 0
                if tensor.shape:
                    height = tensor.shape[0]
                    offset = tensor.nbytes // height * (start if height == rows else start // fp8.BLOCK)
                writer.write(tensor.name, tensor_bytes(value), offset)

    def _parts(
        self, matrix: Matrix, weight: torch.Tensor, scales: tuple[float, float] | None
    ) -> nvfp4.Nvfp4Parts | fp8.Fp8BlockParts:
        try:
            if scales is None:
                return fp8.quantise(weight)
            seen = self._statistics[matrix.module].mean_square
            importance = seen + FLOOR * seen.mean()
            return nvfp4.quantise(weight, *scales, importance=importance, search=self.options.search)
        except ValueError as error:
            raise CheckpointError(
                f"{matrix.entry.path}: tensor {matrix.entry.name} ({matrix.module}): {error}"
            ) from error

    def _fused_amax(self, matrix: Matrix) -> float:
        """The largest magnitude in the matrix and in those that engines fuse with it."""
        members = fused_with(matrix.module)
        if members[0] not in self._amax:
            largest = 0.0
            for member in members:
                largest = max(largest, self._matrix_amax(self.matrices[member]))
            self._amax[members[0]] = largest
        return self._amax[members[0]]

    def _matrix_amax(self, matrix: Matrix) -> float:
        rows, columns = matrix.shape
        step = max(1, self.options.elements // columns)
        largest = 0.0
        for start in range(0, rows, step):
            value = float(matrix.rows(start, min(rows, start + step)).abs().max())
            if value != value or value == float("inf"):
                raise CheckpointError(
                    f"{matrix.entry.path}: tensor {matrix.entry.name} ({matrix.module}) holds NaN or infinity"
                )
            largest = max(largest, value)
        return largest

    def _input_scale(self, module: str) -> float:
        return nvfp4.input_scale_for(max(self._statistics[name].amax for name in fused_with(module)))

    def _finish(self) -> None:
        """Everything beside the weights; after this the folder is a checkpoint."""
        for pattern in COPIED:
            for path in self.source.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, self.target / path.name)
        if len(self.shards) > 1:
            _write_text(self.target / INDEX, index_text(self.shards))
        config = read_json(self.source / "config.json")
        config["quantization_config"] = self.choices.quantization_config()
        _write_text(self.target / "config.json", json.dumps(config, indent=2) + "\n")
        shutil.rmtree(self.target / WORK)


def _is_whole(path: Path, shard: Sequence[NewTensor]) -> bool:
    """Whether an earlier run wrote this file to its end."""
    header, entries = layout(path, shard)
    if not path.is_file() or path.stat().st_size != max((e.end for e in entries.values()), default=len(header)):
        return False
    with path.open("rb") as handle:
        return handle.read(len(header)) == header


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(path)
