"""The training network against transformers' Qwen3.5 classes, and against itself token by token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sparkinfer_models.checkpoint import load_network, save_model
from sparkinfer_models.config import MODELS, ModelConfig, toy
from sparkinfer_models.network import Cache, Network, initialise
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparkinfer.errors import CheckpointError, ConfigError

SHIPPED = Path(__file__).resolve().parents[2] / "models"


def _toy_folder(name: str, folder: Path) -> Path:
    network = Network(toy(MODELS[name]))
    initialise(network, 3)
    save_model(network, folder)
    return folder


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_exported_weights_give_transformers_the_same_logits(name: str, tmp_path: Path) -> None:
    folder = _toy_folder(name, tmp_path)
    network = load_network(folder, torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, 512, (2, 90), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = reference(ids, output_hidden_states=True)
        ours = network(ids, taps=(0, 2))
    assert type(reference).__name__ == network.config.to_hf()["architectures"][0]
    torch.testing.assert_close(network.logits(ours.hidden), theirs.logits, atol=2e-5, rtol=1e-4)
    for tap, index in zip(ours.taps, (1, 3), strict=True):  # hidden_states[0] is the embedding
        torch.testing.assert_close(tap, theirs.hidden_states[index], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_shipped_weights_give_transformers_the_same_logits(name: str) -> None:
    folder = SHIPPED / f"spark-tiny-{name}"
    network = load_network(folder, torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = Path(__file__).read_text()[:1200]
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(text)["input_ids"]])
    with torch.no_grad():
        theirs, ours = reference(ids).logits, network.logits(network(ids).hidden)
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() >= 0.99
    # The text was written after training: a model that learnt nothing would be at log(2048) = 7.6 nats.
    loss = torch.nn.functional.cross_entropy(ours[0, :-1], ids[0, 1:])
    assert loss < 2.6


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_pieces_with_a_cache_equal_one_pass(name: str) -> None:
    network = Network(toy(MODELS[name]))
    initialise(network, 5)
    ids = torch.randint(0, 512, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = network(ids).hidden
        cache, parts, start = Cache.empty(network.config.num_layers), [], 0
        for length in (70, 1, 7, 64, 1, 57):
            output = network(ids[:, start : start + length], cache)
            assert output.cache is not None
            cache, start = output.cache, start + length
            parts.append(output.hidden)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-3)


def test_a_call_leaves_the_cache_it_was_given_intact() -> None:
    network = Network(toy(MODELS["dense"]))
    initialise(network, 5)
    ids = torch.arange(4, 44)[None]
    with torch.no_grad():
        first = network(ids, Cache.empty(network.config.num_layers)).cache
        once = network(ids[:, :5], first).hidden
        network(ids[:, 5:20], first)
        again = network(ids[:, :5], first).hidden
    assert torch.equal(once, again)


def test_malformed_folders_are_refused_by_name(tmp_path: Path) -> None:
    folder = _toy_folder("dense", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight is \(32, 32\), not \(48, 32\)"):
        load_network(folder, torch.float32)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        load_network(folder, torch.float32)
    with pytest.raises(ConfigError, match="is no model folder"):
        ModelConfig.from_hf(tmp_path / "nothing")


def test_nan_is_not_written(tmp_path: Path) -> None:
    network = Network(toy(MODELS["dense"]))
    initialise(network, 1)
    with torch.no_grad():
        network.parameter("model.norm.weight")[3] = float("nan")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds NaN"):
        save_model(network, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
