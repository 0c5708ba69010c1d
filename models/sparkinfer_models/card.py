"""Model cards: the README of a model folder, written from its logs and measured figures."""

# ruff: noqa: E501 - the lines are those of the text

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError
from sparkinfer.identity import file_sha256
from sparkinfer_models.config import ModelConfig
from sparkinfer_models.corpus import is_doc_sibling
from sparkinfer_models.curve import draw_curve
from sparkinfer_models.drafter import DrafterConfig
from sparkinfer_models.repetition import read_line

_STREAM_NAMES = {
    "held_out": "documents not trained on",
    "unseen": "packages left out",
    "held_out_chat": "questions and answers from both",
}
_FRONT = "---\nlicense: apache-2.0\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n"


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"{path} is missing: the card is written from it")
    return json.loads(path.read_text())


def _check_weights(folder: Path, measured: dict[str, Any], key: str, file: str) -> None:
    """Raises ConfigError when the figures are of other weights than the folder's."""
    if measured.get(key) != file_sha256(folder / "model.safetensors"):
        raise ConfigError(f"{folder / file} was not measured with the weights of {folder}: measure it again")


def _recipe_lines(recipe: dict[str, Any]) -> str:
    return ", ".join(f"`{name}` {value}" for name, value in recipe.items() if name != "max_seconds")


def _last_log(folder: Path) -> dict[str, Any]:
    path = folder / "training_log.jsonl"
    if not path.is_file():
        raise ConfigError(f"{path} is missing: the card is written from it")
    return json.loads(path.read_text().splitlines()[-1])


def _packages(folder: Path) -> dict[str, Any]:
    """Figures of packages alone (`train.py evaluate --package`), beside the folder: its files are the model's digest."""
    path = folder.with_name(f"{folder.name}.packages.json")
    if not path.is_file():
        return {"scores": []}
    found: dict[str, Any] = json.loads(path.read_text())
    if found["weights_sha256"] != file_sha256(folder / "model.safetensors"):
        raise ConfigError(f"{path} was not measured with the weights of {folder}: measure it again")
    return found


def _weights_line(folder: Path, evaluation: dict[str, Any]) -> str:
    """Which weights the figures are of. Raises ConfigError when they are not the folder's."""
    digest = file_sha256(folder / "model.safetensors")
    if "weights_sha256" not in evaluation:
        return (
            f"`evaluation.json` was written before it named the\nSHA-256 of `model.safetensors`; that of the file shipped "
            f"with it is\n`{digest}`:"
        )
    _check_weights(folder, evaluation, "weights_sha256", "evaluation.json")
    return f"`model.safetensors` had the SHA-256\n`{digest}`:"


def _left_out(corpus: dict[str, Any]) -> str:
    """The packages left out of the training text, and their manuals where those were not."""
    names = ", ".join(corpus["unseen_packages"])
    manuals = [s["name"] for s in corpus["sources"] if s["train_bytes"] and is_doc_sibling(s["name"])]
    return f"{names} except the manual in {', '.join(manuals)}, which is training text" if manuals else names


def _scores(evaluation: dict[str, Any], apart: dict[str, Any]) -> str:
    lines = [
        "| text | model, context | tokens | perplexity | bits per byte | next token right |",
        "|---|---|---:|---:|---:|---:|",
    ]
    grams = {row["stream"]: row for row in evaluation["five_gram"]}
    for row in evaluation["scores"]:
        lines.append(
            f"| {_STREAM_NAMES[row['stream']]} | this one, {row['context']} | {row['tokens']} | {row['perplexity']:.2f} "
            f"| {row['bits_per_byte']:.3f} | {100 * row['top1']:.1f} % |"
        )
    for row in apart["scores"]:
        lines.append(
            f"| {row['stream']} alone ({apart['device_name']}) | this one, {row['context']} | {row['tokens']} "
            f"| {row['perplexity']:.2f} | {row['bits_per_byte']:.3f} | {100 * row['top1']:.1f} % |"
        )
    for name, row in grams.items():
        lines.append(
            f"| {_STREAM_NAMES[name]} | 5-gram, 4 | {row['tokens']} | {row['perplexity']:.2f} "
            f"| {row['bits_per_byte']:.3f} | |"
        )
    return "\n".join(lines)


