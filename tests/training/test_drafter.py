"""The drafter's parts against plain loops, its training, and speculative streams against plain ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sparkinfer_models import drafter_cli
from sparkinfer_models.acceptance import accepted_length
from sparkinfer_models.checkpoint import load_network, save_model
from sparkinfer_models.config import MODELS, toy
from sparkinfer_models.drafter import Drafter, DrafterConfig, block_convolution, load_drafter, save_drafter
from sparkinfer_models.drafter_trainer import block_mask
from sparkinfer_models.network import Network, initialise
from sparkinfer_models.rollout import generate, prompts
from sparkinfer_models.speculate import Speculator, gumbel_noise, plain_decode
from tokenizers import Tokenizer

from sparkinfer.errors import ConfigError

SHIPPED = Path(__file__).resolve().parents[2] / "models"
TEXTS = (
    'import os\n\n\ndef read_lines(path):\n    """Return the lines of a file.\n',
    "<|im_start|>user\nWhat does the documentation say about sessions?<|im_end|>\n<|im_start|>assistant\n",
)


def test_block_convolution_equals_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 8, 32, generator=generator)
    delta = torch.randn(3, 8, 2, 2, generator=generator)
    base = torch.randn(2, 32, generator=generator)
    found = block_convolution(x, delta, base)
    for block in range(3):
        for position in range(8):
            for channel in range(32):
                c0, c1 = (base[tap, channel] + delta[block, position, tap, channel // 16] for tap in range(2))
                before = x[block, position - 1, channel] if position else 0.0
                assert found[block, position, channel] == pytest.approx(
                    float(c0 * x[block, position, channel] + c1 * before), abs=1e-5
                )


def test_block_mask_shows_the_context_before_the_anchor_and_the_own_block() -> None:
    mask = block_mask(torch.tensor([[5, 9]]), time=12, block=4, window=6)[0]
    for block, anchor in enumerate((5, 9)):
        for slot in range(4):
            row = mask[block * 4 + slot]
            expected = [anchor + slot - 6 < key < anchor for key in range(12)]
            assert row[:12].tolist() == expected
            assert row[12:].tolist() == [key // 4 == block for key in range(8)]


def test_walk_follows_the_best_edges() -> None:
    config = dataclasses.replace(DrafterConfig(), vocab_size=40, hidden_size=16, selector_rank=4, selector_top_k=5)
    drafter = Drafter(config)
    drafter.initialise(2)
    with torch.no_grad():
        for name, value in drafter.checkpoint().items():
            if "candidate_selector" in name:
                value.mul_(30)  # or the edges would decide nothing
        hidden = torch.randn(7, 16, generator=torch.Generator().manual_seed(1))
        logits = torch.randn(7, 40, generator=torch.Generator().manual_seed(2))
        a, b, w = (
            drafter.parameter(f"candidate_selector.{name}")
            for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        )
        expected, previous = [], 11
        for slot in range(7):
            candidates = logits[slot].topk(5).indices.tolist()
            scores = {c: float(logits[slot, c] + (a[previous] * (w @ hidden[slot]) * b[c]).sum()) for c in candidates}
            previous = max(scores, key=lambda c: scores[c])
            expected.append(previous)
        assert drafter.walk(hidden, logits, 11, 0.0, None) == expected
        assert expected != logits.argmax(-1).tolist()


def test_gumbel_noise_depends_on_seed_position_and_token_and_has_its_distribution() -> None:
    noise = gumbel_noise(3, 10, 2048)
    assert torch.equal(noise, gumbel_noise(3, 10, 2048))
    assert torch.equal(noise[:100], gumbel_noise(3, 10, 100))
    assert not torch.equal(noise, gumbel_noise(4, 10, 2048))
    many = torch.cat([gumbel_noise(1, p, 2048) for p in range(50)])
    assert float(many.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(many.var()) == pytest.approx(np.pi**2 / 6, abs=0.05)


@pytest.mark.parametrize("name", ["dense", "moe"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_speculative_stream_is_the_plain_one(name: str, temperature: float) -> None:
    folder = SHIPPED / f"spark-tiny-{name}"
    network = load_network(folder, torch.float32).requires_grad_(False)
    drafter = load_drafter(SHIPPED / f"spark-tiny-{name}-dflash2", torch.float32).requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    accepted = []
    for seed, text in enumerate(TEXTS):
        prompt = tokenizer.encode(text).ids
        plain = plain_decode(network, prompt, 40, temperature, seed)
        decoded = Speculator(network, drafter).decode(prompt, 40, temperature, seed)
        assert decoded.tokens == plain.tokens
        accepted += decoded.accepted
    # A drafter of no use would accept next to nothing; the figures are in the model card.
    assert np.mean(accepted) > (1.5 if temperature == 0 else 0.2)


def test_noise_shared_with_the_target_raises_acceptance() -> None:
    """The draft at temperature 1 with the target's noise, against the greedy draft."""
    network = load_network(SHIPPED / "spark-tiny-dense", torch.float32).requires_grad_(False)
    drafter = load_drafter(SHIPPED / "spark-tiny-dense-dflash2", torch.float32).requires_grad_(False)
    prompt = Tokenizer.from_file(str(SHIPPED / "spark-tiny-dense" / "tokenizer.json")).encode(TEXTS[0]).ids

    class Greedy(Speculator):
        def _draft(self, anchor, position, context, temperature, seed):  # type: ignore[no-untyped-def]
            return super()._draft(anchor, position, context, 0.0, seed)

    rows = [prompt] * 2
    shared = accepted_length(Speculator(network, drafter), rows, 48, 1.0, 0)
    greedy = accepted_length(Greedy(network, drafter), rows, 48, 1.0, 0)
    assert shared.mean > greedy.mean


def test_prompts_end_where_answers_begin(toy_data: Path) -> None:
    from sparkinfer_models.dataset import read_stream

    ids = read_stream(toy_data / "train.u16.xz")
    rows = prompts(ids, 20, 30, 1.0, np.random.default_rng(0))
    assert rows.shape == (20, 30)
    assert (rows[:, -3:] == [1, 300, 301]).all()


def test_greedy_rollouts_are_the_targets_greedy_answers() -> None:
    network = Network(toy(MODELS["dense"]))
    initialise(network, 1)
    start = torch.randint(4, 500, (2, 20), generator=torch.Generator().manual_seed(0))
    texts = generate(network, start, 6, torch.tensor([0.0, 1.0]), torch.Generator().manual_seed(0))
    assert texts.shape == (2, 26)
    with torch.no_grad():
        greedy = network.logits(network(texts[:, :-1]).hidden).argmax(-1)
    assert torch.equal(greedy[0, 19:], texts[0, 20:])


def test_drafter_trains_and_resumes_bit_for_bit(
    toy_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = Network(toy(MODELS["dense"]))
    initialise(target, 1)
    save_model(target, tmp_path / "target")

    def run(out: str, *extra: str) -> int:
        sizes = {"rollouts": 1, "rollout-batch": 8, "prompt": 16, "answer": 24, "batch": 4, "anchors": 3, "steps": 8}
        options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
        return drafter_cli.main(
            [
                "run",
                "--target",
                str(tmp_path / "target"),
                "--data",
                str(toy_data),
                "--out",
                str(tmp_path / out),
                "--device",
                "cpu",
                "--log-every",
                "4",
                "--warmup",
                "2",
                *options,
                *extra,
            ]
        )

    assert run("whole") == 0
    assert run("parts", "--stop-at", "3") == 0
    # The texts follow from the recipe that was saved, not from this command line.
    assert run("parts", "--resume", "--seed", "5", "--rollout-batch", "4") == 0
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
    log = [json.loads(line) for line in (tmp_path / "whole" / "training_log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"]
    assert run("whole") == 2
    initialise(target, 2)
    save_model(target, tmp_path / "target")
    assert run("parts", "--resume") == 2
    assert "was begun with another --target" in capsys.readouterr().err


def test_config_round_trip_and_refusal(tmp_path: Path) -> None:
    drafter = Drafter(DrafterConfig())
    drafter.initialise(0)
    save_drafter(drafter, tmp_path)
    assert DrafterConfig.from_hf(tmp_path) == DrafterConfig()
    config = json.loads((tmp_path / "config.json").read_text())
    config["dflash_config"]["causal"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="causal false"):
        load_drafter(tmp_path, torch.float32)
