"""Prompts of real text with an exact token count, the same for every engine.

A prompt is cut from the corpus at the start of a paragraph so that the whole chat request, template included, has
exactly the cell's number of tokens by the model's own tokenizer. Prompts are distinct within a cell (so that warm-up
and measured requests share none) and start at other paragraphs in every cell of a block; a new block draws anew.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkinfer.errors import CheckpointError, ConfigError
from sparkinfer.identity import file_sha256, model_files, tree_digest

from .arrival_plan import plan_of
from .cells import Cell, cell_digest
from .corpus import TEXTS, digests, read_text

META_SCHEMA = "sparkinfer/prompts/v1"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt")


class ChatCounter:
    """Counts a one-message chat as a server does, by the model folder's own tokenizer and chat template.

    Raises CheckpointError when the folder has no usable tokenizer or no chat template.
    """

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer

        if not (model / "tokenizer.json").is_file():
            raise CheckpointError(f"{model} has no tokenizer.json: name a model folder")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{model}: its tokenizer does not load: {error}") from error
        if not self._tokenizer.chat_template:
            raise CheckpointError(f"{model} has no chat template (chat_template.jinja): chat requests need one")
        # Source text is longer than any request: no warning about the model's limit is due.
        self._tokenizer.model_max_length = 1 << 40

    def count(self, text: str) -> int:
        """Tokens of a chat request whose only message is `text` from the user, generation prompt included."""
        chat = [{"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return len(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def cuts(self, text: str) -> list[int]:
        """Character position after each token of `text`."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [end for _, end in encoded["offset_mapping"]]


def tokenizer_digest(model: Path) -> str:
    """Digest of the files that decide tokenisation (tokenizer, its config, chat template)."""
    return tree_digest({name: path for name, path in model_files(model).items() if name in TOKENIZER_FILES})


@functools.lru_cache(maxsize=1)
def _starts() -> tuple[tuple[str, int], ...]:
    """Places where a prompt may start: (text, character) of each paragraph that begins with a word."""
    found = []
    for name in TEXTS:
        text, position = read_text(name), 0
        for block in text.split("\n\n"):
            first = position + len(block) - len(block.lstrip())
            if len(block.strip()) >= 40 and text[first].isalnum():
                found.append((name, first))
            position += len(block) + 2
    return tuple(found)


def starts(seed: int, block: int, slot: int, slots: int) -> Iterator[tuple[str, int]]:
    """The starting places of cell number `slot` of `slots`: its share of this block's shuffle, in order."""
    places = list(_starts())
    random.Random(f"prompts/{seed}/{block}").shuffle(places)
    return iter(places[slot::slots])


def fit(counter: ChatCounter, text: str, tokens: int) -> str | None:
    """The beginning of `text` that makes a chat request of exactly `tokens` tokens; None where no cut does.

    The result neither begins nor ends with a blank (templates trim those).
    """
    cuts = counter.cuts(text)
    guess = tokens - (counter.count("x") - 1)
    tried: set[int] = set()
    while 0 < guess <= len(cuts) and guess not in tried:
        tried.add(guess)
        candidate = text[: cuts[guess - 1]]
        found = counter.count(candidate)
        if found == tokens and candidate == candidate.strip():
            return candidate
        # Right length but ending in blanks: the next cut up ends in a word.
        guess += tokens - found or 1
    return None


def cell_texts(
    counter: ChatCounter, cell: Cell, seed: int, block: int, slot: int, slots: int
) -> tuple[list[str], list[str]]:
    """(warm-up texts, measured texts) of the cell, all distinct.

    Raises ConfigError when the prompt is shorter than the template or the corpus is used up.
    """
    overhead = counter.count("x") - 1
    if cell.prompt_tokens < overhead + 4:
        raise ConfigError(
            f"cell {cell.id}: a prompt of {cell.prompt_tokens} tokens leaves {cell.prompt_tokens - overhead} for text "
            f"beside the chat template's {overhead}: use a smaller length_divisor"
        )
    wanted = cell.warmup_requests + cell.requests
    texts: dict[str, None] = {}
    for name, start in starts(seed, block, slot, slots):
        source = read_text_cached(name)
        # Real text has 3 to 5 characters a token; a stretch that has more than 8 is passed over.
        found = fit(counter, source[start : start + 8 * cell.prompt_tokens + 64], cell.prompt_tokens)
        if found is not None:
            texts[found] = None
        if len(texts) == wanted:
            chosen = list(texts)
            return chosen[: cell.warmup_requests], chosen[cell.warmup_requests :]
    raise ConfigError(
        f"cell {cell.id}: the corpus gives {len(texts)} prompts of {cell.prompt_tokens} tokens, {wanted} are asked "
        f"for: lower its request count"
    )