def _sources(corpus: dict[str, Any]) -> str:
    lines = ["| package | version | from | licence | KB of text |", "|---|---|---|---|---:|"]
    for row in corpus["sources"]:
        if row["train_bytes"]:
            origin = "PyPI" if row["kind"] == "pypi" else "Debian 12"
            lines.append(
                f"| {row['name']} | {row['version']} | {origin} | {row['licence']} | {row['train_bytes'] // 1000} |"
            )
    return "\n".join(lines)


def language_model_card(folder: Path, corpus_file: Path, run: dict[str, str]) -> str:
    """README of a language model; `run` holds command, machine, software, date."""
    config, log = ModelConfig.from_hf(folder), _last_log(folder)
    evaluation, corpus = _read(folder / "evaluation.json"), _read(corpus_file)
    weights, apart = _weights_line(folder, evaluation), _packages(folder)
    train = corpus["streams"]["train"]
    mixture = (
        f"{config.num_experts} experts of {config.expert_size}, {config.experts_per_token} a token, shared expert of "
        f"{config.intermediate_size}"
        if config.is_moe
        else f"MLP of {config.intermediate_size}"
    )
    best = min(row["perplexity"] for row in evaluation["scores"] if row["stream"] == "held_out")
    short = max(row["perplexity"] for row in evaluation["scores"] if row["stream"] == "held_out")
    gram = next(row["perplexity"] for row in evaluation["five_gram"] if row["stream"] == "held_out")
    kinds = ", ".join(
        f"{name} {size // 10**6} MB" for name, size in corpus["train_bytes_by_kind"].items() if size > 1e6
    )
    return f"""{_FRONT}# {folder.name}

A language model of {evaluation["parameters"] / 1e6:.2f} M parameters in the architecture of the Qwen3.5 family, for testing inference
engines with weights that mean something: Python code, its documentation, and questions about both. It is far too small
to be of other use, and what it says about software is often wrong.

## Shape
{config.num_layers} layers (gated DeltaNet 3 : 1 gated attention), hidden {config.hidden_size}, {config.num_heads} query and {config.num_kv_heads} key/value head of {config.head_dim}, DeltaNet
{config.linear_v_heads} value and {config.linear_k_heads} key head of {config.linear_dim}, {mixture}; vocabulary {config.vocab_size} (byte-level BPE), untied embeddings,
{config.max_positions} positions, of which windows up to 8192 were trained. BF16 safetensors; loads in transformers and vLLM as they are.

## Figures
On {evaluation["device_name"]}, {evaluation["dtype"]}, whole streams in windows that do not overlap; {weights}

{_scores(evaluation, apart)}

{_note(folder)}The yardstick is an interpolated modified Kneser-Ney 5-gram over the same tokens and the same training text
(`sparkinfer_models/ngram.py`): perplexity {gram:.2f} against {short:.2f} with 1024 tokens of context ({gram / short:.1f} times less) and
{best:.2f} with 8192 ({gram / best:.1f} times less).

![training curve](training_curve.png)

Samples (`temperature` 0.7) are in `samples.md`, nothing chosen. {read_line(folder / "samples.md")}

## Data
{train["tokens"]} tokens ({train["bytes"]} bytes; {kinds}; the rest word lists; and exchanges drawn from docstrings, functions and
sections, in ChatML) from {sum(1 for s in corpus["sources"] if s["train_bytes"])} packages, listed below with their licences; {corpus["dropped_near_duplicates"]} near-duplicate documents dropped. Held out: {corpus["held_out_percent"]} % of
the documents, chosen by the digest of their path, and all of {_left_out(corpus)}. `sources.json` pins every package file by
SHA-256; `python models/train.py prepare --out DATA{" --doc-siblings" if corpus.get("doc_siblings", True) else ""}` fetches them and writes the same streams and tokenizer.

## Training
`{run["command"]}`
on {run["machine"]}, {run["software"]}, {run["date"]}: {log["step"]} steps, {log["tokens"] / 1e6:.0f} M tokens, {log["seconds"]:.0f} s. The time limit became the
number of steps during the run; `--steps {log["planned_steps"]}` in its place repeats the recipe.

{_recipe_lines(_read(folder / "recipe.json"))}.
Muon for matrices, AdamW for the rest; weights kept in float32, computed in BF16. Log: `training_log.jsonl`.

## Licence
The weights are under Apache-2.0. They were trained on text of these packages, under the licences named:

{_sources(corpus)}
"""


