"""`quantization_config`: which module of a checkpoint is stored in which format, read per module and written.

Read: ModelOpt (`quant_algo` NVFP4, W4A16_NVFP4, FP8_PB_WO, MIXED_PRECISION), `fp8` with blocks of 128 x 128, and
compressed-tensors (`nvfp4-pack-quantized`, and block FP8 as `float-quantized`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sparkinfer.errors import CheckpointError
from sparkinfer.quantization.patterns import NameList

LINEAR_NAMES = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
        *("gate_proj", "up_proj", "down_proj", "gate_up_proj", "lm_head"),
    )
)
"""Last components of modules that can be quantised. Routers, convolutions, norms and the embedding never are."""
LANGUAGE = "model.language_model."


class Format(Enum):
    """Numeric format of a module's weight."""

    NVFP4 = "nvfp4"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class Scheme:
    """Format of a module and the names of its tensors, as suffixes of the module's name."""

    format: Format
    weight: str
    scales: tuple[str, ...]
    """Suffixes under which the block scales may lie; the first is the usual one."""
    global_scale: str | None = None
    input_scale: str | None = None
    needs_input_scale: bool = False
    reciprocal: bool = False
    """Whether global and input scale are stored as their reciprocals."""


NVFP4 = Scheme(Format.NVFP4, "weight", ("weight_scale",), "weight_scale_2", "input_scale", True)
NVFP4_A16 = Scheme(Format.NVFP4, "weight", ("weight_scale",), "weight_scale_2", "input_scale")
PACKED = Scheme(
    Format.NVFP4, "weight_packed", ("weight_scale",), "weight_global_scale", "input_global_scale", True, True
)
PACKED_A16 = Scheme(
    Format.NVFP4, "weight_packed", ("weight_scale",), "weight_global_scale", "input_global_scale", False, True
)
FP8_BLOCK = Scheme(Format.FP8, "weight", ("weight_scale_inv", "weight_scale"))
PACKED_FORMATS = {Format.NVFP4: ("nvfp4-pack-quantized",), Format.FP8: ("float-quantized", "naive-quantized")}
"""What compressed-tensors calls the layouts that are read here."""
MIXED_FORMAT = "mixed-precision"
"""Its format of a checkpoint whose groups name their own."""
MODELOPT_ALGORITHMS = {"NVFP4": NVFP4, "W4A16_NVFP4": NVFP4_A16, "FP8_PB_WO": FP8_BLOCK}


