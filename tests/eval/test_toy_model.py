"""The corpus is what its digests say; generated checkpoints are byte-identical, loadable and not degenerate."""

from __future__ import annotations

import dataclasses
import lzma
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sparkinfer_eval import corpus
from sparkinfer_eval.toy_model import ToySize, generate, parameter_count
from sparkinfer_eval.toy_tokenizer import SPECIAL_TOKENS

from sparkinfer.errors import ConfigError
from sparkinfer.identity import model_digest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ToySize(hidden=64, ffn=96, vocab=512, max_positions=512)


@pytest.fixture(scope="module", params=["dense", "moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / f"spark-tiny-{request.param}"
    generate(request.param, folder)
    return folder


def test_corpus_is_real_and_checked(tmp_path: Path) -> None:
    english = corpus.read_text("english.txt")
    assert len(english) > 3_000_000
    assert len(corpus.paragraphs(english)) > 10_000
    assert sum(path.stat().st_size for path in corpus.CORPUS_FOLDER.glob("*.xz")) <= 2 << 20
    folder = tmp_path / "corpus"
    shutil.copytree(corpus.CORPUS_FOLDER, folder)
    (folder / "english.txt.xz").write_bytes(lzma.compress(english.replace("the", "teh", 1).encode()))
    with pytest.raises(ConfigError, match="SHA256SUMS"):
        corpus.read_text("english.txt", folder)
    (folder / "python.txt.xz").write_bytes(b"not xz")
    with pytest.raises(ConfigError, match="damaged"):
        corpus.read_text("python.txt", folder)
    with pytest.raises(ConfigError, match="has no text"):
        corpus.read_text("latin.txt", folder)


def test_byte_identical_in_another_process(checkpoint: Path, tmp_path: Path) -> None:
    kind = checkpoint.name.rsplit("-", 1)[1]
    again = tmp_path / "again"
    command = [sys.executable, str(ROOT / "models" / "generate.py"), kind, str(again)]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=120)
    assert model_digest(again) == model_digest(checkpoint)
    assert sorted(path.name for path in again.iterdir()) == sorted(path.name for path in checkpoint.iterdir())


def test_seed_changes_weights_only(tmp_path: Path) -> None:
    for seed in (0, 1):
        generate("dense", tmp_path / str(seed), seed, SMALL)
    read = lambda seed, name: (tmp_path / str(seed) / name).read_bytes()  # noqa: E731
    assert read(0, "model.safetensors") != read(1, "model.safetensors")
    assert read(0, "tokenizer.json") == read(1, "tokenizer.json")
    assert read(0, "config.json") == read(1, "config.json")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small matrices on a busy machine: threads that wait for each other cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_loads_in_transformers_and_answers_vary(checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    kind = checkpoint.name.rsplit("-", 1)[1]
    assert 3_000_000 <= model.num_parameters() == parameter_count(kind, ToySize()) <= 6_000_000
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    answers = []
    for text in ("The interpreter acts as a simple calculator.", "import os"):
        chat = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            logits = model(**prompt).logits[0, -1]
            tokens = model.generate(**prompt, max_new_tokens=48, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert torch.isfinite(logits).all()
        assert 1.0 < float(logits.std()) < 10.0
        answers.append(tokens[0, prompt["input_ids"].shape[1] :].tolist())
    assert answers[0] != answers[1]
    assert all(len(set(answer)) > 24 for answer in answers), "the greedy answer runs in a circle"
    # Every answered token is text of its own: the stream has a first token to time.
    texts = [tokenizer.decode([token]) for answer in answers for token in answer]
    assert all(text and "�" not in text for text in texts)


def test_tokenizer_round_trip_and_template(checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert len(tokenizer) == ToySize().vocab
    for text in (
        "naïve café, 12345\n\tdef f(x):  return x  # ok\n",
        corpus.read_text("english.txt")[1000:5000],
        "日本語",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(text)[0] == SPECIAL_TOKENS.index("<|im_start|>")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3, "kv_heads": 2}, "multiple of kv_heads"),
        ({"linear_value_heads": 3}, "multiple of linear_key_heads"),
        ({"layers": 3}, "no full-attention layer"),
        ({"experts_per_token": 9}, "exceeds experts"),
        ({"hidden": 0}, "hidden is 0"),
        ({"vocab": 100}, "at least 261"),
        ({"head_dim": 100}, "multiple of 8"),
    ],
)
def test_bad_sizes_are_refused(change: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        generate("moe", tmp_path / "m", size=dataclasses.replace(SMALL, **change))
    assert not list(tmp_path.iterdir())


def test_existing_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "precious").write_text("x")
    with pytest.raises(ConfigError, match="exists already"):
        generate("dense", tmp_path / "m", size=SMALL)
    assert (tmp_path / "m" / "precious").exists()
