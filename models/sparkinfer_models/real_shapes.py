"""Configs of the published sizes of the family, and a tokenizer of numbered words for random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 248320
END, PAD = 248046, 248044
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"

_COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "mamba_ssm_dtype": "float32",
    "use_cache": True,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.02,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
_DENSE = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
_MOE = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
_SIZES: dict[str, dict[str, Any]] = {
    "27b": {
        **_DENSE,
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "intermediate_size": 17408,
    },
    "35b": {
        **_MOE,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}
_TOY = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "vocab_size": 512,
    "eos_token_id": 500,
    "pad_token_id": 501,
    "max_position_embeddings": 4096,
}
_SIZES["toy-dense"] = {**_DENSE, **_TOY, "intermediate_size": 512}
_SIZES["toy-moe"] = {
    **_MOE,
    **_TOY,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
SHAPES = tuple(_SIZES)


def shape_config(name: str, layers: int | None = None) -> dict[str, Any]:
    """`config.json` of a size of `SHAPES`; `layers` keeps that many of its layers."""
    config = {**_COMMON, **_SIZES[name]}
    count = layers or config["num_hidden_layers"]
    kinds = ["full_attention" if (number + 1) % 4 == 0 else "linear_attention" for number in range(count)]
    return {**config, "num_hidden_layers": count, "layer_types": kinds}


def word_tokenizer(folder: Path, vocabulary: int, end: int, pad: int) -> None:
    """Write a tokenizer whose words are w0, w1, ... by their ids, so that any prompt of ids has a text and back."""
    added = [
        {
            "id": token,
            "content": f"w{token}",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token in sorted({end, pad})
    ]
    words = {f"w{number}": number for number in range(vocabulary)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": f"w{end}",
        "pad_token": f"w{pad}",
        "model_max_length": 262144,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
