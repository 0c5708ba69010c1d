"""The packages whose text trains the reference models: pinned by file digest, fetched by name, read as documents."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sparkinfer.errors import ConfigError

MANIFEST = Path(__file__).with_name("sources.json")
SKIPPED_PARTS = {
    "tests", "test", "testing", "_vendor", "vendor", "vendored", "locale", "locales", "migrations", "node_modules",
    "translations", "__pycache__", "site-packages", "conformance_tests", "_testing",
}  # fmt: skip
TEXT_SUFFIXES = (".rst", ".rst.txt", ".txt", ".rst.gz", ".txt.gz")
MIN_DOCUMENT_BYTES = 400
MAX_DOCUMENT_BYTES = 120_000
# Strings that the tokenizer would read as control tokens: a document holding one would corrupt the chat format.
CONTROL_STRINGS = ("<|im_", "<|endoftext|>", "<|mask|>")


@dataclass(frozen=True)
class Source:
    """One package file: `cap_bytes` limits how much of its text is taken, so that no package dominates."""

    kind: str
    name: str
    version: str
    file: str
    sha256: str
    licence: str
    cap_bytes: int


@dataclass(frozen=True)
class Document:
    """One text: `kind` is `python`, `prose` or `words`; `path` is unique over all sources."""

    source: str
    path: str
    kind: str
    text: str


def load_sources(manifest: Path = MANIFEST) -> list[Source]:
    """Reads the manifest: a JSON list of `Source` fields."""
    return [Source(**row) for row in json.loads(manifest.read_text())]


def fetch(source: Source, folder: Path) -> Path:
    """Returns the package file in `folder`, downloading it by name and version when it is not there.

    Raises:
        ConfigError: the download failed, or the file's SHA-256 is not the manifest's.
    """
    target = folder / source.file
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        if source.kind == "pypi":
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            if not source.file.endswith("-none-any.whl"):
                python, abi, platforms = source.file.removesuffix(".whl").split("-")[-3:]
                command += ["--python-version", python.removeprefix("cp"), "--implementation", "cp", "--abi", abi]
                for platform in platforms.split("."):
                    command += ["--platform", platform]
            command += ["--dest", str(folder), f"{source.name}=={source.version}"]
        else:
            command = ["apt-get", "download", "--quiet", f"{source.name}={source.version}"]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "PIP_CONSTRAINT": ""}
        )
        if done.returncode or not target.is_file():
            raise ConfigError(
                f"cannot fetch {source.file}: `{' '.join(command)}` said: {done.stderr.strip()[-300:]}; put the file "
                f"into {folder} from another mirror (Debian's past versions: snapshot.debian.org)"
            )
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise ConfigError(
            f"{target} has SHA-256 {digest}, the manifest says {source.sha256}: delete it and fetch again"
        )
    return target


def _wheel_members(path: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if not name.endswith("/"):
                yield name, archive.read(name)


def _deb_members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Reads the data archive of a .deb (an `ar` file with a compressed tar in it)."""
    raw = path.read_bytes()
    if raw[:8] != b"!<arch>\n":
        raise ConfigError(f"{path} is not a Debian package")
    offset = 8
    while offset < len(raw):
        name = raw[offset : offset + 16].decode().strip().rstrip("/")
        size = int(raw[offset + 48 : offset + 58])
        body = raw[offset + 60 : offset + 60 + size]
        offset += 60 + size + size % 2
        if name.startswith("data.tar"):
            plain = lzma.decompress(body) if name.endswith(".xz") else body
            with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
                members = sorted((m for m in archive.getmembers() if m.isfile()), key=lambda m: m.name)
                for member in members:
                    stream = archive.extractfile(member)
                    if stream is not None:
                        yield member.name.removeprefix("./"), stream.read()
            return
    raise ConfigError(f"{path} holds no data.tar")


def classify(path: str) -> str | None:
    """`python`, `prose`, `words`, or None for a member that is not taken."""
    parts = path.split("/")
    name = parts[-1]
    if SKIPPED_PARTS & set(parts[:-1]) or name.startswith("test_") or name.endswith("_test.py"):
        return None
    if path.startswith("usr/share/dict/"):
        return "words"
    if "common-licenses" in parts or "/licenses/" in path or name.startswith(("LICENSE", "COPYING")):
        return "prose"
    if name.endswith(".py"):
        return "python"
    is_document = "_sources" in parts or path.startswith("usr/share/doc/")
    return "prose" if is_document and name.endswith(TEXT_SUFFIXES) and "changelog" not in name else None


def readable(text: str) -> bool:
    """Whether a text is what a person writes: no data tables, no generated code, nearly all ASCII."""
    if not MIN_DOCUMENT_BYTES <= len(text) <= MAX_DOCUMENT_BYTES or any(mark in text for mark in CONTROL_STRINGS):
        return False
    if sum(ord(c) > 126 for c in text) > 0.01 * len(text):
        return False
    lines = text.splitlines()
    if max(map(len, lines)) > 400 or len(text) / len(lines) > 90:
        return False
    letters = sum(c.isalpha() or c in " \n" for c in text)
    return letters > 0.62 * len(text)


def is_licence(document: Document) -> bool:
    """Whether a document is a package's licence text."""
    return "licenses/" in document.path


def _word_list_documents(source: Source, path: str, text: str) -> Iterator[Document]:
    words = [word for word in text.split("\n") if re.fullmatch(r"[a-z]+", word)]
    # Every 400 neighbours make one document, every third of them is kept: enough to learn the shape of a word list.
    for start in range(0, len(words), 1200):
        yield Document(source.name, f"{path}#{start}", "words", "\n".join(words[start : start + 400]) + "\n")


def documents(source: Source, path: Path) -> Iterator[Document]:
    """Yields the readable documents of one package file in the order of their paths, up to its cap."""
    members = _wheel_members(path) if source.kind == "pypi" else _deb_members(path)
    kept: list[Document] = []
    for name, raw in members:
        kind = classify(name)
        if kind is None:
            continue
        if name.endswith(".gz"):
            raw = gzip.decompress(raw)
        try:
            text = raw.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if kind == "words":
            kept += _word_list_documents(source, name, text)
        elif readable(text):
            kept.append(Document(source.name, f"{source.name}/{name}", kind, text.rstrip() + "\n"))
    # Over the cap, documents are chosen by the digest of their path, so that all parts of a package are met.
    chosen: set[str] = set()
    total = 0
    for document in sorted(kept, key=lambda d: hashlib.sha256(d.path.encode()).digest()):
        if total + len(document.text) > source.cap_bytes:
            continue
        total += len(document.text)
        chosen.add(document.path)
    yield from (document for document in kept if document.path in chosen)
