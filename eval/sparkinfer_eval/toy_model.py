"""Small random hybrid checkpoints of the Qwen3.5 family, byte-identical on every machine.

Weights are uniform, taken straight from Philox's raw 64-bit stream (one stream per tensor, keyed by seed and tensor
name), so that neither a library's normal sampler nor the CPU's vector units can change a byte. Scales follow the
1/sqrt(fan-in) rule, with a_log and dt_bias drawn as Mamba2 does, so that the recurrent state forgets over tens to
thousands of tokens and the greedy continuation depends on the whole prompt.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from sparkinfer.errors import ConfigError

from .toy_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, silent_token_ids, tokenizer_config, train_tokenizer

KINDS = ("dense", "moe")


@dataclass(frozen=True)
class ToySize:
    """Shape of a generated model. Lengths are in units, not bytes; `layers` must end on a full-attention layer."""

    hidden: int = 256
    layers: int = 4
    full_attention_interval: int = 4
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 256
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_head_dim: int = 128
    conv_kernel: int = 4
    ffn: int = 512
    experts: int = 8
    experts_per_token: int = 2
    expert_ffn: int = 64
    shared_expert_ffn: int = 64
    vocab: int = 4096
    max_positions: int = 16384

    def check(self) -> None:
        """Raise ConfigError naming the first size that cannot work."""
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name} is {value}: every size must be at least 1")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.linear_value_heads % self.linear_key_heads:
            raise ConfigError(
                f"linear_value_heads ({self.linear_value_heads}) must be a multiple of "
                f"linear_key_heads ({self.linear_key_heads})"
            )
        if self.layers < self.full_attention_interval:
            raise ConfigError(
                f"{self.layers} layers hold no full-attention layer: the family has one every "
                f"{self.full_attention_interval}"
            )
        if self.experts_per_token > self.experts:
            raise ConfigError(f"experts_per_token ({self.experts_per_token}) exceeds experts ({self.experts})")
        if self.head_dim % 8:
            raise ConfigError(
                f"head_dim ({self.head_dim}) must be a multiple of 8: a quarter of it is rotated in pairs"
            )
        smallest = 256 + len(SPECIAL_TOKENS)
        if self.vocab < smallest:
            raise ConfigError(f"vocab ({self.vocab}) must be at least {smallest}: bytes and special tokens")

    @property
    def layer_types(self) -> list[str]:
        """`linear_attention` (GDN) or `full_attention` for each layer."""
        interval = self.full_attention_interval
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(self.layers)]


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and distribution of one weight: uniform with mean `mean` and standard deviation `std`.

    `law` transforms the draw: `a_log` and `dt_bias` follow Mamba2's initialisation and ignore mean and std.
    """

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    law: str = "uniform"


def _linear(name: str, out: int, fan_in: int, gain: float = 1.0) -> TensorSpec:
    return TensorSpec(f"{name}.weight", (out, fan_in), gain / math.sqrt(fan_in))


def _gdn_specs(prefix: str, size: ToySize) -> list[TensorSpec]:
    key, value = (n * size.linear_head_dim for n in (size.linear_key_heads, size.linear_value_heads))
    heads, hidden = size.linear_value_heads, size.hidden
    return [
        _linear(f"{prefix}.in_proj_qkv", 2 * key + value, hidden),
        _linear(f"{prefix}.in_proj_z", value, hidden),
        _linear(f"{prefix}.in_proj_b", heads, hidden),
        _linear(f"{prefix}.in_proj_a", heads, hidden, gain=0.5),
        TensorSpec(f"{prefix}.conv1d.weight", (2 * key + value, 1, size.conv_kernel), 1 / math.sqrt(size.conv_kernel)),
        TensorSpec(f"{prefix}.A_log", (heads,), 0.0, law="a_log"),
        TensorSpec(f"{prefix}.dt_bias", (heads,), 0.0, law="dt_bias"),
        TensorSpec(f"{prefix}.norm.weight", (size.linear_head_dim,), 0.1, mean=1.0),
        _linear(f"{prefix}.out_proj", hidden, value, gain=2.0),
    ]


