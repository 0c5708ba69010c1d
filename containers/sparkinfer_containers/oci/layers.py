"""Layers as plain tar files: written deterministically, read with every entry checked.

Layers are not compressed: two gzip implementations give different bytes for the same files, and a digest that
depends on the compressor's version is not reproducible. A plain layer's digest is its diff_id.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from sparkinfer_containers.errors import DigestProblem

BLOCK = 1 << 16


def write_layer(target: Path, root: Path, prefix: str, epoch: int) -> None:
    """Tar the tree `root` under `prefix` (relative, `/`-separated): sorted, owner 0:0, mtime `epoch`, normal modes.

    Directories and executables get 0755, other files 0644. Raises DigestProblem for a device, socket or FIFO.
    """
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as tar:
        parent = PurePosixPath(prefix)
        for part in reversed([parent, *parent.parents][:-1]):
            tar.addfile(_directory(str(part), epoch))
        for path in sorted(root.rglob("*"), key=lambda item: item.relative_to(root).as_posix()):
            name = str(parent / path.relative_to(root).as_posix())
            mode = path.lstat().st_mode
            info = tarfile.TarInfo(name)
            info.mtime = epoch
            if stat.S_ISLNK(mode):
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
                tar.addfile(info)
            elif stat.S_ISDIR(mode):
                tar.addfile(_directory(name, epoch))
            elif stat.S_ISREG(mode):
                info.size, info.mode = path.stat().st_size, 0o755 if mode & 0o100 else 0o644
                with path.open("rb") as handle:
                    tar.addfile(info, handle)
            else:
                raise DigestProblem(f"{path}: only files, folders and symbolic links can go into a layer")


def _directory(name: str, epoch: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.mtime = tarfile.DIRTYPE, 0o755, epoch
    return info


class LayerCheck:
    """Checks entries of an image's layers, in order: `links` remembers symbolic links across layers."""

    def __init__(self) -> None:
        self._links: set[PurePosixPath] = set()
        self._files: set[PurePosixPath] = set()

    def path(self, entry: tarfile.TarInfo, layer: str) -> PurePosixPath:
        """The entry's path inside the root. Raises DigestProblem for one that could reach outside."""
        path = _inside(entry.name, layer, entry.name)
        for parent in path.parents:
            if parent in self._links:
                raise DigestProblem(f"{layer}: {entry.name} would be written through the symbolic link {parent}")
        if path.name.startswith(".wh."):
            raise DigestProblem(f"{layer}: whiteout {entry.name}: this project's layers delete nothing")
        if entry.issym():
            target = entry.linkname
            base = PurePosixPath() if target.startswith("/") else path.parent
            _inside(str(base / target.lstrip("/")), layer, f"{entry.name} -> {target}")
            self._links.add(path)
            self._files.discard(path)
        elif entry.islnk():
            target_path = _inside(entry.linkname, layer, f"{entry.name} => {entry.linkname}")
            if target_path not in self._files:
                raise DigestProblem(f"{layer}: hard link {entry.name} points to {entry.linkname}, not an earlier file")
        elif entry.isreg():
            self._links.discard(path)
            self._files.add(path)
        elif entry.isdir():
            if path in self._links:
                raise DigestProblem(f"{layer}: folder {entry.name} replaces a symbolic link")
        else:
            raise DigestProblem(f"{layer}: {entry.name} is a device or another special file")
        return path


def _inside(name: str, layer: str, shown: str) -> PurePosixPath:
    """`name` normalised, relative to the root. Raises DigestProblem when it is absolute or climbs out."""
    if name.startswith("/") or "\0" in name:
        raise DigestProblem(f"{layer}: {shown}: absolute path")
    parts: list[str] = []
    for part in name.split("/"):
        if part in ("", "."):
            continue
        if part == "..":
            if not parts:
                raise DigestProblem(f"{layer}: {shown}: climbs out of the root")
            parts.pop()
            continue
        parts.append(part)
    return PurePosixPath(*parts)


def check_layers(layers: Iterable[tuple[str, Path]]) -> int:
    """Check every entry of plain layers `(digest, file)`; the number of entries. Raises DigestProblem."""
    check, count = LayerCheck(), 0
    for digest, path in layers:
        with _open(path, digest) as tar:
            for entry in tar:
                check.path(entry, digest)
                count += 1
    return count


def _open(path: Path, digest: str) -> tarfile.TarFile:
    try:
        return tarfile.open(path, "r:")
    except tarfile.TarError as error:
        raise DigestProblem(f"{digest} is not a plain tar layer: {error}") from error


def unpack(layers: Iterable[tuple[str, Path]], target: Path) -> None:
    """Unpack plain layers into the new folder `target`, checking every entry first."""
    listed = list(layers)
    check_layers(listed)
    check = LayerCheck()
    target.mkdir(parents=True)
    for digest, path in listed:
        with _open(path, digest) as tar:
            for entry in tar:
                _extract(tar, entry, target / check.path(entry, digest), target)


def _extract(tar: tarfile.TarFile, entry: tarfile.TarInfo, path: Path, root: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not entry.isdir() and (path.is_symlink() or path.exists()):
        path.unlink()
    if entry.isdir():
        path.mkdir(exist_ok=True)
        path.chmod(entry.mode & 0o7777)
    elif entry.issym():
        path.symlink_to(entry.linkname)
    elif entry.islnk():
        path.hardlink_to(root / _inside(entry.linkname, "layer", entry.name))
    else:
        source = tar.extractfile(entry)
        assert source is not None
        with path.open("wb") as handle:
            while piece := source.read(BLOCK):
                handle.write(piece)
        path.chmod(entry.mode & 0o7777)
        os.utime(path, (entry.mtime, entry.mtime))
