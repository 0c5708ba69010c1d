"""Where the bytes of an image are: by Debian package and by Python package."""

from __future__ import annotations

import tarfile
from collections import Counter
from pathlib import Path, PurePosixPath

_LISTS = PurePosixPath("var/lib/dpkg/info")
OTHER = "(no package)"


def of_debian(layer: Path) -> dict[str, int]:
    """Bytes of regular files in a root layer by the Debian package that owns them, by dpkg's own file lists."""
    owner: dict[str, str] = {}
    sizes: dict[str, int] = {}
    with tarfile.open(layer, "r:") as tar:
        for entry in tar:
            path = PurePosixPath(entry.name)
            if path.parent == _LISTS and path.suffix == ".list":
                handle = tar.extractfile(entry)
                package = path.stem.split(":")[0]
                owner |= {_merged(line): package for line in (handle.read().decode().splitlines() if handle else [])}
            if entry.isreg():
                sizes[entry.name] = entry.size
    counted: Counter[str] = Counter()
    for name, size in sizes.items():
        counted[owner.get(name, OTHER)] += size
    return dict(counted)


def _merged(line: str) -> str:
    """A path of a file list as it lies in a root with merged /usr, without its leading slash."""
    name = line.lstrip("/")
    return f"usr/{name}" if name.split("/")[0] in ("bin", "sbin", "lib", "lib64") else name


def of_python(tree: Path) -> dict[str, int]:
    """Bytes of regular files by top-level package; `NAME.libs` and `NAME-VERSION.dist-info` count with NAME."""
    counted: Counter[str] = Counter()
    for top in tree.iterdir():
        name = top.name.split("-")[0].split(".")[0]
        files = [top] if top.is_file() else top.rglob("*")
        counted[name] += sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())
    return dict(counted)
