"""What a command was given to read, checked before any work (places to write to: sparkinfer.output).

Everything here raises UsageProblem, one line that names the argument and says what to do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparkinfer_containers.errors import UsageProblem


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
