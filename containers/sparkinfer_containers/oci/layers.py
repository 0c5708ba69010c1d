"""Layers as plain tar files: written deterministically, read with every entry checked.

Layers are not compressed: two gzip implementations give different bytes for the same files, and a digest that
depends on the compressor's version is not reproducible. A plain layer's digest is its diff_id.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, cast

from sparkinfer_containers.errors import DigestProblem
from sparkinfer_containers.oci.stream import Forward

BLOCK = 1 << 16
END = 2 * tarfile.BLOCKSIZE
"""Zero bytes that end a tar file, at least."""


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
        self._folders: set[PurePosixPath] = {PurePosixPath()}

    def path(self, entry: tarfile.TarInfo, layer: str) -> PurePosixPath:
        """The entry's path inside the root. Raises DigestProblem for one that could reach outside."""
        path = _inside(entry.name, layer, entry.name)
        for parent in path.parents:
            if parent in self._links:
                raise DigestProblem(f"{layer}: {entry.name} would be written through the symbolic link {parent}")
            if parent in self._files:
                raise DigestProblem(f"{layer}: {entry.name} lies below {parent}, which is a file")
        if path in self._folders and not entry.isdir():
            raise DigestProblem(f"{layer}: {entry.name} replaces a folder")
        self._folders.update(path.parents)
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
            if target_path not in self._files or target_path == path:
                raise DigestProblem(f"{layer}: hard link {entry.name} points to {entry.linkname}, not an earlier file")
            self._links.discard(path)
            self._files.add(path)
        elif entry.isreg():
            self._links.discard(path)
            self._files.add(path)
        elif entry.isdir():
            if path in self._links or path in self._files:
                raise DigestProblem(f"{layer}: folder {entry.name} replaces a file or a symbolic link")
            self._folders.add(path)
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
        with path.open("rb") as handle:
            count += _check_entries(check, handle, digest)
    return count


def check_streams(layers: Iterable[tuple[str, Iterable[bytes]]]) -> int:
    """`check_layers` of `(digest, pieces)`, each read once and to its end, so that `pieces` can check the digest.

    Where both bytes and entries are wrong, what `pieces` raises at the end counts.
    """
    check, count = LayerCheck(), 0
    for digest, pieces in layers:
        stream = Forward(pieces)
        try:
            count += _check_entries(check, cast("IO[bytes]", stream), digest)
        except DigestProblem:
            stream.drain()
            raise
        stream.drain()
    return count


def _check_entries(check: LayerCheck, handle: IO[bytes], digest: str) -> int:
    count = 0
    with _entries(handle, digest) as (_, entries):
        for entry in entries:
            check.path(entry, digest)
            count += 1
    return count


@contextmanager
def _entries(handle: IO[bytes], digest: str) -> Iterator[tuple[tarfile.TarFile, Iterator[tarfile.TarInfo]]]:
    """A plain layer and its entries, to the last byte. Raises DigestProblem for one that is cut short or malformed."""
    try:
        with tarfile.open(fileobj=handle, mode="r:") as tar:
            yield tar, _all_entries(tar, handle, digest)
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
        raise DigestProblem(f"{digest} is not a plain tar layer: {error}") from error


def _all_entries(tar: tarfile.TarFile, handle: IO[bytes], digest: str) -> Iterator[tarfile.TarInfo]:
    """The entries; then all the rest of the file has to be zero.

    tarfile ends at the first header that it cannot read, where other programs go on: what follows would be unchecked.
    """
    yield from tar
    handle.seek(tar.offset)
    left = 0
    while piece := handle.read(BLOCK):
        if piece.count(0) != len(piece):
            raise DigestProblem(f"{digest}: a malformed entry, or bytes after the last one, at byte {tar.offset}")
        left += len(piece)
    if left < END:
        raise DigestProblem(f"{digest}: the layer is cut short: its end mark is missing")


def unpack(layers: Iterable[tuple[str, Path]], target: Path) -> None:
    """Unpack plain layers into the new folder `target`, checking every entry first."""
    listed = list(layers)
    check_layers(listed)
    check = LayerCheck()
    target.mkdir(parents=True)
    for digest, path in listed:
        with path.open("rb") as handle, _entries(handle, digest) as (tar, entries):
            for entry in entries:
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
