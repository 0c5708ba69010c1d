"""Random checkpoints: what they hold depends on seed and shape alone, and is what the config says."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from sparkinfer_models.random_checkpoint import write_checkpoint
from sparkinfer_models.real_shapes import shape_config
from tokenizers import Tokenizer

from sparkinfer.models.config import parse_config
from sparkinfer.models.tensors import Role, language_tensors
from sparkinfer.quantization import fp8, nvfp4
from sparkinfer.quantization.schemes import Format

ROOT = Path(__file__).resolve().parents[2]


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def all_tensors(folder):
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def test_bytes_depend_on_the_seed_alone(tmp_path):
    config = shape_config("toy-moe")
    for name, seed, threads in (("a", 1, 1), ("b", 1, 4), ("c", 2, 4)):
        write_checkpoint(tmp_path / name, config, Format.NVFP4, seed, threads, shard_bytes=1 << 20)
    first = digests(tmp_path / "a")
    assert first == digests(tmp_path / "b")
    assert len([name for name in first if name.endswith(".safetensors")]) > 2
    other = digests(tmp_path / "c")
    assert [name for name in first if first[name] != other[name]] == [n for n in first if n.endswith(".safetensors")]


@pytest.mark.parametrize("choice", [Format.NVFP4, Format.FP8, None])
def test_depth_scales_change_what_adds_to_the_residual_stream(tmp_path, choice):
    config = shape_config("toy-moe")
    write_checkpoint(tmp_path / "flat", config, choice, seed=3)
    write_checkpoint(tmp_path / "depth", config, choice, seed=3, scales="depth")
    flat, depth = all_tensors(tmp_path / "flat"), all_tensors(tmp_path / "depth")
    shape, ratios = parse_config(config), {}
    for spec in language_tensors(shape):
        ratios[spec.name] = 1.0
        for name in (spec.name, f"{spec.module}.weight_scale_2", f"{spec.module}.weight_scale_inv"):
            if name in flat and flat[name].dtype in (torch.float32, torch.bfloat16):
                ratios[spec.name] *= float(
                    depth[name].float().abs().sum() / flat[name].float().abs().sum().clamp_min(1e-9)
                )
    less = 1 / (2 * shape.num_layers) ** 0.5
    for name, ratio in ratios.items():
        if name == "model.embed_tokens.weight":
            assert ratio == pytest.approx(50, rel=0.01)
        elif name.split(".")[-2] in ("o_proj", "out_proj", "down_proj"):
            assert ratio == pytest.approx(less, rel=0.01), name
        elif "norm" not in name:
            assert ratio == 1.0, name


@pytest.mark.parametrize("shape", ["toy-dense", "toy-moe"])
@pytest.mark.parametrize("choice", [Format.NVFP4, Format.FP8, None])
def test_weights_have_the_stated_deviation(tmp_path, shape, choice):
    config = shape_config(shape)
    size = write_checkpoint(tmp_path, config, choice, seed=3)
    tensors = all_tensors(tmp_path)
    assert size == sum(value.numel() * value.element_size() for value in tensors.values())
    for spec in language_tensors(parse_config(config)):
        stored = tensors[spec.name]
        if stored.dtype == torch.uint8:
            value = nvfp4.dequantise(
                stored, tensors[f"{spec.module}.weight_scale"], tensors[f"{spec.module}.weight_scale_2"]
            )
            assert 0 < float(tensors[f"{spec.module}.input_scale"]) < 0.01
        elif stored.dtype == torch.float8_e4m3fn:
            value = fp8.dequantise(stored, tensors[f"{spec.module}.weight_scale_inv"])
        else:
            value = stored.float()
        assert tuple(value.shape) == spec.shape
        assert torch.isfinite(value).all()
        if spec.role is Role.LINEAR and value.numel() > 10000:
            assert float(value.std()) == pytest.approx(0.02, rel=0.03)
            assert abs(float(value.mean())) < 0.001
        if spec.role is Role.DECAY:
            assert stored.dtype == torch.float32
            assert 0 <= float(value.min()) <= float(value.max()) <= 2.78


def test_config_and_tokenizer(tmp_path):
    write_checkpoint(tmp_path, shape_config("toy-moe"), Format.NVFP4, seed=0)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["quant_algo"]) == ("modelopt", "NVFP4")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        quantised = {name.removesuffix(".weight_scale_2") for name in file.keys() if name.endswith("_scale_2")}  # noqa: SIM118
    assert not quantised & set(config["ignore"])
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.0.linear_attn.in_proj_a"} <= set(config["ignore"])
    assert "model.layers.3.mlp.experts.15.down_proj" in quantised
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("w3 w500 w17").ids == [3, 500, 17]


def test_command_line(tmp_path):
    command = [sys.executable, str(ROOT / "models/random_checkpoint.py"), str(tmp_path / "out"), "--shape", "toy-dense"]
    done = subprocess.run([*command, "--layers", "2", "--seed", "5"], capture_output=True, text=True, check=True)
    assert "toy-dense nvfp4, seed 5" in done.stdout
    assert json.loads((tmp_path / "out/config.json").read_text())["num_hidden_layers"] == 2
    assert subprocess.run([*command, "--layers", "-1"], capture_output=True, check=False).returncode == 2