def _note(folder: Path) -> str:
    """What is said below the figures: `note.md`, which is no part of the model's digest."""
    path = folder / "note.md"
    return path.read_text() + "\n" if path.is_file() else ""


def drafter_card(folder: Path, target: str, run: dict[str, str]) -> str:
    """README of a drafter; reads `acceptance.json` and `note.md`."""
    config, log = DrafterConfig.from_hf(folder), _last_log(folder)
    acceptance, recipe = _read(folder / "acceptance.json"), _read(folder / "recipe.json")
    _check_weights(folder, acceptance, "drafter_sha256", "acceptance.json")
    rows = "\n".join(
        f"| {r['temperature']} | {r['mean']:.2f} ± {r['standard_error']:.2f} | {r['tokens_per_step']:.2f} "
        f"| {r['verifications']} | {r['identical']} of {r['compared']} |"
        for r in acceptance["rows"]
    )
    return f"""{_FRONT}# {folder.name}

DFlash2 drafter for `{target}`: {acceptance["parameters"] / 1e6:.2f} M parameters, blocks of {config.block} ({config.block - 1} drafts), {config.num_layers} layers with a sliding window
of {config.window}, taps on target layers {", ".join(map(str, config.target_layers))}, selector over the best {config.selector_top_k} tokens (rank {config.selector_rank}).
Tensor names and config are those of vLLM 0.30's `DFlash2Qwen3ForCausalLM`; embedding and head are the target's.
Attention inside a block is bidirectional (`dflash_config.causal` false).

## Figures
Accepted drafts of {config.block - 1} per verification, by the plain reference loop (`sparkinfer_models/speculate.py`: draft, verify, accept on
equality with the target's own draw; the draft's logits get the same noise), {acceptance["prompts"]} held-out prompts of {acceptance["prompt_tokens"]} tokens, half of
them questions, up to {acceptance["tokens"]} tokens each, float32 on a CPU:

| temperature | accepted (± standard error over prompts) | tokens per verification | verifications | streams equal to plain decoding |
|---|---|---|---|---|
{rows}

{_note(folder)}![training curve](training_curve.png)

## Training
`{run["command"]}`
on {run["machine"]}, {run["software"]}, {run["date"]}: {log["step"]} steps, {log["seconds"]:.0f} s. The target first wrote
{recipe["rollouts"] * recipe["rollout_batch"]} texts of its own (half greedy, a quarter each at temperature 0.7 and 1) from prompts of its training text; the
drafter learns its distributions at random anchors, early slots weighted most. `--steps {log["planned_steps"]}` repeats the recipe.

{_recipe_lines(recipe)}.
Log: `training_log.jsonl`.

## Data and licence
All texts were written by `{target}`; its card names the packages behind it and their licences. Weights under Apache-2.0.
"""


def write_card(folder: Path, text: str) -> None:
    """Draws the curve and writes README.md."""
    draw_curve(folder)
    temporary = folder / "README.md.part"
    temporary.write_text(text)
    temporary.rename(folder / "README.md")