def _attention_specs(prefix: str, size: ToySize) -> list[TensorSpec]:
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    return [
        _linear(f"{prefix}.q_proj", 2 * queries, size.hidden),
        _linear(f"{prefix}.k_proj", keys, size.hidden),
        _linear(f"{prefix}.v_proj", keys, size.hidden),
        _linear(f"{prefix}.o_proj", size.hidden, queries, gain=2.0),
        # 1 + w scales the unit-norm heads: above 1, so that attention is peaked rather than an average of everything.
        TensorSpec(f"{prefix}.q_norm.weight", (size.head_dim,), 0.1, mean=0.7),
        TensorSpec(f"{prefix}.k_norm.weight", (size.head_dim,), 0.1, mean=0.7),
    ]


def _mlp_specs(prefix: str, hidden: int, ffn: int) -> list[TensorSpec]:
    return [
        _linear(f"{prefix}.gate_proj", ffn, hidden),
        _linear(f"{prefix}.up_proj", ffn, hidden),
        _linear(f"{prefix}.down_proj", hidden, ffn, gain=2.0),
    ]


def _moe_specs(prefix: str, size: ToySize) -> list[TensorSpec]:
    hidden, ffn = size.hidden, size.expert_ffn
    return [
        # Wide router logits: near-ties between experts would make outputs hinge on rounding.
        _linear(f"{prefix}.gate", size.experts, hidden, gain=2.0),
        TensorSpec(f"{prefix}.experts.gate_up_proj", (size.experts, 2 * ffn, hidden), 1 / math.sqrt(hidden)),
        TensorSpec(f"{prefix}.experts.down_proj", (size.experts, hidden, ffn), 2 / math.sqrt(ffn)),
        *_mlp_specs(f"{prefix}.shared_expert", hidden, size.shared_expert_ffn),
        _linear(f"{prefix}.shared_expert_gate", 1, hidden),
    ]


def tensor_specs(kind: str, size: ToySize) -> list[TensorSpec]:
    """Every weight of the checkpoint, in the names and shapes of `transformers`' text-only classes."""
    specs = [TensorSpec("model.embed_tokens.weight", (size.vocab, size.hidden), 0.5)]
    for index, layer_type in enumerate(size.layer_types):
        layer = f"model.layers.{index}"
        specs.append(TensorSpec(f"{layer}.input_layernorm.weight", (size.hidden,), 0.1))
        specs.append(TensorSpec(f"{layer}.post_attention_layernorm.weight", (size.hidden,), 0.1))
        if layer_type == "full_attention":
            specs += _attention_specs(f"{layer}.self_attn", size)
        else:
            specs += _gdn_specs(f"{layer}.linear_attn", size)
        specs += (
            _moe_specs(f"{layer}.mlp", size) if kind == "moe" else _mlp_specs(f"{layer}.mlp", size.hidden, size.ffn)
        )
    specs.append(TensorSpec("model.norm.weight", (size.hidden,), 0.1))
    specs.append(_linear("lm_head", size.vocab, size.hidden, gain=3.0))
    return specs


