"""The list of changes merged since the last release, from git."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_FIELD, _RECORD = "\x1f", "\x1e"


@dataclass(frozen=True, slots=True)
class MergedChange:
    """One commit of the first-parent line."""

    commit: str
    title: str
    author: str
    number: int | None

    def line(self) -> str:
        """`title by author in #12`, or the short commit where there is no pull request."""
        where = f"#{self.number}" if self.number is not None else self.commit[:9]
        return f"{self.title} by {self.author} in {where}"


@dataclass(frozen=True, slots=True)
class History:
    """Changes up to `commit` since `previous_tag` (None: since the beginning). `reason` says why it is unknown."""

    changes: list[MergedChange]
    previous_tag: str | None
    reason: str | None = None


def _git(repository: Path, *arguments: str) -> str | None:
    """Output of a git command, None when it fails (not a checkout, unknown commit) or git is absent."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=repository, capture_output=True, encoding="utf-8", check=False, timeout=60
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def _author(name: str, email: str) -> str:
    """`@handle` for a GitHub no-reply address, else the author's name."""
    found = re.fullmatch(r"(?:\d+\+)?([A-Za-z0-9-]+)@users\.noreply\.github\.com", email)
    return f"@{found[1]}" if found else name


def parse_log(text: str) -> list[MergedChange]:
    """Parse `git log` output in the format of `read_history`; a merge commit's title is its body's first line."""
    changes = []
    for record in text.split(_RECORD):
        if not record.strip():
            continue
        commit, name, email, subject, body = record.strip("\n").split(_FIELD)
        merge = re.match(r"Merge pull request #(\d+)", subject)
        lines = body.strip().splitlines()
        title = lines[0] if merge and lines else subject
        squash = re.search(r"\s*\(#(\d+)\)$", title)
        number = int(merge[1]) if merge else int(squash[1]) if squash else None
        if squash:
            title = title[: squash.start()]
        changes.append(MergedChange(commit, title, _author(name, email), number))
    return changes


def read_history(repository: Path, commit: str | None, version: str) -> History:
    """First-parent commits from the newest earlier release tag to `commit`, oldest first."""
    if commit is None:
        return History([], None, "the run was not made from a git checkout")
    tags = _git(repository, "tag", "--merged", commit, "--list", "v[0-9]*", "--sort=-v:refname")
    if tags is None:
        return History([], None, f"commit {commit[:9]} of the run is not in this repository")
    previous = next((tag for tag in tags.split() if tag != f"v{version}"), None)
    span = f"{previous}..{commit}" if previous else commit
    form = _FIELD.join(("%H", "%an", "%ae", "%s", "%b")) + _RECORD
    log = _git(repository, "log", "--first-parent", "--reverse", f"--format={form}", span)
    if log is None:
        return History([], previous, f"git log {span} failed")
    return History(parse_log(log), previous)
