"""What every measurement of acceptance says of itself, so that two can be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkinfer.identity import file_sha256

GREEDY = "greedy"
"""vLLM's name for drafts without noise, its default."""


def prompts_digest(prompts: list[list[int]]) -> str:
    """SHA-256 of the prompts as `prompts` writes them: two measurements of one digest answered the same."""
    return hashlib.sha256((json.dumps(prompts) + "\n").encode()).hexdigest()


def portable(command: Sequence[str]) -> list[str]:
    """A command line without the paths of the machine it ran on: names of programs and folders stay."""

    def short(part: str) -> str:
        if part.startswith("--") and "=" in part:
            flag, _, value = part.partition("=")
            return f"{flag}={short(value)}"
        if part.startswith("{"):
            try:
                return json.dumps({k: short(v) if isinstance(v, str) else v for k, v in json.loads(part).items()})
            except ValueError:
                return part
        return Path(part).name if part.startswith("/") else part

    return [short(part) for part in command]


def origin(target: Path, drafter: Path, argv: Sequence[str]) -> dict[str, Any]:
    """When, by which command, on which machine and of which weights; a digest is None where a folder has no weights
    in one file. Documents before 2026-12-02 lack some of these."""
    from sparkinfer_eval.report.machine import machine_facts

    weights = {"target": target / "model.safetensors", "drafter": drafter / "model.safetensors"}
    digests = {f"{name}_sha256": file_sha256(path) if path.is_file() else None for name, path in weights.items()}
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"date": date, "argv": portable(argv), "machine": machine_facts(), **digests}
