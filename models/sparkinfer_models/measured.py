"""What every measurement of acceptance says of itself, so that two can be compared."""

from __future__ import annotations

import hashlib
import json

GREEDY = "greedy"
"""vLLM's name for drafts without noise, its default."""


def prompts_digest(prompts: list[list[int]]) -> str:
    """SHA-256 of the prompts as `prompts` writes them: two measurements of one digest answered the same."""
    return hashlib.sha256((json.dumps(prompts) + "\n").encode()).hexdigest()
