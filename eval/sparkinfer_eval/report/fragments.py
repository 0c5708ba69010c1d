"""Change fragments: one Markdown file per change under `changes/`, with a small YAML head.

---
category: Added            # Added, Changed, Deprecated, Removed, Fixed or Security (Keep a Changelog)
setting: SPARKINFER_X      # optional: the setting that governs the change
turn off: SPARKINFER_X=0   # optional: how to get the old behaviour back
headline: short sentence   # optional: used as the release note's title; at most one fragment has it
---
What changed, for a reader of the release note.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from sparkinfer.errors import ConfigError

CATEGORIES = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
FIELDS = ("category", "setting", "turn off", "headline")
NOT_FRAGMENTS = ("README.md",)


@dataclass(frozen=True, slots=True)
class Fragment:
    """One change."""

    name: str
    category: str
    text: str
    setting: str | None = None
    turn_off: str | None = None
    headline: str | None = None

    def sentence(self) -> str:
        """The change with its setting and the way to turn it off, on one line."""
        text = " ".join(self.text.split())
        if self.setting:
            text += f" Setting: `{self.setting}`."
        if self.turn_off:
            text += f" To turn it off: `{self.turn_off}`."
        return text


def parse_fragment(name: str, text: str) -> Fragment:
    """Parse a fragment's text. Raises ConfigError that names the file and the fault."""
    parts = text.split("---\n", 2)
    if len(parts) != 3 or parts[0].strip():
        raise ConfigError(f"{name}: must begin with a YAML head between two lines of --- (see changes/README.md)")
    try:
        head = yaml.safe_load(parts[1])
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: the head is not YAML: {error}") from error
    if not isinstance(head, dict):
        raise ConfigError(f"{name}: the head must give at least `category: {'|'.join(CATEGORIES)}`")
    unknown = sorted(str(key) for key in set(head) - set(FIELDS))
    if unknown:
        raise ConfigError(f"{name}: unknown fields {', '.join(unknown)}; known are {', '.join(FIELDS)}")
    wrong = [key for key, value in head.items() if not isinstance(value, str) or not value.strip()]
    if wrong:
        raise ConfigError(f"{name}: {', '.join(map(str, wrong))} must be text (put it in quotes)")
    if head.get("category") not in CATEGORIES:
        raise ConfigError(f"{name}: category is {head.get('category')!r}; give one of {', '.join(CATEGORIES)}")
    body = parts[2].strip()
    if not body:
        raise ConfigError(f"{name}: says nothing below its head")
    return Fragment(name, head["category"], body, head.get("setting"), head.get("turn off"), head.get("headline"))


def fragment_files(folder: Path) -> list[Path]:
    """The fragment files directly in `folder`, by name."""
    return sorted(p for p in folder.glob("*.md") if p.name not in NOT_FRAGMENTS)


def read_fragments(folder: Path) -> list[Fragment]:
    """All fragments of a folder, by category and name. Raises ConfigError for a bad one or two headlines."""
    found = [parse_fragment(p.name, p.read_text(encoding="utf-8")) for p in fragment_files(folder)]
    headlines = [f.name for f in found if f.headline]
    if len(headlines) > 1:
        raise ConfigError(f"{folder}: more than one fragment has a headline ({', '.join(headlines)}): keep one")
    return sorted(found, key=lambda f: (CATEGORIES.index(f.category), f.name))


def fragments_of(changes: Path, version: str) -> list[Fragment]:
    """The fragments that belong to a version: those archived under it once released, the open ones before."""
    released = changes / version
    return read_fragments(released if released.is_dir() else changes)
