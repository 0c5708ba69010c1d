"""The shape of a Qwen3.5-family language model, read from a checkpoint's `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkinfer.errors import CheckpointError
from sparkinfer.quantization.schemes import Quantization, parse_quantization

DENSE = "Qwen3_5ForCausalLM"
MOE = "Qwen3_5MoeForCausalLM"
ARCHITECTURES = {
    DENSE: False,
    MOE: True,
    "Qwen3_5ForConditionalGeneration": False,
    "Qwen3_5MoeForConditionalGeneration": True,
}
"""Supported architectures, and whether they are mixtures of experts. The last two serve their language part."""

LINEAR = "linear_attention"
FULL = "full_attention"
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of the language model. Dimensions count elements, positions count tokens."""

    architecture: str
    multimodal: bool
    hidden_size: int
    layer_types: tuple[str, ...]
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: str
    """The checkpoint's dtype by name, `bfloat16` when it does not say."""
    eos_token_ids: tuple[int, ...]
    # full attention
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    # Gated DeltaNet
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_width: int
    # feed-forward: dense when `num_experts` is 0
    intermediate_size: int
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    quantization: Quantization | None = field(default=None, compare=False)
    """Which modules are quantised, and how; None when none is."""
    dtype_named: bool = field(default=True, compare=False)
    """Whether config.json says the dtype."""

    @property
    def num_layers(self) -> int:
        """All layers."""
        return len(self.layer_types)

    @property
    def num_full_layers(self) -> int:
        """Layers with a KV cache."""
        return self.layer_types.count(FULL)

    @property
    def num_linear_layers(self) -> int:
        """Layers with a recurrent state."""
        return self.layer_types.count(LINEAR)

    @property
    def steady(self) -> bool:
        """Whether a CPU keeps to operations whose last bits do not depend on how prompts are cut and batched: a router
        turns last bits into other experts."""
        return self.num_experts > 0

    @property
    def conv_channels(self) -> int:
        """Channels under the convolution: queries, keys and values of Gated DeltaNet."""
        return 2 * self.linear_key_heads * self.linear_key_dim + self.linear_value_heads * self.linear_value_dim


