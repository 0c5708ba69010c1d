"""The two architectures, as a Hugging Face `config.json` describes them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError
from sparkinfer_models.tokenizer import END_OF_TEXT_ID, IM_END_ID, VOCAB_SIZE

ROTARY_FRACTION = 0.25
ROPE_THETA = 10_000_000
MROPE_SECTION = [11, 11, 10]


@dataclass(frozen=True)
class ModelConfig:
    """Shapes of one model. Every fourth layer is full attention, the others gated DeltaNet.

    `intermediate_size` is the dense MLP's width; in the MoE form it is the shared expert's, and `expert_size` that of
    each of `num_experts` experts, `experts_per_token` of which a token uses.
    """

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 128
    num_layers: int = 8
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 256
    linear_k_heads: int = 1
    linear_v_heads: int = 2
    linear_dim: int = 128
    conv_kernel: int = 4
    intermediate_size: int = 384
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    max_positions: int = 16384
    eps: float = 1e-6

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * ROTARY_FRACTION)

    @property
    def layer_types(self) -> list[str]:
        return ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(self.num_layers)]

    @property
    def key_dim(self) -> int:
        return self.linear_k_heads * self.linear_dim

    @property
    def value_dim(self) -> int:
        return self.linear_v_heads * self.linear_dim

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that transformers and vLLM read."""
        shared: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "linear_num_key_heads": self.linear_k_heads,
            "linear_num_value_heads": self.linear_v_heads,
            "linear_key_head_dim": self.linear_dim,
            "linear_value_head_dim": self.linear_dim,
            "linear_conv_kernel_dim": self.conv_kernel,
            "layer_types": self.layer_types,
            "full_attention_interval": 4,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "mamba_ssm_dtype": "float32",
            "dtype": "bfloat16",
            "eos_token_id": IM_END_ID,
            "pad_token_id": END_OF_TEXT_ID,
            "bos_token_id": None,
            "partial_rotary_factor": ROTARY_FRACTION,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": ROPE_THETA,
                "partial_rotary_factor": ROTARY_FRACTION,
                "mrope_interleaved": True,
                "mrope_section": MROPE_SECTION,
            },
        }
        if not self.is_moe:
            return {
                "architectures": ["Qwen3_5ForCausalLM"],
                "model_type": "qwen3_5_text",
                "intermediate_size": self.intermediate_size,
                **shared,
            }
        return {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.expert_size,
            "shared_expert_intermediate_size": self.intermediate_size,
            "router_aux_loss_coef": 0.01,
            "output_router_logits": False,
            **shared,
        }

    @classmethod
    def from_hf(cls, folder: Path) -> ModelConfig:
        """Reads back the `config.json` of a folder written here."""
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(f"{path} is missing: {folder} is no model folder")
        hf = json.loads(path.read_text())
        moe = hf["model_type"] == "qwen3_5_moe_text"
        return cls(
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=hf["num_attention_heads"],
            num_kv_heads=hf["num_key_value_heads"],
            head_dim=hf["head_dim"],
            linear_k_heads=hf["linear_num_key_heads"],
            linear_v_heads=hf["linear_num_value_heads"],
            linear_dim=hf["linear_key_head_dim"],
            conv_kernel=hf["linear_conv_kernel_dim"],
            intermediate_size=hf["shared_expert_intermediate_size"] if moe else hf["intermediate_size"],
            num_experts=hf.get("num_experts", 0),
            experts_per_token=hf.get("num_experts_per_tok", 0),
            expert_size=hf.get("moe_intermediate_size", 0),
            max_positions=hf["max_position_embeddings"],
            eps=hf["rms_norm_eps"],
        )


DENSE = ModelConfig()
MOE = replace(DENSE, intermediate_size=64, num_experts=8, experts_per_token=2, expert_size=64)
MODELS = {"dense": DENSE, "moe": MOE}


def toy(config: ModelConfig) -> ModelConfig:
    """The same kind of model at a size that trains a few steps on a CPU in seconds."""
    small = replace(config, vocab_size=512, hidden_size=32, num_layers=4, head_dim=32, linear_dim=16)
    small = replace(small, intermediate_size=32, max_positions=256)
    return replace(small, num_experts=4, expert_size=16) if config.is_moe else small