@functools.lru_cache(maxsize=len(TEXTS))
def read_text_cached(name: str) -> str:
    """`read_text`, unpacked and checked once per process."""
    return read_text(name)


def prompt_rows(cell: Cell, warmup: list[str], measured: list[str], seed: int, block: int) -> list[dict[str, Any]]:
    """The rows of the prompts file, warm-up first: AIPerf's `single_turn` form plus our `phase`, `label`, `sha256`.

    `timestamp` (ms) and `extra` (the request's sampling seed) are there in open-loop cells only.
    """
    rows: list[dict[str, Any]] = []
    for phase, texts in (("warmup", warmup), ("profiling", measured)):
        for index, text in enumerate(texts):
            rows.append(
                {
                    "session_id": f"{cell.id}-b{block}-{phase[0]}{index:04d}",
                    "phase": phase,
                    "text": text,
                    "output_length": cell.output_tokens or cell.short_tokens,
                    "sha256": hashlib.sha256(text.encode()).hexdigest(),
                }
            )
    if cell.kind == "poisson":
        plan = plan_of(cell, f"{seed}/{block}/{cell.id}")
        for row, arrival in zip(rows[len(warmup) :], plan, strict=True):
            row["output_length"] = arrival.output_tokens
            row["label"] = arrival.label
            row["timestamp"] = round(arrival.at_s * 1000, 3)
            row["extra"] = {"seed": arrival.seed}
    return rows


@dataclass(frozen=True)
class PromptSet:
    """A prompts file as read back: its rows, metadata and digest."""

    path: Path
    rows: list[dict[str, Any]]
    meta: dict[str, Any]
    sha256: str

    def phase(self, name: str) -> list[dict[str, Any]]:
        """The rows of `warmup` or `profiling`."""
        return [row for row in self.rows if row["phase"] == name]


def write_prompts(
    model: Path, counter: ChatCounter, cell: Cell, seed: int, block: int, ids: list[str], folder: Path
) -> Path:
    """Write `<folder>/<cell>.jsonl` and `<cell>.meta.json`; returns the former. `ids` are all cells, in table order."""
    warmup, measured = cell_texts(counter, cell, seed, block, ids.index(cell.id), len(ids))
    rows = prompt_rows(cell, warmup, measured, seed, block)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{cell.id}.jsonl"
    temporary = folder / f".{cell.id}.jsonl.part"
    temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    meta = {
        "schema": META_SCHEMA,
        "cell": cell.id,
        "cell_digest": cell_digest(cell),
        "block": block,
        "seed": seed,
        "requests": len(measured),
        "warmup_requests": len(warmup),
        "prompt_tokens": cell.prompt_tokens,
        "sha256": file_sha256(temporary),
        "tokenizer_digest": tokenizer_digest(model),
        "corpus": {name: digests()[name] for name in TEXTS},
    }
    meta_path = folder / f"{cell.id}.meta.json"
    meta_temporary = folder / f".{cell.id}.meta.json.part"
    meta_temporary.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    meta_temporary.replace(meta_path)
    temporary.replace(path)
    return path


def read_prompts(path: Path) -> PromptSet:
    """Read a prompts file and hold it against its metadata.

    Raises ConfigError when either is missing, the digest differs, or warm-up and measured prompts overlap.
    """
    meta_path = path.with_name(f"{path.stem}.meta.json")
    for needed in (path, meta_path):
        if not needed.is_file():
            raise ConfigError(f"{needed} does not exist: make it with eval/make_prompts.py")
    meta: Mapping[str, Any] = json.loads(meta_path.read_text(encoding="utf-8"))
    if meta.get("schema") != META_SCHEMA:
        raise ConfigError(f"{meta_path}: schema is {meta.get('schema')!r}, expected {META_SCHEMA!r}")
    sha256 = file_sha256(path)
    if sha256 != meta["sha256"]:
        raise ConfigError(f"{path} has sha256 {sha256}, its metadata says {meta['sha256']}: make it again")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    shared = {row["sha256"] for row in rows if row["phase"] == "warmup"} & {
        row["sha256"] for row in rows if row["phase"] == "profiling"
    }
    if shared:
        raise ConfigError(f"{path}: {len(shared)} prompts are in both warm-up and measured requests: make it again")
    return PromptSet(path, rows, dict(meta), sha256)
