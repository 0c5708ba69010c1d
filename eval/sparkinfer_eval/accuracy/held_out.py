"""The held-out set (`eval/held_out/`) and the token windows and prompts that are made of it."""

from __future__ import annotations

import hashlib
import json
import lzma
from dataclasses import dataclass
from pathlib import Path

from sparkinfer.errors import CheckpointError, ConfigError

FOLDER = Path(__file__).resolve().parents[2] / "held_out"
FILE = "held_out.jsonl"
GREEDY_PROMPT_TOKENS = 64
LEAST_WINDOW = 16


@dataclass(frozen=True, slots=True)
class Entry:
    """One text; a `chat` is a user's message, to be put into the chat template."""

    id: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Task:
    """What both engines get, as token ids: windows to score, prompts to answer greedily. `digest` names the text."""

    digest: str
    windows: dict[str, list[int]]
    prompts: dict[str, list[int]]
    answer_tokens: int

    def as_json(self) -> dict[str, object]:
        """For a record file."""
        return {
            "digest": self.digest,
            "windows": self.windows,
            "prompts": self.prompts,
            "answer_tokens": self.answer_tokens,
        }

    def settings(self) -> dict[str, int]:
        """What it was made with, as its own token ids show it: longest window, answers' length, texts (0: all)."""
        entries, digest = read_held_out()
        whole = self.digest == digest and len(self.windows) == sum(entry.kind == "text" for entry in entries)
        longest = max(map(len, self.windows.values()), default=0)
        return {
            "context": longest,
            "answer_tokens": self.answer_tokens,
            "limit": 0 if whole else len(self.windows),
        }


def read_held_out(folder: Path = FOLDER) -> tuple[list[Entry], str]:
    """The entries, and the digest of their file. Raises ConfigError when they are not what SHA256SUMS names."""
    path, sums = folder / f"{FILE}.xz", folder / "SHA256SUMS"
    try:
        raw = lzma.decompress(path.read_bytes())
        pairs = (line.split("  ", 1) for line in sums.read_text(encoding="utf-8").splitlines())
        expected = {name: digest for digest, name in pairs}.get(FILE)
    except (FileNotFoundError, lzma.LZMAError, ValueError) as error:
        raise ConfigError(f"{folder} is incomplete or damaged ({error}): restore it from git") from error
    found = hashlib.sha256(raw).hexdigest()
    if found != expected:
        raise ConfigError(f"{path} unpacks to sha256 {found}, SHA256SUMS says {expected}: restore it from git")
    rows = [json.loads(line) for line in raw.decode().splitlines()]
    return [Entry(row["id"], row["kind"], row["text"]) for row in rows], found


def make_task(tokenizer: Path, context: int, answer_tokens: int, limit: int = 0, folder: Path = FOLDER) -> Task:
    """Tokenise the held-out set.

    Args:
        tokenizer: a folder with the model's tokenizer.
        context: longest window, prompts and answers included.
        answer_tokens: length of the greedy answers; 0 asks for none.
        limit: take so many texts and chats only; 0 takes all.
        folder: where the set is.

    Raises:
        CheckpointError: no loadable tokenizer there.
        ConfigError: the context holds no window worth scoring.
    """
    from transformers import AutoTokenizer

    if context < LEAST_WINDOW + answer_tokens:
        raise ConfigError(
            f"a context of {context} tokens is too short for windows of {LEAST_WINDOW} and answers of {answer_tokens}: "
            "raise it, or lower --answer-tokens"
        )
    try:
        tok = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{tokenizer}: its tokenizer does not load ({error}): name a model folder") from error
    tok.model_max_length = 1 << 40
    entries, digest = read_held_out(folder)
    texts = [entry for entry in entries if entry.kind == "text"]
    chats = [entry for entry in entries if entry.kind == "chat"]
    if limit:
        # The first texts are the long ones: take from the end.
        texts, chats = texts[-limit:], chats[:limit]
    windows = {e.id: tok(e.text, add_special_tokens=False)["input_ids"][:context] for e in texts}
    prompts: dict[str, list[int]] = {}
    if answer_tokens:
        for entry in chats:
            text = entry.text
            if tok.chat_template:
                chat = [{"role": "user", "content": text}]
                text = str(tok.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
            prompts[entry.id] = tok(text, add_special_tokens=False)["input_ids"][-(context - answer_tokens) :]
        for name, ids in list(windows.items())[: len(chats)]:
            prompts[name] = ids[: min(GREEDY_PROMPT_TOKENS, context - answer_tokens)]
    return Task(digest, windows, prompts, answer_tokens)
