"""A tokenizer for checkpoints of random weights that real text goes through.

Text is cut as the reference models cut it, so that prompts are distinct and have exact lengths; every other id of the
vocabulary, of which a random model answers most, is a word of its own (` w12345`), so that each token is visible text.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from sparkinfer.errors import ConfigError

SOURCE = "spark-tiny-dense"
"""The model of the checkout whose tokenizer is filled up."""
NAMES = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def write_text_tokenizer(folder: Path, source: Path) -> None:
    """Give the checkpoint in `folder` the tokenizer of the model folder `source`, filled up to its vocabulary.

    Raises ConfigError when the vocabulary is smaller than the tokenizer's.
    """
    vocabulary = int(json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"])
    tokenizer = json.loads((source / "tokenizer.json").read_text("utf-8"))
    words = tokenizer["model"]["vocab"]
    known = 1 + max(words.values())
    if vocabulary < known:
        raise ConfigError(f"{folder} has a vocabulary of {vocabulary}, the tokenizer of {source} needs {known}")
    # Byte-level vocabularies write a blank as this letter.
    words |= {f"\u0120w{number}": number for number in range(known, vocabulary)}
    for name in NAMES:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
