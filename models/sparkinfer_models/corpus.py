"""Turns packages into a corpus: near-duplicates dropped, documents split into train and held-out."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sparkinfer_models.sources import Document, Source, documents, fetch

# Packages no document of which is trained on: held-out text of unseen projects, beside unseen documents of seen ones.
UNSEEN_PACKAGES = ("bottle", "nox", "werkzeug")
_SIBLING = re.compile(r"(?:python3?-)?(.+)-doc")
HELD_OUT_PERCENT = 1.5
DUPLICATE_LINES = 0.5
_MIN_LINE = 20


@dataclass(frozen=True)
class Corpus:
    """Documents in the order of sources and paths; the three lists share no document."""

    train: list[Document]
    held_out: list[Document]
    unseen: list[Document]
    dropped_duplicates: int


def _read(folder: Path, source: Source) -> list[Document]:
    return list(documents(source, fetch(source, folder)))


def read_documents(sources: list[Source], folder: Path, workers: int = 2) -> list[Document]:
    """Fetches and reads all sources, in their order."""
    with ProcessPoolExecutor(workers) as pool:
        return [document for part in pool.map(partial(_read, folder), sources) for document in part]


def drop_near_duplicates(documents_: Iterable[Document]) -> tuple[list[Document], int]:
    """Drops a document when over half of its long lines stood in the documents before it.

    Copies of one file in two packages, or licence texts, would otherwise lie on both sides of the split.
    """
    seen: set[int] = set()
    kept: list[Document] = []
    dropped = 0
    for document in documents_:
        lines = [line.strip() for line in document.text.splitlines()]
        # Python's own hash() of str is salted per process: a digest keeps the result the same on every run.
        keys = [
            int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest(), "little")
            for line in lines
            if len(line) >= _MIN_LINE
        ]
        if document.kind != "words" and keys and sum(key in seen for key in keys) > DUPLICATE_LINES * len(keys):
            dropped += 1
            continue
        seen.update(keys)
        kept.append(document)
    return kept, dropped


def is_held_out(path: str, percent: float = HELD_OUT_PERCENT) -> bool:
    """Chooses by the digest of the document's path: the same on every machine, independent of order."""
    number = int.from_bytes(hashlib.sha256(b"held-out:" + path.encode()).digest()[:8], "big")
    return number < percent / 100 * 2**64


def is_doc_sibling(source: str) -> bool:
    """Whether a source is the manual of an unseen package, which renders its docstrings (`python-werkzeug-doc`)."""
    found = _SIBLING.fullmatch(source)
    return found is not None and found[1] in UNSEEN_PACKAGES


def split(documents_: list[Document], doc_siblings: bool = False) -> Corpus:
    """Splits by document (1.5 % held out) and by package (all of `UNSEEN_PACKAGES`).

    The manuals of unseen packages are unseen too; `doc_siblings` treats them as any other package.
    """
    kept, dropped = drop_near_duplicates(documents_)
    apart = {d.source for d in kept if d.source in UNSEEN_PACKAGES or (is_doc_sibling(d.source) and not doc_siblings)}
    unseen = [d for d in kept if d.source in apart]
    rest = [d for d in kept if d.source not in apart]
    # A word list's neighbours repeat its stems: it is trained on only.
    held_out = [d for d in rest if d.kind != "words" and is_held_out(d.path)]
    chosen = {d.path for d in held_out}
    return Corpus([d for d in rest if d.path not in chosen], held_out, unseen, dropped)


def title_of(document: Document) -> str:
    """The first heading of a prose document, or its file name."""
    match = re.search(r"^([A-Z][^\n]{3,70})\n[=\-~*#]{4,}$", document.text, flags=re.M)
    return match.group(1).strip() if match else Path(document.path).name
