"""Small sources to quantise, and shorthand for running the program."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sparkinfer_models.random_checkpoint import write_checkpoint
from sparkinfer_models.real_shapes import shape_config

from sparkinfer.quantization.quantizer import Options, Quantizer, Result
from sparkinfer.quantization.schemes import Format

torch.set_num_threads(1)
TEXT = " ".join(f"w{number * 37 % 480}" for number in range(1200))
"""Words of the toy tokenizer: two calibration sequences."""

MakeSource = Callable[..., Path]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> MakeSource:
    """Writes a BF16 toy checkpoint, once for each set of arguments."""
    root, made = tmp_path_factory.mktemp("sources"), {}

    def make(shape: str = "toy-dense", shard_bytes: int = 4 << 30, **changes: Any) -> Path:
        key = json.dumps([shape, shard_bytes, changes], sort_keys=True)
        if key not in made:
            made[key] = root / str(len(made))
            config = {**shape_config(shape), **changes}
            write_checkpoint(made[key], config, None, seed=7, threads=1, shard_bytes=shard_bytes)
        return made[key]

    return make


OTHERS = {
    "model.visual.patch_embed.proj.weight": (8, 3, 2, 4, 4),
    "model.visual.blocks.0.attn.qkv.weight": (24, 8),
    "model.visual.blocks.0.attn.qkv.bias": (24,),
    "model.visual.merger.linear_fc1.weight": (16, 16),
    "mtp.fc.weight": (256, 512),
    "mtp.layers.0.self_attn.q_proj.weight": (64, 256),
    "mtp.layers.0.self_attn.k_proj.weight": (32, 256),
    "mtp.layers.0.self_attn.v_proj.weight": (32, 256),
    "mtp.layers.0.mlp.experts.0.gate_proj.weight": (64, 256),
    "mtp.layers.0.mlp.shared_expert.down_proj.weight": (256, 64),
    "mtp.norm.weight": (256,),
}
"""Some tensors of a vision tower and an MTP head, and their shapes."""


@pytest.fixture(scope="session")
def multimodal(source: MakeSource, tmp_path_factory: pytest.TempPathFactory) -> MakeSource:
    """A source as the language part of a multimodal checkpoint, beside `OTHERS`."""
    root = tmp_path_factory.mktemp("multimodal")

    def make(shape: str = "toy-dense") -> Path:
        folder = root / shape
        if folder.exists():
            return folder
        shutil.copytree(source(shape), folder)
        data = json.loads((folder / "config.json").read_text())
        name = data.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")
        outer = {"architectures": [name], "text_config": data, "vision_config": {}}
        (folder / "config.json").write_text(json.dumps(outer))
        tensors = {
            f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name: value
            for name, value in load_file(folder / "model.safetensors").items()
        }
        tensors |= {name: torch.ones(size, dtype=torch.bfloat16) for name, size in OTHERS.items()}
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration text."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


Quantise = Callable[..., Result]


@pytest.fixture
def quantise(text: Path) -> Quantise:
    """Runs the quantizer on a folder."""

    def run(folder: Path, target: Path, kind: str = "nvfp4", **options: Any) -> Result:
        settings = {"calibration": (text,), "calibration_tokens": 512, **options}
        return Quantizer(folder, target, Options(format=Format(kind), **settings)).run()

    return run
