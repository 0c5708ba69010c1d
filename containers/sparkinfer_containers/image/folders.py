"""Folders that a command makes anew: only what an earlier call made there is ever removed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkinfer.output import require_folder
from sparkinfer_containers.errors import UsageProblem

DIGEST_FILE = "digest"
UNPACKED = {"root", "config.json", DIGEST_FILE}
"""What a folder of an unpacked image holds."""
_DIGEST = re.compile(rb"sha256:[0-9a-f]{64}\n?\Z")


def require_ours(folder: Path, marker: str, content: re.Pattern[bytes], known: Collection[str]) -> None:
    """Raises UsageProblem when `folder` is a file, or holds anything but what an earlier call of ours made."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageProblem(f"{folder} exists and is no folder: name a new one")
    found = {path.name for path in folder.iterdir()}
    if not found:
        return
    path = folder / marker
    ours = path.is_file() and path.stat().st_size < 100 and content.match(path.read_bytes()) is not None
    if not ours or found - set(known):
        raise UsageProblem(
            f"{folder} is not empty and not a folder that this command made: nothing in it was touched; name a new or "
            "an empty folder"
        )


def require_unpackable(target: Path) -> None:
    """Raises UsageProblem or ConfigError unless `target` is absent, empty or an unpacked image, and can be written."""
    target = target.resolve()
    require_ours(target, DIGEST_FILE, _DIGEST, UNPACKED)
    require_folder(target.parent, "output: the folder")


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """A new folder beside `target` that takes its place when the block ends well, and vanishes when it does not.

    Raises UsageProblem, before anything is made, unless `target` is absent, empty, or an unpacked image.
    """
    require_unpackable(target)
    target = target.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if target.exists():
            target.rename(old)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


SHIP_MARKER = ".sparkinfer-ship"
_SHIP = b"working folder of `ship`: made anew by each call\n"


def working(folder: Path) -> None:
    """Make the working folder of `ship` anew. Raises UsageProblem when it holds anything but an earlier call's work."""
    folder = folder.resolve()
    require_ours(folder, SHIP_MARKER, re.compile(re.escape(_SHIP)), {SHIP_MARKER, "registry", "unpacked", "server.log"})
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / SHIP_MARKER).write_bytes(_SHIP)
