"""Token streams on disk, and the order in which training reads them: a pure function of seed and position."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from sparkinfer.errors import ConfigError
from sparkinfer_models.chat_samples import ChatSample
from sparkinfer_models.sources import Document
from sparkinfer_models.tokenizer import END_OF_TEXT_ID, chat_text

# Share of the possible question-and-answer samples that is trained on; held-out ones are all kept.
CHAT_SHARE = 0.5


def _chosen(sample: ChatSample, index: int, share: float) -> bool:
    digest = hashlib.sha256(f"chat:{sample.path}:{index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < share * 2**32


def stream_texts(documents: list[Document], chats: list[ChatSample], share: float) -> Iterator[str]:
    """Documents in package order, each followed by the chosen samples drawn from it.

    Neighbours in the stream come from one package: a long window then holds text that its later parts can use.
    """
    by_path: dict[str, list[ChatSample]] = {}
    for index, sample in enumerate(chats):
        if _chosen(sample, index, share):
            by_path.setdefault(sample.path, []).append(sample)
    for document in documents:
        yield document.text
        for sample in by_path.get(document.path, []):
            yield chat_text(sample.question, sample.answer)


def encode_stream(tokenizer: Tokenizer, texts: Iterator[str], batch: int = 512) -> tuple[np.ndarray, int]:
    """Returns the ids (uint16), every text followed by the end-of-text id, and the number of text bytes."""
    parts: list[np.ndarray] = []
    total_bytes = 0
    pending: list[str] = []

    def flush() -> None:
        for encoding in tokenizer.encode_batch(pending, add_special_tokens=False):
            parts.append(np.array([*encoding.ids, END_OF_TEXT_ID], dtype=np.uint16))
        pending.clear()

    for text in texts:
        total_bytes += len(text.encode())
        pending.append(text)
        if len(pending) == batch:
            flush()
    flush()
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16), total_bytes


def write_stream(path: Path, ids: np.ndarray) -> None:
    """Writes xz-compressed little-endian uint16, to a temporary name first.

    Low and high bytes are stored apart: the high ones are few and compress well.
    """
    planes = ids.astype("<u2").view(np.uint8).reshape(-1, 2).T
    temporary = path.with_name(path.name + ".part")
    temporary.write_bytes(lzma.compress(planes.tobytes(), preset=6))
    temporary.rename(path)


def read_stream(path: Path) -> np.ndarray:
    """Reads what `write_stream` wrote.

    Raises:
        ConfigError: the file is missing.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is missing: write it with `python models/train.py prepare`")
    planes = np.frombuffer(lzma.decompress(path.read_bytes()), np.uint8).reshape(2, -1)
    return np.ascontiguousarray(planes.T).view("<u2").reshape(-1)


@dataclass(frozen=True)
class Position:
    """Where training stands in the data: windows already used at each length. Kept in every checkpoint."""

    windows: dict[int, int]

    def advanced(self, length: int, count: int) -> Position:
        """The position after `count` more windows of `length` tokens."""
        return Position({**self.windows, length: self.windows.get(length, 0) + count})


class WindowSampler:
    """Cuts a stream into windows; every epoch shifts and permutes the cuts anew, both from (seed, length, epoch)."""

    def __init__(self, ids: np.ndarray, seed: int) -> None:
        self.ids, self.seed = ids, seed
        self._order: dict[int, tuple[int, int, np.ndarray]] = {}

    def _epoch(self, length: int, epoch: int) -> tuple[int, np.ndarray]:
        cached = self._order.get(length)
        if cached is not None and cached[0] == epoch:
            return cached[1], cached[2]
        random = np.random.default_rng((self.seed, length, epoch))
        shift = int(random.integers(length))
        order = random.permutation((len(self.ids) - 1 - shift) // length)
        if not len(order):
            raise ConfigError(f"the stream has {len(self.ids)} tokens: too few for one window of {length}")
        self._order[length] = (epoch, shift, order)
        return shift, order

    def batch(self, position: Position, length: int, count: int) -> np.ndarray:
        """Windows of `length` + 1 tokens, [count, length + 1] int64: inputs and, shifted by one, targets."""
        rows = np.empty((count, length + 1), np.int64)
        per_epoch = (len(self.ids) - 1 - length) // length
        if per_epoch < 1:
            raise ConfigError(f"the stream has {len(self.ids)} tokens: too few for windows of {length}")
        first = position.windows.get(length, 0)
        for row in range(count):
            epoch, index = divmod(first + row, per_epoch)
            shift, order = self._epoch(length, epoch)
            start = shift + int(order[index]) * length
            rows[row] = self.ids[start : start + length + 1]
        return rows


def write_summary(path: Path, summary: dict[str, object]) -> None:
    """Writes a JSON summary beside the streams, to a temporary name first."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(summary, indent=2) + "\n")
    temporary.rename(path)