def draw(spec: TensorSpec, seed: int) -> torch.Tensor:
    """The tensor of `spec` in bfloat16, shape `spec.shape`; depends on nothing but the seed and the spec."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()[:8], "little")
    raw = np.random.Philox(key=key).random_raw(math.prod(spec.shape))
    unit = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
    if spec.law == "a_log":
        # A uniform in [1, 16); dt log-uniform in [0.001, 0.1), bias its softplus inverse (Mamba2, arXiv 2405.21060).
        values = np.log(1.0 + 15.0 * unit)
    elif spec.law == "dt_bias":
        step = np.exp(math.log(1e-3) + unit * (math.log(1e-1) - math.log(1e-3)))
        values = step + np.log(-np.expm1(-step))
    else:
        values = spec.mean + (2.0 * unit - 1.0) * (spec.std * math.sqrt(3.0))
    return torch.from_numpy(values.reshape(spec.shape)).to(torch.bfloat16)


def model_config(kind: str, size: ToySize) -> dict[str, Any]:
    """`config.json` of the checkpoint."""
    eos, pad = SPECIAL_TOKENS.index("<|im_end|>"), SPECIAL_TOKENS.index("<|endoftext|>")
    config: dict[str, Any] = {
        "architectures": ["Qwen3_5ForCausalLM" if kind == "dense" else "Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_text" if kind == "dense" else "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": size.layer_types,
        "full_attention_interval": size.full_attention_interval,
        "linear_conv_kernel_dim": size.conv_kernel,
        "linear_key_head_dim": size.linear_head_dim,
        "linear_value_head_dim": size.linear_head_dim,
        "linear_num_key_heads": size.linear_key_heads,
        "linear_num_value_heads": size.linear_value_heads,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": size.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope_parameters(size.head_dim),
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    if kind == "dense":
        config["intermediate_size"] = size.ffn
    else:
        config.update(
            num_experts=size.experts,
            num_experts_per_tok=size.experts_per_token,
            moe_intermediate_size=size.expert_ffn,
            shared_expert_intermediate_size=size.shared_expert_ffn,
            output_router_logits=False,
            router_aux_loss_coef=0.001,
        )
    return dict(sorted(config.items()))


def rope_parameters(head_dim: int) -> dict[str, Any]:
    """Rotary settings: a quarter of the head, split over three position axes in the family's 11:11:10 proportion."""
    pairs = head_dim // 8
    last = pairs * 10 // 32
    first = (pairs - last + 1) // 2
    return {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [first, pairs - last - first, last],
        "mrope_interleaved": True,
    }


def parameter_count(kind: str, size: ToySize) -> int:
    """Number of weights."""
    return sum(math.prod(spec.shape) for spec in tensor_specs(kind, size))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def generate(kind: str, folder: Path, seed: int = 0, size: ToySize | None = None) -> None:
    """Write the checkpoint to `folder`, which appears whole (by rename) or not at all.

    Raises ConfigError on an unknown kind, sizes that cannot work, or a folder that exists and is not empty.
    """
    size = size or ToySize()
    if kind not in KINDS:
        raise ConfigError(f"unknown model kind {kind!r}: use one of {', '.join(KINDS)}")
    size.check()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already: remove it or name another folder")
    temporary = folder.with_name(f".{folder.name}.part")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    tokenizer = train_tokenizer(size.vocab)
    silent = silent_token_ids(tokenizer)
    tensors = {}
    for spec in tensor_specs(kind, size):
        tensor = draw(spec, seed)
        if spec.name == "lm_head.weight":
            # Rows of special tokens and of lone non-ASCII bytes are zero: never the best logit, so that an answer is
            # readable text token by token (a stream of half characters would have no first token to time).
            tensor[silent] = 0
        tensors[spec.name] = tensor
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    (temporary / "model.safetensors").chmod(0o644)
    # The key by which a report knows that the weights are random, wherever the folder goes (plan/identity.py).
    config = {**model_config(kind, size), "random_weights": True}
    _write_json(temporary / "config.json", config)
    _write_json(
        temporary / "generation_config.json",
        {"eos_token_id": [config["eos_token_id"], config["pad_token_id"]], "pad_token_id": config["pad_token_id"]},
    )
    tokenizer.save(str(temporary / "tokenizer.json"))
    _write_json(temporary / "tokenizer_config.json", tokenizer_config(size.max_positions))
    (temporary / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    if folder.exists():
        folder.rmdir()
    temporary.rename(folder)
