"""The files in models/: sizes, formats, and that every model folder is whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from sparkinfer_models.repetition import read_line
from transformers import AutoConfig, AutoTokenizer

from sparkinfer.identity import file_sha256

MODELS = Path(__file__).resolve().parents[2] / "models"
TARGETS = ("spark-tiny-dense", "spark-tiny-moe")
ALL = (*TARGETS, *(f"{name}-dflash2" for name in TARGETS))


def test_all_models_together_stay_under_16_mib() -> None:
    size = sum(path.stat().st_size for name in ALL for path in (MODELS / name).rglob("*") if path.is_file())
    assert size <= 16 * 2**20


@pytest.mark.parametrize("name", ALL)
def test_weights_are_finite_bf16_and_the_card_is_there(name: str) -> None:
    folder = MODELS / name
    parameters = 0
    with safe_open(folder / "model.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118 - not a dict
            tensor = file.get_tensor(key)
            assert tensor.dtype == torch.bfloat16, key
            assert torch.isfinite(tensor).all(), key
            parameters += tensor.numel()
    if name in TARGETS:
        assert 3_000_000 <= parameters <= 6_000_000
    assert (folder / "README.md").is_file()
    log = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == log[-1]["planned_steps"]


@pytest.mark.parametrize("name", TARGETS)
def test_figures_are_of_these_weights(name: str) -> None:
    """A model trained anew needs its figures measured anew."""
    digests = {n: file_sha256(MODELS / n / "model.safetensors") for n in (name, f"{name}-dflash2")}
    # evaluation.json itself is part of the model's digest, which reports of earlier runs name: the card says it.
    acceptance = json.loads((MODELS / f"{name}-dflash2" / "acceptance.json").read_text())
    assert digests[name] in (MODELS / name / "README.md").read_text()
    assert (acceptance["target_sha256"], acceptance["drafter_sha256"]) == tuple(digests.values())


@pytest.mark.parametrize("name", TARGETS)
def test_a_drafter_s_card_has_its_note(name: str) -> None:
    folder = MODELS / f"{name}-dflash2"
    assert (folder / "note.md").read_text() in (folder / "README.md").read_text()


@pytest.mark.parametrize("name", TARGETS)
def test_cards_say_how_much_samples_repeat_themselves(name: str) -> None:
    sentence = read_line(MODELS / name / "samples.md")
    assert re.match(r"Of \d+ answers sampled .*, \d+ end in a phrase .* [\d.]+% of their 4-grams", sentence)
    assert f"nothing chosen. {sentence}\n" in (MODELS / name / "README.md").read_text()


@pytest.mark.parametrize("name", TARGETS)
def test_config_and_tokenizer_are_read_by_transformers(name: str) -> None:
    config = AutoConfig.from_pretrained(MODELS / name)
    assert (config.head_dim, config.linear_key_head_dim, config.linear_value_head_dim) == (256, 128, 128)
    assert config.layer_types.count("full_attention") * 4 == config.num_hidden_layers
    assert config.max_position_embeddings >= 8192 + 128
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
    assert len(tokenizer) == config.vocab_size
    assert tokenizer.eos_token_id == config.eos_token_id
    text = "def f(x):\n\treturn x  # naïve – 日本\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_both_targets_share_one_tokenizer() -> None:
    first, second = ((MODELS / name / "tokenizer.json").read_bytes() for name in TARGETS)
    assert first == second
