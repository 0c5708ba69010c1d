"""A small hybrid checkpoint for the checks."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of a dense and a MoE model, and of one without linear attention."""
    import transformers

    root = tmp_path_factory.mktemp("models")
    shared = {
        "vocab_size": 128,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 300,
        "initializer_range": 0.15,
    }
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    kinds = {
        "dense": ("Qwen3_5", {"num_hidden_layers": 4, "intermediate_size": 48}),
        "moe": ("Qwen3_5Moe", {"num_hidden_layers": 4, "shared_expert_intermediate_size": 16, **moe}),
        "attention": ("Qwen3_5", {"num_hidden_layers": 1, "intermediate_size": 48, "layer_types": ["full_attention"]}),
    }
    for name, (kind, settings) in kinds.items():
        torch.manual_seed(5)
        config = getattr(transformers, f"{kind}TextConfig")(**shared, **settings)
        getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(root / name)
    return root
