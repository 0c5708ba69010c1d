"""Every tensor of a text-only checkpoint, from its config: names, shapes and roles.

Experts are listed one by one, the layout in which checkpoints are published and quantised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from sparkinfer.models.config import FULL, ModelConfig


class Role(Enum):
    """What a tensor is to the model."""

    LINEAR = "linear"
    """Weight [N, K] of a layer that may be quantised."""
    ROUTER = "router"
    """Weight of a gate that chooses or weighs experts: kept in 16 bits by every engine."""
    EMBEDDING = "embedding"
    CONVOLUTION = "convolution"
    NORM = "norm"
    """Zero-centred weight of a norm."""
    PLAIN_NORM = "plain norm"
    """Weight of the norm behind Gated DeltaNet, centred at one."""
    DECAY = "decay"
    """`A_log`, the logarithm of a decay rate."""
    DT_BIAS = "dt_bias"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the unquantised checkpoint."""

    name: str
    shape: tuple[int, ...]
    role: Role

    @property
    def module(self) -> str:
        """The name without `.weight`."""
        return self.name.removesuffix(".weight")


def language_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """All tensors of the language model, embedding first, layer by layer, head last."""
    hidden, vocab = config.hidden_size, config.vocab_size
    yield TensorSpec("model.embed_tokens.weight", (vocab, hidden), Role.EMBEDDING)
    for number, kind in enumerate(config.layer_types):
        prefix = f"model.layers.{number}."
        yield TensorSpec(f"{prefix}input_layernorm.weight", (hidden,), Role.NORM)
        yield from (
            _attention(config, f"{prefix}self_attn.") if kind == FULL else _delta_net(config, f"{prefix}linear_attn.")
        )
        yield TensorSpec(f"{prefix}post_attention_layernorm.weight", (hidden,), Role.NORM)
        if config.num_experts:
            yield from _moe(config, f"{prefix}mlp.")
        else:
            yield from _swiglu(f"{prefix}mlp.", hidden, config.intermediate_size)
    yield TensorSpec("model.norm.weight", (hidden,), Role.NORM)
    if not config.tie_word_embeddings:
        yield TensorSpec("lm_head.weight", (vocab, hidden), Role.LINEAR)


def _linear(name: str, rows: int, columns: int) -> TensorSpec:
    return TensorSpec(f"{name}.weight", (rows, columns), Role.LINEAR)


def _attention(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, size = config.hidden_size, config.head_dim
    yield _linear(f"{prefix}q_proj", config.num_heads * 2 * size, hidden)
    yield _linear(f"{prefix}k_proj", config.num_kv_heads * size, hidden)
    yield _linear(f"{prefix}v_proj", config.num_kv_heads * size, hidden)
    yield _linear(f"{prefix}o_proj", hidden, config.num_heads * size)
    yield TensorSpec(f"{prefix}q_norm.weight", (size,), Role.NORM)
    yield TensorSpec(f"{prefix}k_norm.weight", (size,), Role.NORM)


def _delta_net(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, heads, size = config.hidden_size, config.linear_value_heads, config.linear_value_dim
    yield _linear(f"{prefix}in_proj_qkv", config.conv_channels, hidden)
    yield _linear(f"{prefix}in_proj_z", heads * size, hidden)
    yield _linear(f"{prefix}in_proj_b", heads, hidden)
    yield _linear(f"{prefix}in_proj_a", heads, hidden)
    yield TensorSpec(f"{prefix}conv1d.weight", (config.conv_channels, 1, config.conv_width), Role.CONVOLUTION)
    yield TensorSpec(f"{prefix}dt_bias", (heads,), Role.DT_BIAS)
    yield TensorSpec(f"{prefix}A_log", (heads,), Role.DECAY)
    yield TensorSpec(f"{prefix}norm.weight", (size,), Role.PLAIN_NORM)
    yield _linear(f"{prefix}out_proj", hidden, heads * size)


def _swiglu(prefix: str, hidden: int, inner: int) -> Iterator[TensorSpec]:
    yield _linear(f"{prefix}gate_proj", inner, hidden)
    yield _linear(f"{prefix}up_proj", inner, hidden)
    yield _linear(f"{prefix}down_proj", hidden, inner)


def _moe(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden = config.hidden_size
    yield TensorSpec(f"{prefix}gate.weight", (config.num_experts, hidden), Role.ROUTER)
    for expert in range(config.num_experts):
        yield from _swiglu(f"{prefix}experts.{expert}.", hidden, config.moe_intermediate_size)
    yield from _swiglu(f"{prefix}shared_expert.", hidden, config.shared_intermediate_size)
    yield TensorSpec(f"{prefix}shared_expert_gate.weight", (1, hidden), Role.ROUTER)