class _Fields:
    """Reads typed fields of one JSON object and names the field in every complaint."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def fail(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: `{name}` {problem}")

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.data.get(name, default)
        if value is None:
            raise self.fail(name, "is missing; it is needed to build the model")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(name, f"is {value!r}, expected a whole number")
        if value < minimum:
            raise self.fail(name, f"is {value}, expected at least {minimum}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.fail(name, f"is {value!r}, expected a positive number")
        return float(value)

    def require(self, name: str, wanted: object, default: object) -> None:
        value = self.data.get(name, default)
        if value != wanted:
            raise self.fail(name, f"is {value!r}; only {wanted!r} is supported")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a model folder. Raises CheckpointError when it is absent or malformed."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: give the folder of a `transformers` checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}, expected a JSON object")
    return data


def load_config(folder: Path) -> ModelConfig:
    """Read and validate a model folder's `config.json` (and `generation_config.json` for the end-of-text ids).

    Raises:
        CheckpointError: naming the file and the field that is missing, malformed or not supported.
    """
    path = folder / "config.json"
    data = read_json(path)
    legacy = folder / "hf_quant_config.json"
    if "quantization_config" not in data and legacy.exists():
        # Where ModelOpt wrote it before config.json had a place for it.
        data["quantization_config"] = read_json(legacy)
    generation = folder / "generation_config.json"
    return parse_config(data, str(path), read_json(generation) if generation.exists() else {})


def parse_config(
    data: dict[str, Any], where: str = "config.json", generation: dict[str, Any] | None = None
) -> ModelConfig:
    """Turn the content of `config.json` into a `ModelConfig`; `where` begins every error message.

    Raises:
        CheckpointError: naming the field.
    """
    architectures = data.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(f"{where}: `architectures` is {architectures!r}; supported: {', '.join(ARCHITECTURES)}")
    multimodal = name.endswith("ForConditionalGeneration")
    text = data.get("text_config") if multimodal else data
    if not isinstance(text, dict):
        raise CheckpointError(
            f"{where}: `text_config` is missing; a multimodal checkpoint keeps its language model there"
        )
    if multimodal:
        where = f"{where} (text_config)"
    fields = _Fields(text, where)
    for flag, wanted in (("attention_bias", False), ("attn_output_gate", True), ("hidden_act", "silu")):
        fields.require(flag, wanted, wanted)
    fields.require("mamba_ssm_dtype", "float32", "float32")
    rotary_dim, theta = _rotary(fields)
    named = text.get("dtype") or text.get("torch_dtype") or data.get("dtype") or data.get("torch_dtype")
    dtype = named or "bfloat16"
    if dtype not in DTYPES:
        raise fields.fail("dtype", f"is {dtype!r}; supported: {', '.join(DTYPES)}")
    moe = ARCHITECTURES[name]
    quantization = data.get("quantization_config") or text.get("quantization_config")
    layers = _layer_types(fields)
    config = ModelConfig(
        architecture=name,
        multimodal=multimodal,
        hidden_size=fields.integer("hidden_size"),
        layer_types=layers,
        vocab_size=fields.integer("vocab_size"),
        max_positions=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(text.get("tie_word_embeddings", data.get("tie_word_embeddings", False))),
        dtype=dtype,
        eos_token_ids=_eos(fields, data, generation or {}),
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=fields.integer("head_dim"),
        rotary_dim=rotary_dim,
        rope_theta=theta,
        linear_key_heads=fields.integer("linear_num_key_heads"),
        linear_value_heads=fields.integer("linear_num_value_heads"),
        linear_key_dim=fields.integer("linear_key_head_dim"),
        linear_value_dim=fields.integer("linear_value_head_dim"),
        conv_width=fields.integer("linear_conv_kernel_dim", minimum=2),
        intermediate_size=0 if moe else fields.integer("intermediate_size"),
        num_experts=fields.integer("num_experts") if moe else 0,
        experts_per_token=fields.integer("num_experts_per_tok") if moe else 0,
        moe_intermediate_size=fields.integer("moe_intermediate_size") if moe else 0,
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size") if moe else 0,
        quantization=_quantization(quantization, where, multimodal, layers) if quantization else None,
        dtype_named=bool(named),
    )
    _check_shape(config, fields)
    return config


def _quantization(data: object, where: str, multimodal: bool, layers: tuple[str, ...]) -> Quantization:
    """`parse_quantization`, whose refusal names a tensor that cannot be read for it."""
    try:
        return parse_quantization(data, f"{where}: quantization_config")
    except CheckpointError as error:
        module = "self_attn.q_proj" if layers[0] == FULL else "linear_attn.in_proj_qkv"
        first = f"model.{'language_model.' if multimodal else ''}layers.0.{module}"
        raise CheckpointError(f"{error}; so tensor {first}.weight and others like it cannot be read") from error


def _layer_types(fields: _Fields) -> tuple[str, ...]:
    count = fields.integer("num_hidden_layers")
    types = fields.data.get("layer_types")
    if types is None:
        interval = fields.integer("full_attention_interval", 4)
        types = [FULL if (index + 1) % interval == 0 else LINEAR for index in range(count)]
    if not isinstance(types, list) or len(types) != count:
        raise fields.fail("layer_types", f"must list num_hidden_layers = {count} layers")
    for kind in types:
        if kind not in (LINEAR, FULL):
            raise fields.fail("layer_types", f"holds {kind!r}; supported: {LINEAR}, {FULL}")
    return tuple(types)


def _rotary(fields: _Fields) -> tuple[int, float]:
    rope = fields.data.get("rope_parameters") or fields.data.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise fields.fail("rope_parameters", f"is {rope!r}, expected an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise fields.fail("rope_parameters", f"asks for rope type {kind!r}; only the default one is supported")
    merged = _Fields({**fields.data, **rope}, fields.where)
    factor = merged.number("partial_rotary_factor", 0.25)
    rotary_dim = int(fields.integer("head_dim") * factor)
    if factor > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise fields.fail(
            "partial_rotary_factor", f"is {factor}: it must leave an even number of head dimensions to rotate"
        )
    return rotary_dim, merged.number("rope_theta", 10000.0)


def _eos(fields: _Fields, outer: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    found: list[int] = []
    for source in (generation, fields.data, outer):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise fields.fail("eos_token_id", f"holds {token!r}, expected token ids")
            found.append(token)
    return tuple(dict.fromkeys(found))


def _check_shape(config: ModelConfig, fields: _Fields) -> None:
    if config.num_heads % config.num_kv_heads:
        raise fields.fail(
            "num_attention_heads", f"is {config.num_heads}, not a multiple of num_key_value_heads {config.num_kv_heads}"
        )
    if config.linear_value_heads % config.linear_key_heads:
        raise fields.fail(
            "linear_num_value_heads",
            f"is {config.linear_value_heads}, not a multiple of linear_num_key_heads {config.linear_key_heads}",
        )
    if config.experts_per_token > config.num_experts:
        raise fields.fail(
            "num_experts_per_tok", f"is {config.experts_per_token}, more than num_experts {config.num_experts}"
        )
