"""The committed corpus: read, checked against its digests, cut into paragraphs."""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path

from sparkinfer.errors import ConfigError

CORPUS_FOLDER = Path(__file__).resolve().parent.parent / "corpus"
TEXTS = ("english.txt", "python.txt")


def digests(folder: Path = CORPUS_FOLDER) -> dict[str, str]:
    """File name to sha256 (hex) from `SHA256SUMS`. Raises ConfigError when the file is missing."""
    path = folder / "SHA256SUMS"
    if not path.is_file():
        raise ConfigError(f"{path} is missing: restore eval/corpus/ from git, or run eval/corpus/build.py")
    pairs = (line.split("  ", 1) for line in path.read_text(encoding="utf-8").splitlines())
    return {name: digest for digest, name in pairs}


def read_text(name: str, folder: Path = CORPUS_FOLDER) -> str:
    """One text of the corpus. Raises ConfigError when it is unknown, missing or not the bytes that SHA256SUMS names."""
    if name not in TEXTS:
        raise ConfigError(f"the corpus has no text {name!r}; it has {', '.join(TEXTS)}")
    path = folder / f"{name}.xz"
    try:
        raw = lzma.decompress(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing: restore eval/corpus/ from git") from error
    except lzma.LZMAError as error:
        raise ConfigError(f"{path} is damaged ({error}): restore eval/corpus/ from git") from error
    found, expected = hashlib.sha256(raw).hexdigest(), digests(folder).get(name)
    if found != expected:
        raise ConfigError(
            f"{path} unpacks to sha256 {found}, SHA256SUMS says {expected}: restore eval/corpus/ from git"
        )
    return raw.decode("utf-8")


def paragraphs(text: str) -> list[str]:
    """The blocks between blank lines, without outer blanks, empty ones left out."""
    return [block for block in (piece.strip() for piece in text.split("\n\n")) if block]
