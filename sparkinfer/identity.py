"""Digests that name what was measured: the engine's source tree and a model folder.

Both are sha256 over lines `<sha256 of file>  <relative path>` in path order, so that anyone can recompute them
with sha256sum. They hold no clock, no host and no absolute path.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE_PACKAGES = ("sparkinfer", "sparkinfer_kernels")
SOURCE_DATA = ("tuned.json",)
"""What the packages hold besides code: launch parameters that kernels read."""
MODEL_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")


def file_sha256(path: Path) -> str:
    """Hex sha256 of one file, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while piece := handle.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def file_digests(files: dict[str, Path]) -> dict[str, str]:
    """Hex sha256 of the named files, in the order of their names; large ones are read side by side."""
    names = sorted(files)
    with ThreadPoolExecutor(max(1, min(8, len(names)))) as pool:
        return dict(zip(names, pool.map(file_sha256, (files[name] for name in names)), strict=True))


def tree_digest(files: dict[str, Path]) -> str:
    """`sha256:<hex>` over the named files: sorted lines of file digest, two spaces, name, newline."""
    return digest_of(file_digests(files))


def digest_of(digests: dict[str, str]) -> str:
    """`sha256:<hex>` over file digests by name: sorted lines of digest, two spaces, name, newline."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()


def package_files(package: str, root: Path) -> dict[str, Path]:
    """The files in `root` that make up a package's behaviour: `package/relative/path` to file."""
    return {f"{package}/{path.relative_to(root).as_posix()}": path for path in root.rglob("*") if is_source(path.name)}


def is_source(name: str) -> bool:
    """Whether a file of that name in one of the engine's packages is code, or data that the code reads."""
    return name.endswith(".py") or name.rpartition("/")[2] in SOURCE_DATA


def source_files() -> dict[str, Path]:
    """The engine's own source files as installed: `package/relative/path` to file."""
    import importlib.util

    found: dict[str, Path] = {}
    for package in SOURCE_PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"package {package} is not importable: install the project first (make setup)")
        found |= package_files(package, Path(spec.origin).parent)
    return found


def source_digest() -> str:
    """Digest of the engine's source tree (packages `sparkinfer` and `sparkinfer_kernels`)."""
    return tree_digest(source_files())


def engine_digest() -> str:
    """The image digest handed in by the launcher (`SPARKINFER_IMAGE_DIGEST`), else the source-tree digest."""
    return os.environ.get("SPARKINFER_IMAGE_DIGEST") or source_digest()


def model_files(folder: Path) -> dict[str, Path]:
    """The files of a model folder that define it (weights, config, tokenizer, template)."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in MODEL_SUFFIXES and not path.name.startswith(".")
    }


def model_digest(folder: Path) -> str:
    """Digest of a model folder. Raises FileNotFoundError when it holds no model file."""
    files = model_files(folder)
    if not files:
        raise FileNotFoundError(f"{folder} holds no model files")
    return tree_digest(files)


def short(digest: str, length: int = 8) -> str:
    """The first hex characters of a `sha256:` digest."""
    return digest.removeprefix("sha256:")[:length]


def json_digest(value: object) -> str:
    """`sha256:<hex>` of a JSON value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
