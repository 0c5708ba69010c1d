"""Identities known before anything runs: source trees, pinned packages, models. They decide the run's name."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError, EnvironmentProblem
from sparkinfer.identity import file_sha256, is_source, json_digest, model_digest, package_files, tree_digest

PACKAGE_ROOTS = {"sparkinfer": "sparkinfer", "sparkinfer_kernels": "kernels/sparkinfer_kernels"}
GENERATOR_SOURCES = ("eval/sparkinfer_eval/toy_model.py", "eval/sparkinfer_eval/toy_tokenizer.py")
GENERATOR_DATA = "eval/corpus"


def source_tree_digest(root: Path) -> str:
    """The engine's identity in a checkout: what `sparkinfer.identity.source_digest` says when it runs from there."""
    files: dict[str, Path] = {}
    for package, folder in PACKAGE_ROOTS.items():
        files |= package_files(package, root / folder)
    if not files:
        raise EnvironmentProblem(f"{root} holds no sparkinfer source: is this a checkout of the project?")
    return tree_digest(files)


def project_version(root: Path) -> str:
    """`version` of pyproject.toml."""
    found = re.search(r'^version = "([^"]+)"', (root / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ConfigError(f"{root / 'pyproject.toml'} names no version")
    return found.group(1)


def locked_version(lock: Path, package: str) -> str:
    """The version that a lock pins for a package. Raises ConfigError when it does not."""
    try:
        text = lock.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{lock} is missing: make it with `make relock`") from error
    found = re.search(rf"^{re.escape(package)}==([^\s;\\]+)", text, re.MULTILINE)
    if found is None:
        raise ConfigError(f"{lock} does not pin {package}: add it to {lock.with_suffix('.in').name} and `make relock`")
    return found.group(1)


def _git(root: Path, *arguments: str) -> str | None:
    """Output of git, None when it fails or is absent."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def release_tag(root: Path, pattern: str) -> str | None:
    """The newest release tag by version order, other than the one that names this very version; None without one."""
    listed = _git(root, "tag", "--list", pattern, "--sort=-version:refname")
    own = f"v{project_version(root)}"
    return next((tag for tag in (listed or "").splitlines() if tag != own), None)


def tag_archive(root: Path, tag: str) -> bytes:
    """A tar archive of the engine's packages at a tag. Raises ConfigError when the tag does not hold them."""
    command = ["git", "-C", str(root), "archive", "--format=tar", tag, *PACKAGE_ROOTS.values()]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise ConfigError(
            f"tag {tag} is no release of this engine ({said}): set another tag_pattern in its engine file"
        )
    return done.stdout


def unpack_tag(root: Path, tag: str, folder: Path) -> None:
    """Write the engine's packages at a tag below `folder`. Raises ConfigError when the tag does not hold them."""
    with tarfile.open(fileobj=io.BytesIO(tag_archive(root, tag))) as archive:
        for member in archive.getmembers():
            data = archive.extractfile(member)
            if data is not None:
                target = folder / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data.read())


def tag_source_digest(root: Path, tag: str) -> str:
    """What `source_tree_digest` says of the tree at a tag, without unpacking it."""
    lines = []
    with tarfile.open(fileobj=io.BytesIO(tag_archive(root, tag))) as archive:
        for member in archive.getmembers():
            for package, folder in PACKAGE_ROOTS.items():
                data = archive.extractfile(member) if is_source(member.name) else None
                if data is not None and member.name.startswith(folder + "/"):
                    name = f"{package}/{member.name.removeprefix(folder + '/')}"
                    lines.append((name, f"{hashlib.sha256(data.read()).hexdigest()}  {name}\n"))
    return "sha256:" + hashlib.sha256("".join(line for _, line in sorted(lines)).encode()).hexdigest()


def generator_digest(root: Path) -> str:
    """Digest of everything that decides the bytes of a generated model besides its options."""
    files = {name: root / name for name in GENERATOR_SOURCES}
    files |= {p.relative_to(root).as_posix(): p for p in (root / GENERATOR_DATA).rglob("*") if p.is_file()}
    return tree_digest(files)


def folder_digest(folder: Path, cache: Path) -> str:
    """`model_digest` of a folder, remembered by the files' sizes and times, since weights may be many gigabytes."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} is not a model folder (no config.json): put the checkpoint there, or name a hub id"
        )
    stamps = {str(p.relative_to(folder)): [p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(folder.rglob("*"))}
    key = json_digest([str(folder.resolve()), stamps])
    entry = cache / f"{key.removeprefix('sha256:')}.txt"
    if entry.is_file():
        return entry.read_text(encoding="ascii").strip()
    digest = model_digest(folder)
    cache.mkdir(parents=True, exist_ok=True)
    temporary = entry.with_suffix(".tmp")
    temporary.write_text(digest + "\n", encoding="ascii")
    temporary.replace(entry)
    return digest


def has_random_weights(folder: Path) -> bool:
    """Whether a checkpoint says of itself that its weights are random: `random_weights` in config.json.

    `models/generate.py` and `models/random_checkpoint.py` write that; a quantised copy keeps it. Raises ConfigError
    when the file is not JSON.
    """
    path = folder / "config.json"
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")).get("random_weights"))
    except FileNotFoundError:
        return False
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}): put the checkpoint there again") from error


def file_digest(path: Path) -> str:
    """`sha256:<hex>` of one file."""
    return "sha256:" + file_sha256(path)


def read_manifest(path: Path) -> dict[str, Any]:
    """A model's manifest (`results/models/NAME.json`). Raises ConfigError when it is missing or corrupt."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"{path}: {error}: remove it and run the workflow again") from error
