"""Files that a program was told to write: refused before the work where that cannot be, and written by rename."""

from __future__ import annotations

import os
from pathlib import Path

from sparkinfer.errors import ConfigError, EnvironmentProblem


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _probe(path: Path) -> None:
    """Create and remove a file: permissions alone do not tell of read-only and special file systems. Raises OSError."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        # Left by a run that was killed; it will be written over.
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        return
    path.unlink()


def require_file(path: Path, name: str, make_folder: bool = False) -> None:
    """Raise ConfigError, with `name` (a flag or setting), when no file can be written at `path`. Leaves nothing.

    `make_folder`: the program makes its folder where there is none.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{name} {path} is a folder: name a file in it")
        if path.exists() and not path.is_file():
            # A rename would put a file in the place of the device.
            raise ConfigError(f"{name} {path} is a device or pipe: name a file")
        if not path.absolute().parent.is_dir():
            if make_folder:
                return require_folder(path.absolute().parent, name)
            raise ConfigError(f"{name} {path}: its folder does not exist; create it first")
        _probe(_temporary(path))
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be written ({error.strerror}): name another file") from error


def require_folder(folder: Path, name: str) -> None:
    """Raise ConfigError when no files can be written into `folder`, which need not exist yet. Leaves nothing."""
    try:
        there = folder.absolute()
        while not there.exists() and there != there.parent:
            there = there.parent
        if not there.is_dir():
            raise ConfigError(f"{name} {folder}: {there} is a file, not a folder; name another folder")
        _probe(there / f".{folder.name[:200]}.tmp")
    except OSError as error:
        raise ConfigError(f"{name} {folder} cannot be written ({error.strerror}): name another folder") from error


def require_appendable(path: Path, name: str) -> None:
    """Raise ConfigError when `path` is no file that can be continued, or begun. Leaves nothing."""
    try:
        if not path.exists():
            require_file(path, name)
        elif path.is_dir():
            raise ConfigError(f"{name} {path} is a folder: name a file in it")
        else:
            # A pipe that nobody reads is refused here, where the writer would wait for a reader.
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be written ({error.strerror}): name another file") from error


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file under a temporary name and rename it. Its folder is made. Raises EnvironmentProblem."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """As `write_text`."""
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be written: {error.strerror or error}") from error
