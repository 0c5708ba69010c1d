"""Which module names a pattern means: whole name components only, so that `mlp.gate` is not `mlp.gate_up_proj`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase


def matches(pattern: str, module: str) -> bool:
    """Whether a pattern of the command line means `module` or a module around it.

    A pattern is a sequence of components, each a glob; it may start anywhere: `mlp.gate`, `layers.0`,
    `layers.1?.self_attn`, `experts.*.down_proj`, `lm_head`.
    """
    wanted, have = pattern.split("."), module.split(".")
    return any(
        all(fnmatchcase(part, glob) for part, glob in zip(have[first:], wanted, strict=False))
        for first in range(len(have) - len(wanted) + 1)
    )


def listed(entry: str, module: str) -> bool:
    """Whether an entry of a checkpoint's `ignore` (or target) list means `module` or a module around it.

    Entries are names, names with a glob as ModelOpt writes them (`a.b*` is `a.b`, `a.bc` and all below them, as vLLM
    reads it too), or regular expressions for the start of the name (`re:...`, compressed-tensors).
    """
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    if not _is_glob(entry):
        return matches(entry, module)
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[:count]), entry) for count in range(1, len(parts) + 1))


def _is_glob(entry: str) -> bool:
    """Whether an entry is a glob for the name from its start: more than a name, or the beginning of a component."""
    return entry.endswith(".*") or any(mark in entry.removesuffix("*") for mark in "*?[")


class NameList:
    """A list of entries as `listed` reads them, prepared for tens of thousands of look-ups.

    Raises re.error for a regular expression that is none.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self.entries = tuple(entries)
        self._plain: set[tuple[str, ...]] = set()
        self._begun: dict[tuple[str, ...], tuple[str, ...]] = {}
        """Beginnings of a component, by the components before it."""
        self._others: list[str] = []
        for entry in self.entries:
            if entry.startswith("re:"):
                re.compile(entry[3:])
            *before, last = entry.split(".")
            if entry.startswith("re:") or _is_glob(entry):
                self._others.append(entry)
            elif last.endswith("*"):
                self._begun[tuple(before)] = (*self._begun.get(tuple(before), ()), last[:-1])
            else:
                self._plain.add((*before, last))

    def __contains__(self, module: str) -> bool:
        """Whether any entry means `module` or a module around it."""
        parts = module.split(".")
        ends = range(1, len(parts) + 1)
        spans = [(first, end) for end in ends for first in range(end)]
        return (
            any(tuple(parts[first:end]) in self._plain for first, end in spans)
            or any(
                parts[end - 1].startswith(self._begun.get(tuple(parts[first : end - 1]), ())) for first, end in spans
            )
            or any(listed(entry, module) for entry in self._others)
        )
