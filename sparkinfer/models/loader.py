"""Weights of a checkpoint, by tensor name: from safetensors files, or seeded random ones of the same shape.

A model asks its `WeightSource` for each tensor it needs with the shape it expects, so every missing, misshapen or
foreign tensor is refused by name before anything runs. Whether a module is quantised is looked up for each module in
`quantization_config`; `quantised` gives it as it is stored, `get` dequantises it.
"""

from __future__ import annotations

import logging
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch

from sparkinfer.errors import CheckpointError
from sparkinfer.models.config import ModelConfig
from sparkinfer.models.dummy import DummySource
from sparkinfer.models.reader import Reader, load_order, make_reader, unit_of
from sparkinfer.models.safetensors_file import DTYPES, Entry, dtype_name, read_entries
from sparkinfer.models.tensors import language_tensors
from sparkinfer.quantization import fp8, nvfp4
from sparkinfer.quantization.fp8 import Fp8BlockParts
from sparkinfer.quantization.nvfp4 import Nvfp4Parts
from sparkinfer.quantization.schemes import Format, Scheme

log = logging.getLogger(__name__)

SIXTEEN_BIT = ("BF16", "F16")
FLOAT_DTYPES = ("F32", *SIXTEEN_BIT)
IGNORED_PREFIXES = ("mtp.", "model.visual.", "visual.")
"""Parts of a checkpoint that plain text decoding does not use: the multi-token-prediction head, the vision tower."""
IGNORED_SUFFIXES = (".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")
"""Scales of a quantised KV cache, which this engine's does not use."""
CHECKS_AT_ONCE = 256
"""So many tensors are looked at before the host waits for the device."""
PIECES = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Bytes that are searched for NaN at once: on a CPU they stay in its cache, on a GPU the copy stays small."""
FP32_MAX = torch.finfo(torch.float32).max
BAD_SCALE = (
    "a scale that is NaN, infinite, negative, zero or so large that its products overflow: the checkpoint is damaged or"
    " was not calibrated"
)
BAD_WEIGHT = "NaN: the checkpoint is damaged"


SecondLook = Callable[[], bool]
"""A check that costs more and is made only where the first one fails."""


class WeightSource(Protocol):
    """Where a model's tensors come from. Names are those of a text-only checkpoint (`model.layers.0...`)."""

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name` in its stored float dtype, or dequantised to the checkpoint's own dtype.

        Raises CheckpointError unless it is there, whole and of this `shape`.
        """

    def quantised(self, name: str, shape: tuple[int, ...] | None = None) -> Nvfp4Parts | Fp8BlockParts | None:
        """What a quantised module's weight `name` is stored as; None where it is not quantised.

        Raises CheckpointError for parts that are absent, misshapen, of a foreign dtype, or whose scales are unusable.
        """

    def has(self, name: str) -> bool:
        """Whether a weight of that name exists, quantised or not."""

    def finish(self) -> None:
        """Called when the model has all it needs; raises CheckpointError for language tensors nobody asked for."""


class SafetensorsSource:
    """A checkpoint folder in the layout of `transformers`: one `model.safetensors`, or shards with an index."""

    def __init__(
        self, folder: Path, config: ModelConfig, device: torch.device | str = "cpu", reader: Reader | None = None
    ) -> None:
        """Read all headers; `reader` None takes the device's own.

        Raises CheckpointError for a missing shard or a truncated or malformed file.
        """
        self.folder = folder
        self._started = time.perf_counter()
        self._quantization = config.quantization
        self._dtype = getattr(torch, config.dtype)
        self._rename = "model.language_model." if config.multimodal else "model."
        self._tied = config.tie_word_embeddings
        self._entries = read_entries(folder, self.stored(next(iter(language_tensors(config))).name))
        self._used: set[str] = set()
        language = [entry for name, entry in self._entries.items() if not name.startswith(IGNORED_PREFIXES)]
        self._floats, self._floats_by = _float_dtypes(config, language)
        self._reader = reader or make_reader(sorted(language, key=load_order), torch.device(device))
        self._checks: list[tuple[str, torch.Tensor, SecondLook | None, str]] = []
        self._unit = ""

    def stored(self, name: str) -> str:
        """The name under which a text-only checkpoint's tensor is stored here."""
        return self._rename + name.removeprefix("model.") if name.startswith("model.") else name

    def _scheme(self, name: str) -> Scheme | None:
        return self._quantization.scheme_of(name.removesuffix(".weight")) if self._quantization else None

    def _part(self, name: str, suffix: str) -> str:
        """Where a part of the quantised weight `name` is stored; experts that are fused have no `.weight`."""
        stored = self.stored(name)
        if stored.endswith(".weight"):
            return stored.removesuffix("weight") + suffix
        return stored + suffix.removeprefix("weight")

    def has(self, name: str) -> bool:
        """See `WeightSource`."""
        scheme = self._scheme(name)
        return self.stored(name) in self._entries or (
            scheme is not None and self._part(name, scheme.weight) in self._entries
        )

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of what `get` gives. Raises CheckpointError for a tensor that is missing."""
        return self._dtype if self._scheme(name) is not None else DTYPES[self._entry(self.stored(name)).dtype]

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See `WeightSource`."""
        parts = self.quantised(name, shape)
        if parts is not None:
            return parts.dequantise(self._dtype)
        return self._read(self.stored(name), shape, None, "config.json calls for {}")

    def quantised(self, name: str, shape: tuple[int, ...] | None = None) -> Nvfp4Parts | Fp8BlockParts | None:
        """See `WeightSource`."""
        scheme = self._scheme(name)
        if scheme is None:
            return None
        if scheme.format is Format.NVFP4:
            return self._nvfp4(name, scheme, shape)
        return self._fp8(name, scheme, shape)

    def _nvfp4(self, name: str, scheme: Scheme, shape: tuple[int, ...] | None) -> Nvfp4Parts:
        weight = self._part(name, scheme.weight)
        rows, columns = self._logical(weight, shape, halved=True)
        if columns % nvfp4.BLOCK:
            raise CheckpointError(
                f"{self.folder}: tensor {weight} has {columns} columns; NVFP4 needs multiples of {nvfp4.BLOCK}"
            )
        packed = self._read(weight, (rows, columns // 2), ("U8",))
        scale = self._part(name, scheme.scales[0])
        scales = self._read(scale, (rows, columns // nvfp4.BLOCK), ("F8_E4M3",))
        self._check_block_scales(scale, scales, packed)
        assert scheme.global_scale is not None
        assert scheme.input_scale is not None
        global_scale = self._scalar(self._part(name, scheme.global_scale), scheme.reciprocal)
        given = self._part(name, scheme.input_scale)
        if given not in self._entries and not scheme.needs_input_scale:
            return Nvfp4Parts(packed, scales, global_scale)
        return Nvfp4Parts(packed, scales, global_scale, self._scalar(given, scheme.reciprocal))

    def _fp8(self, name: str, scheme: Scheme, shape: tuple[int, ...] | None) -> Fp8BlockParts:
        weight = self._part(name, scheme.weight)
        logical = self._logical(weight, shape)
        values = self._read(weight, logical, ("F8_E4M3",))
        self._check_later(weight, _no_nan(values), problem=BAD_WEIGHT)
        candidates = [self._part(name, suffix) for suffix in scheme.scales]
        scale = next((one for one in candidates if one in self._entries), candidates[0])
        blocks = (*logical[:-2], fp8.blocks_of(logical[-2]), fp8.blocks_of(logical[-1]))
        entry = self._entries.get(scale)
        # ModelOpt writes the block's own dimensions too, as ones.
        stored = (blocks[0], 1, blocks[1], 1) if entry is not None and len(entry.shape) == 4 else blocks
        scales = self._read(scale, stored, ("F32", "BF16")).float().reshape(blocks)
        self._check_later(scale, _usable(scales, fp8.E4M3_MAX).all())
        return Fp8BlockParts(values, scales)

    def _logical(self, weight: str, shape: tuple[int, ...] | None, halved: bool = False) -> tuple[int, ...]:
        """The matrix's shape: as asked for, or as stored."""
        stored = self._entry(weight).shape
        if halved and len(shape if shape is not None else stored) != 2:
            raise CheckpointError(
                f"{self.folder}: tensor {weight} of shape {list(stored)} holds several NVFP4 matrices in one, as fused"
                " experts do; only one tensor for each expert is supported: convert the checkpoint"
            )
        if shape is not None:
            return shape
        if len(stored) < 2:
            raise CheckpointError(f"{self.folder}: tensor {weight} has shape {list(stored)}, expected a matrix")
        return (*stored[:-1], stored[-1] * 2) if halved else stored

    def _entry(self, stored: str) -> Entry:
        entry = self._entries.get(stored)
        if entry is not None:
            return entry
        if stored.endswith("scale") or "_scale_" in stored or "global_scale" in stored:
            raise CheckpointError(
                f"{self.folder}: tensor {stored} is missing, but quantization_config says that its module is quantised:"
                " the checkpoint is incomplete, or the module belongs on the list of those that are not"
            )
        raise CheckpointError(
            f"{self.folder}: tensor {stored} is missing; the checkpoint is incomplete or config.json does not belong"
            " to it"
        )

    def _read(
        self,
        stored: str,
        shape: tuple[int, ...],
        dtypes: tuple[str, ...] | None,
        wanted: str = "its module's shape and format call for {}",
    ) -> torch.Tensor:
        """A tensor of this shape and one of these dtypes; None: those of what is not quantised."""
        entry = self._entry(stored)
        if entry.dtype not in (dtypes or self._floats):
            hint = ", as quantization_config says of its module"
            if dtypes is None and entry.dtype in FLOAT_DTYPES:
                hint = f", since {self._floats_by}: the file is damaged, or set `dtype` in config.json"
            elif dtypes is None:
                hint = "; quantization_config does not say that it is quantised"
            expected = " or ".join(dtypes or self._floats)
            raise CheckpointError(f"{entry.path}: tensor {stored} has dtype {entry.dtype}, expected {expected}{hint}")
        if entry.shape != shape:
            raise CheckpointError(
                f"{entry.path}: tensor {stored} has shape {list(entry.shape)}, but {wanted.format(list(shape))}"
            )
        self._used.add(stored)
        return self._reader.read(entry)

    def _scalar(self, stored: str, reciprocal: bool) -> torch.Tensor:
        """A positive fp32 scalar, by which the largest products of codes and block scales are finite.

        Files have it as [] or [1].
        """
        shape = self._entry(stored).shape
        value = self._read(stored, (1,) if shape == (1,) else (), ("F32",)).reshape(())
        # The reciprocal of a number that small is infinite.
        value = value.reciprocal() if reciprocal else value
        self._check_later(stored, _usable(value, nvfp4.E4M3_MAX * nvfp4.E2M1_MAX))
        return value

    def _check_block_scales(self, stored: str, scales: torch.Tensor, packed: torch.Tensor) -> None:
        """Refuse NaN and negative block scales, and a zero one unless its block is all zeros."""
        codes = scales.view(torch.uint8)

        def but_for_zeros() -> bool:
            empty = packed.view(*codes.shape, -1).bitwise_and(0x77).amax(-1) == 0
            return bool(((codes - 1 <= 0x7D) | ((codes == 0) & empty)).all())

        # Codes 0x01 to 0x7e are the positive numbers.
        if codes.device.type == "cpu":
            # NumPy, on one thread: starting a team for each of ten thousand small matrices takes longer than reading.
            array = codes.numpy()
            good = torch.tensor(bool(array.min() >= 1 and array.max() <= 0x7E))
        else:
            least, most = codes.aminmax()
            good = (least >= 1) & (most <= 0x7E)
        self._check_later(stored, good, but_for_zeros)

    def _check_later(
        self, stored: str, good: torch.Tensor, second: SecondLook | None = None, problem: str = BAD_SCALE
    ) -> None:
        """Refuse the tensor `stored` unless `good` or `second` says so; a device is asked for many answers at once.

        A second look holds the layer's tensors: at the end of a layer all its checks are made, so that the device does
        not keep the buffers of several.
        """
        if unit_of(stored) != self._unit:
            self._check_now()
            self._unit = unit_of(stored)
        self._checks.append((stored, good, second, problem))
        if good.device.type == "cpu" or len(self._checks) >= CHECKS_AT_ONCE:
            self._check_now()

    def _check_now(self) -> None:
        checks, self._checks = self._checks, []
        if not checks or bool(torch.stack([good for _, good, _, _ in checks]).all()):
            return
        for stored, good, second, problem in checks:
            if not good and not (second is not None and second()):
                raise CheckpointError(f"{self._entries[stored].path}: tensor {stored} holds {problem}")

    def finish(self) -> None:
        """See `WeightSource`."""
        self._check_now()
        self._reader.close()
        rest = sorted(set(self._entries) - self._used)
        parts = [name for name in rest if name.startswith(IGNORED_PREFIXES)]
        scales = [name for name in rest if name.endswith(IGNORED_SUFFIXES) and not name.startswith(IGNORED_PREFIXES)]
        # A tied model may store its output matrix all the same.
        tied = [name for name in rest if self._tied and name.startswith("lm_head.")]
        foreign = sorted(set(rest) - {*parts, *scales, *tied} - self._spare(rest))
        if foreign:
            more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            raise CheckpointError(
                f"{self._entries[foreign[0]].path}: tensor {foreign[0]}{more} has no place in the model that"
                " config.json describes"
            )
        if parts:
            names = ", ".join(sorted({name.removeprefix("model.").split(".")[0] for name in parts}))
            log.info("serving the language model only: %d tensors not loaded (%s)", len(parts), names)
        if scales:
            log.info("KV cache scales not loaded: %d; this engine's cache does not use them", len(scales))
        size = sum(self._entries[name].end - self._entries[name].start for name in self._used)
        seconds = time.perf_counter() - self._started
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        text = "loaded %d tensors, %.1f MiB, in %.2f s; the process's resident memory was %.0f MiB at most"
        log.info(text, len(self._used), size / 2**20, seconds, highest)

    def _spare(self, rest: list[str]) -> set[str]:
        """Input scales of modules whose activations stay in 16 bits: ModelOpt used to write them all the same."""
        used = {name.rpartition(".")[0] for name in self._used}
        suffixes = ("input_scale", "input_global_scale")
        return {name for name in rest if name.endswith(suffixes) and name.rpartition(".")[0] in used}


def _float_dtypes(config: ModelConfig, entries: Iterable[Entry]) -> tuple[tuple[str, ...], str]:
    """What tensors that are not quantised may be stored as, and what says so.

    A 16-bit one of the other kind would be read as garbage of the right size. fp32 goes with each: published 16-bit
    checkpoints have it for norms and the like.
    """
    if config.dtype_named:
        own = dtype_name(getattr(torch, config.dtype))
        return tuple(dict.fromkeys((own, "F32"))), f"config.json names the dtype {config.dtype}"
    sizes: Counter[str] = Counter()
    for entry in entries:
        if entry.dtype in SIXTEEN_BIT:
            sizes[entry.dtype] += entry.end - entry.start
    return (*(kind for kind, _ in sizes.most_common(1)), "F32"), "most of the checkpoint is"


def _usable(scales: torch.Tensor, largest: float) -> torch.Tensor:
    """Where a scale is positive and its product with a number up to `largest` finite. NaN fails both."""
    return (scales > 0) & (scales <= FP32_MAX / largest)


def _no_nan(values: torch.Tensor) -> torch.Tensor:
    """[] bool: no e4m3 code is NaN (0x7f, 0xff). Does not wait for a device."""
    codes = values.view(torch.uint8).reshape(-1)
    pieces = codes.split(PIECES["cpu" if codes.device.type == "cpu" else "cuda"])
    if codes.device.type == "cpu":
        return torch.tensor(all((piece.numpy() & 0x7F).max() < 0x7F for piece in pieces if len(piece)))
    return torch.stack([piece.bitwise_and(0x7F).max() < 0x7F for piece in pieces]).all()


LOAD_FORMATS = ("auto", "safetensors", "dummy")


def open_source(
    folder: Path, config: ModelConfig, load_format: str = "auto", seed: int = 0, device: torch.device | str = "cpu"
) -> WeightSource:
    """The weights of `folder`, or random ones for `load_format="dummy"` (then only config.json is read).

    Args:
        folder: of the checkpoint.
        config: read from it.
        load_format: one of `LOAD_FORMATS`.
        seed: of random weights.
        device: where tensors are wanted; what the source gives lies there.

    Raises:
        CheckpointError: for a damaged or incomplete checkpoint, or an unknown load format.
    """
    if load_format == "dummy":
        log.warning("load format dummy: random weights of real shape (seed %d); the text is meaningless", seed)
        return DummySource(config, seed, device)
    if load_format not in LOAD_FORMATS:
        raise CheckpointError(f"load format {load_format!r} is not known; choose one of {', '.join(LOAD_FORMATS)}")
    return SafetensorsSource(folder, config, device)
