"""A small trained-tokenizer model folder, and a server of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def write_model(folder: Path, seed: int) -> None:
    """A dense model of random weights with the reference models' tokenizer."""
    import transformers

    config = transformers.Qwen3_5TextConfig(
        vocab_size=2048,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.15,
        num_hidden_layers=4,
        intermediate_size=48,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    transformers.Qwen3_5ForCausalLM(config).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(ROOT / "models" / "spark-tiny-dense" / name, folder / name)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accuracy") / "model"
    write_model(folder, 5)
    return folder


@pytest.fixture(scope="session")
def nearly(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, one matrix scaled by a tenth: a fault that perplexity alone would hardly show."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("accuracy") / "nearly"
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.3.self_attn.o_proj.weight"] *= 1.1
    save_file(weights, file, metadata={"format": "pt"})
    return folder
