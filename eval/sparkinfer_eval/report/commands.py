"""commands.txt: every command of the run, ready to be repeated from the repository's root."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from sparkinfer_eval.report.load import RunData


def relative_paths(text: str, repository: Path) -> str:
    """Replace the repository's absolute path by a relative one, and the home folder by ~: a report names no machine."""
    for root, replacement in ((repository.resolve(), "."), (Path.home(), "~")):
        if str(root) != root.anchor:
            text = re.sub(rf"{re.escape(str(root))}(?![\w.-])", replacement, text)
    return text


def _line(argv: list[str], environment: dict[str, str] | None = None) -> str:
    assignments = [f"{key}={shlex.quote(value)}" for key, value in sorted((environment or {}).items())]
    return " ".join([*assignments, shlex.join(argv)])


def commands_text(run: RunData, repository: Path) -> str:
    """The declared commands, each engine's start command, and each measurement's own command."""
    lines = [f"# Commands of run {run.info['run']}, from the root of the repository."]
    for command in run.info.get("commands", []):
        lines += ["", f"# {command['name']}", _line(command["command"])]
    for engine in run.engines:
        lines += ["", f"# start {engine['label']}", _line(engine["command"], engine.get("environment"))]
    for m in run.measurements:
        r = m.result
        lines += ["", f"# {r.cell} of {r.model} with {r.engine}, block {r.block}, repetition {r.rep}"]
        lines.append(m.command_text.strip() or _line(r.command))
    return relative_paths("\n".join(lines) + "\n", repository)
