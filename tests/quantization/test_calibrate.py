"""Statistics of the inputs of linear layers, against hooks on a transformers model."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sparkinfer.models.config import load_config
from sparkinfer.quantization.calibrate import PRIOR, calibrate, calibration_text, calibration_tokens

TOKENS = torch.randint(0, 480, (2, 64), generator=torch.Generator().manual_seed(1))


def observed(folder, tokens):
    """{module: (amax, mean square)} of every nn.Linear, and the inputs of the experts' blocks."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}

    def hook(name):
        def record(module, inputs):
            x = inputs[0].detach().float().flatten(0, -2)
            found[name] = float(x.abs().max()), x.square().mean(0)

        return record

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(hook(name))
    with torch.no_grad():
        model(tokens)
    return found, model


@pytest.fixture
def float_source(source, tmp_path):
    """A toy checkpoint in float32."""

    def make(shape):
        folder = tmp_path / shape
        shutil.copytree(source(shape), folder)
        for path in folder.glob("*.safetensors"):
            save_file({name: tensor.float() for name, tensor in load_file(path).items()}, path)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
        return folder

    return make


@pytest.mark.parametrize("shape", ["toy-dense", "toy-moe"])
def test_statistics_are_those_of_transformers(float_source, shape):
    folder = float_source(shape)
    done = []
    found = calibrate(folder, load_config(folder), TOKENS, torch.device("cpu"), lambda *now: done.append(now))
    expected, _ = observed(folder, TOKENS)
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    compared = 0
    for name, (amax, mean_square) in expected.items():
        if name.endswith(("mlp.gate", "shared_expert_gate")):
            continue
        assert found[name].amax == pytest.approx(amax, rel=1e-3), name
        assert torch.allclose(found[name].mean_square, mean_square, rtol=2e-3, atol=1e-6), name
        compared += 1
    assert compared > 25
    assert {"model.layers.0.linear_attn.in_proj_qkv", "model.layers.3.self_attn.o_proj", "lm_head"} <= set(expected)


def test_experts_see_the_tokens_that_are_routed_to_them(float_source):
    folder = float_source("toy-moe")
    config = load_config(folder)
    found = calibrate(folder, config, TOKENS, torch.device("cpu"))
    _, model = observed(folder, TOKENS)
    layer, seen = model.model.layers[0], {}
    layer.mlp.register_forward_pre_hook(lambda module, inputs: seen.update(x=inputs[0].detach().flatten(0, 1)))
    with torch.no_grad():
        model(TOKENS)
        x = seen["x"]
        chosen = (x @ layer.mlp.gate.weight.T).topk(4, dim=-1).indices
        squares = x.square()
        counts = torch.stack([(chosen == expert).any(-1).sum() for expert in range(16)])
        everyone = torch.stack([squares[(chosen == e).any(-1)].sum(0) for e in range(16)]).sum(0) / counts.sum()
    for expert in (0, 9):
        rows = squares[(chosen == expert).any(-1)]
        expected = (rows.sum(0) + PRIOR * everyone) / (len(rows) + PRIOR)
        got = found[f"model.layers.0.mlp.experts.{expert}.up_proj"]
        assert torch.allclose(got.mean_square, expected, rtol=1e-3)
        assert got.amax == pytest.approx(float(x.abs().max()), rel=1e-4)


def test_sequences_come_from_all_over_the_text(source):
    text = " ".join(f"w{number}" for number in range(480)) + " "
    tokens = calibration_tokens(source(), text * 32, 2048)
    assert tokens.shape == (4, 512)
    assert len({tuple(row.tolist()) for row in tokens}) > 1
    assert "assignment" in calibration_text([])
