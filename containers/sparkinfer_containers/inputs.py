"""What a command was given, checked before any work: the places it writes to, and the records that it reads.

Everything here raises UsageProblem, one line that names the argument and says what to do.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparkinfer_containers.errors import UsageProblem


def writable_folder(folder: Path, option: str) -> None:
    """Make `folder` unless it is there; a file must be possible in it (tried: root's rights are not in the mode)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageProblem(
            f"{option} {folder}: {error.strerror} ({error.filename}): name a folder to write to"
        ) from error


def writable_file(path: Path, option: str) -> None:
    """A file can be written at `path`, new or in place of one."""
    if path.exists() and not path.is_file():
        raise UsageProblem(f"{option} {path} is not a regular file: name a file")
    writable_folder(path.parent, option)


def appendable_file(path: Path, option: str) -> None:
    """Lines can be added to `path`, which may be a device like /dev/stderr."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise UsageProblem(f"{option} {path}: {error.strerror}: name a file to write to") from error


def folder_given(folder: Path, option: str) -> None:
    """`folder` is there."""
    if not folder.is_dir():
        raise UsageProblem(f"{option} {folder} is no folder: name one that exists")


def port(text: str) -> int:
    """For argparse: a port, 0 for any free one."""
    number = int(text)
    if not 0 <= number <= 65535:
        raise ValueError(f"{number} is no port")
    return number


def environment(items: Sequence[str]) -> dict[str, str]:
    """Variables given as NAME=VALUE."""
    made = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise UsageProblem(f"--env {item}: give NAME=VALUE")
        made[name] = value
    return made


def json_object(path: Path, what: str) -> dict[str, Any]:
    """A JSON file that holds an object; `what` says which folder it belongs to."""
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageProblem(f"{path}: {error.strerror}: {what} is expected") from error
    except (ValueError, RecursionError) as error:
        raise UsageProblem(f"{path} is not JSON ({error}): {what} is expected") from error
    if not isinstance(made, dict):
        raise UsageProblem(f"{path} is no JSON object: {what} is expected")
    return made


def image_record(folder: Path, *fields: str) -> dict[str, Any]:
    """image.json of a folder that `build` made, whose `fields` are texts."""
    made = json_object(folder / "image.json", "a folder that `build` made")
    lacking = [name for name in fields if not isinstance(made.get(name), str)]
    if lacking:
        raise UsageProblem(
            f"{folder / 'image.json'} lacks {', '.join(lacking)}: a folder that `build` made is expected"
        )
    return made