class Quantization:
    """A parsed `quantization_config`."""

    def __init__(
        self,
        method: str,
        rules: list[tuple[NameList | None, Scheme]],
        ignore: NameList,
        layers: Mapping[str, Scheme] | None = None,
    ) -> None:
        """`rules` are tried in order, a target list of None means every linear layer; `layers` names single ones."""
        self.method, self._rules, self._ignore, self._layers = method, rules, ignore, layers
        self._known: dict[str, Scheme | None] = {}

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a module by its name in a text-only checkpoint, None where it is in 16 or 32 bits."""
        if module not in self._known:
            self._known[module] = self._decide(module)
        return self._known[module]

    def _decide(self, module: str) -> Scheme | None:
        if module.rpartition(".")[2] not in LINEAR_NAMES:
            return None
        # Lists of multimodal checkpoints carry their own prefix.
        names = (module, LANGUAGE + module.removeprefix("model."))
        if any(name in self._ignore for name in names):
            return None
        for name in names if self._layers is not None else ():
            parts = name.split(".")
            for count in range(len(parts), 0, -1):
                scheme = (self._layers or {}).get(".".join(parts[:count]))
                if scheme is not None:
                    return scheme
        for targets, scheme in self._rules:
            if targets is None or any(name in targets for name in names):
                return scheme
        return None


def parse_quantization(data: object, where: str) -> Quantization:
    """Read a `quantization_config` (or the content of `hf_quant_config.json`); `where` begins every error message.

    Raises:
        CheckpointError: the method is not supported, or a field of it is malformed.
    """
    if not isinstance(data, dict):
        raise CheckpointError(f"{where} is {data!r}, expected an object")
    method = data.get("quant_method") or ("modelopt" if "quantization" in data else None)
    if method in ("modelopt", "modelopt_fp4", "modelopt_mixed"):
        return _modelopt(data, where)
    if method == "fp8":
        return _fp8(data, where)
    if method == "compressed-tensors":
        return _compressed_tensors(data, where)
    raise CheckpointError(
        f"{where}: quant_method {method!r} is not supported; supported: modelopt (NVFP4), fp8 (blocks of 128 x 128),"
        " compressed-tensors (nvfp4-pack-quantized)"
    )


def _names(data: Mapping[str, Any], keys: tuple[str, ...], where: str) -> list[str]:
    """The first list of names that is there."""
    for key in keys:
        value = data.get(key)
        if value is not None:
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise CheckpointError(f"{where}: `{key}` is no list of module names")
            return value
    return []


def _name_list(names: list[str], where: str) -> NameList:
    """Raises CheckpointError for a regular expression that is none."""
    try:
        return NameList(names)
    except re.error as error:
        raise CheckpointError(
            f"{where}: the list of modules holds {error.pattern!r}, no regular expression: {error}"
        ) from error


def _modelopt(data: dict[str, Any], where: str) -> Quantization:
    inner = data.get("quantization", data)
    if not isinstance(inner, dict):
        raise CheckpointError(f"{where}: `quantization` is {inner!r}, expected an object")
    algorithm = str(inner.get("quant_algo")).upper()
    ignore = _name_list(_names(inner, ("ignore", "exclude_modules"), where), where)
    groups = inner.get("config_groups")
    groups = groups if isinstance(groups, dict) else {}
    for key, group in groups.items():
        if not isinstance(group, dict):
            raise CheckpointError(f"{where}: config_groups.{key} is {group!r}, expected an object")
    _check_group_size(inner.get("group_size"), algorithm, where)
    scheme = MODELOPT_ALGORITHMS.get(algorithm)
    for key, group in groups.items():
        weights = group.get("weights")
        if isinstance(weights, dict):
            _check_group_size(weights.get("group_size"), algorithm, where)
            if scheme is not None:
                _check_bits(
                    weights, 4 if scheme.format is Format.NVFP4 else 8, algorithm, f"{where}: config_groups.{key}"
                )
    if algorithm == "MIXED_PRECISION":
        return _mixed(inner, ignore, where)
    if scheme is None:
        raise CheckpointError(
            f"{where}: quant_algo {inner.get('quant_algo')!r} is not supported; supported:"
            f" {', '.join(MODELOPT_ALGORITHMS)}, MIXED_PRECISION"
        )
    if scheme is NVFP4 and groups and all(group.get("input_activations") is None for group in groups.values()):
        scheme = NVFP4_A16
    return Quantization(f"modelopt {algorithm}", [(None, scheme)], ignore)


def _check_group_size(size: object, algorithm: str, where: str) -> None:
    if size not in (None, 16) and "NVFP4" in algorithm:
        raise CheckpointError(f"{where}: group_size {size!r} is not supported for NVFP4, only 16 is")


def _check_bits(weights: Mapping[str, Any], bits: int, algorithm: str, at: str) -> None:
    """Weights that say another number than their format has."""
    found, kind = weights.get("num_bits"), weights.get("type")
    if found not in (None, bits) or kind not in (None, "float"):
        raise CheckpointError(
            f"{at}: weights of {found!r} bits, type {kind!r} contradict quant_algo {algorithm}, which is"
            f" {bits}-bit float: export the checkpoint again"
        )


def _mixed(inner: dict[str, Any], ignore: NameList, where: str) -> Quantization:
    listed = inner.get("quantized_layers")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{where}: MIXED_PRECISION needs `quantized_layers`, the format of every layer")
    layers = {}
    for name, entry in listed.items():
        algorithm = str(entry.get("quant_algo") if isinstance(entry, dict) else entry).upper()
        if algorithm not in MODELOPT_ALGORITHMS:
            raise CheckpointError(
                f"{where}: quantized_layers: {name} has quant_algo {algorithm!r}; supported:"
                f" {', '.join(MODELOPT_ALGORITHMS)}"
            )
        _check_group_size(entry.get("group_size") if isinstance(entry, dict) else None, algorithm, where)
        layers[name] = MODELOPT_ALGORITHMS[algorithm]
    return Quantization("modelopt MIXED_PRECISION", [], ignore, layers)


def _fp8(data: dict[str, Any], where: str) -> Quantization:
    block = data.get("weight_block_size")
    if block != [128, 128]:
        raise CheckpointError(f"{where}: weight_block_size is {block!r}; only [128, 128] is supported for fp8")
    if data.get("activation_scheme", "dynamic") != "dynamic":
        raise CheckpointError(
            f"{where}: activation_scheme is {data['activation_scheme']!r}; only 'dynamic' goes with blocks"
        )
    if data.get("fmt") not in (None, "e4m3"):
        raise CheckpointError(f"{where}: fmt is {data['fmt']!r}; only 'e4m3' is supported: export the checkpoint in it")
    # No engine reads a quantised output matrix under this method, whether the list names it or not.
    names = ["lm_head", *_names(data, ("ignored_layers", "modules_to_not_convert"), where)]
    return Quantization("fp8", [(None, FP8_BLOCK)], _name_list(names, where))


def _compressed_tensors(data: dict[str, Any], where: str) -> Quantization:
    groups = data.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where}: `config_groups` is missing or empty")
    _check_no_more(data, where)
    rules: list[tuple[NameList | None, Scheme]] = []
    for key, group in groups.items():
        at = f"{where}: config_groups.{key}"
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise CheckpointError(f"{at} has no `weights`")
        targets = _names(group, ("targets",), at)
        scheme = _group_scheme(group, at)
        if group.get("format") not in (None, *PACKED_FORMATS[scheme.format]):
            raise CheckpointError(
                f"{at}: format {group['format']!r} is not supported for {scheme.format.name} weights; supported:"
                f" {', '.join(PACKED_FORMATS[scheme.format])}"
            )
        rules.append((None if "Linear" in targets else _name_list(targets, at), scheme))
    # A list of names goes before the class of all linear layers.
    rules.sort(key=lambda rule: rule[0] is None)
    ignore = _name_list(_names(data, ("ignore",), where), where)
    return Quantization(f"compressed-tensors {data.get('format')}", rules, ignore)


def _check_no_more(data: dict[str, Any], where: str) -> None:
    """Refuse what compressed-tensors does to weights besides quantising them, and layouts that are not read here."""
    known = [name for names in PACKED_FORMATS.values() for name in names]
    if data.get("format") not in (None, MIXED_FORMAT, *known):
        raise CheckpointError(
            f"{where}: format {data['format']!r} is not supported; supported: {', '.join(known)}, {MIXED_FORMAT}:"
            " save the checkpoint compressed"
        )
    transform = data.get("transform_config")
    if transform and transform != {"config_groups": {}}:
        raise CheckpointError(
            f"{where}: transform_config is not supported: its rotations would be left out; quantise without transforms"
        )
    sparsity = data.get("sparsity_config")
    kind = sparsity.get("format") if isinstance(sparsity, dict) else sparsity
    if sparsity and kind != "dense":
        raise CheckpointError(
            f"{where}: sparsity_config of format {kind!r} is not supported, only 'dense': save the weights uncompressed"
        )


def _group_scheme(group: dict[str, Any], at: str) -> Scheme:
    weights = group["weights"]
    kind = (weights.get("num_bits"), weights.get("type"), weights.get("strategy"))
    if kind == (4, "float", "tensor_group") and weights.get("group_size") == 16:
        return PACKED_A16 if group.get("input_activations") is None else PACKED
    if kind == (8, "float", "block") and weights.get("block_structure") == [128, 128]:
        return FP8_BLOCK
    raise CheckpointError(
        f"{at}: weights of {kind[0]} bits, type {kind[1]!r}, strategy {kind[2]!r}, group_size"
        f" {weights.get('group_size')!r}, block_structure {weights.get('block_structure')!r} are not supported;"
        " supported: 4-bit float tensor_group of 16 (NVFP4), 8-bit float block of [128, 128] (FP8)"
    )


def modelopt_config(ignore: list[str], version: str) -> dict[str, Any]:
    """`quantization_config` of a checkpoint with NVFP4 in every linear layer but those of `ignore`."""
    four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "producer": {"name": "sparkinfer", "version": version},
        "config_groups": {
            "group_0": {"input_activations": four_bits, "weights": four_bits, "targets": ["Linear"]},
        },
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def fp8_config(ignore: list[str]) -> dict[str, Any]:
    """`quantization_config` of a checkpoint with block FP8 in every linear layer but those of `ignore`."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "fmt": "e4m3",
        "modules_to_not_convert": ignore,
    }


def mixed_config(formats: Mapping[str, Format], ignore: list[str], version: str) -> dict[str, Any]:
    """`quantization_config` that names the format of every quantised layer (experts of a layer as one)."""
    algorithms: dict[Format, dict[str, Any]] = {
        Format.NVFP4: {"quant_algo": "NVFP4", "group_size": 16},
        Format.FP8: {"quant_algo": "FP8_PB_WO"},
    }
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "producer": {"name": "sparkinfer", "version": version},
        "quantized_layers": {name: algorithms[kind] for name, kind in formats.items()},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }
