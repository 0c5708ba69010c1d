"""The generated models' tokenizer: byte-level BPE trained on the committed corpus, with a chat template."""

from __future__ import annotations

import functools
import os
from typing import Any

from sparkinfer.errors import ConfigError

from .corpus import TEXTS, read_text

# The trainer counts words in parallel; one thread keeps the merge order independent of the machine.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
# Words with one leading blank, single digits, runs of punctuation, line ends, blanks: the family's own split.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def train_tokenizer(vocab: int) -> Tokenizer:
    """A tokenizer of exactly `vocab` entries (special tokens first, then bytes, then merges).

    Raises ConfigError when the corpus does not hold enough merges for that many entries.
    """
    return Tokenizer.from_str(_trained(vocab))


@functools.lru_cache(maxsize=4)
def _trained(vocab: int) -> str:
    """The trained tokenizer as JSON text (immutable, so that it can be kept for the next model)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((read_text(name) for name in TEXTS), trainer=trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ConfigError(f"the corpus gives {tokenizer.get_vocab_size()} vocabulary entries, {vocab} were asked for")
    return tokenizer.to_str()


def silent_token_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids whose text is empty or not whole characters: special tokens and pieces of multi-byte characters."""
    silent = []
    for identifier in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([identifier], skip_special_tokens=True)
        if not text or "�" in text:
            silent.append(identifier)
    return silent


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """`tokenizer_config.json`: the class that takes `tokenizer.json` as it is."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
