"""Small sources to quantise, and shorthand for running the program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
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
