"""Move the open change fragments and a run's tables into the root CHANGELOG.md as one version's section.

The order of steps makes an interruption harmless: fragments are first renamed into a staging folder, the CHANGELOG is
replaced by rename (the point of no return), and the staging folder then becomes `changes/<version>/`. The next call
finishes or takes back what an interrupted one left.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError
from sparkinfer_eval.report.fragments import CATEGORIES, Fragment, fragment_files, read_fragments
from sparkinfer_eval.report.text import refuse_claims

SEMVER = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")
UNRELEASED = "## [Unreleased]"
_SECTION = re.compile(r"^## \[([^\]]+)\]", re.MULTILINE)
STAGING_PREFIX = ".release-"


@dataclass(frozen=True, slots=True)
class Places:
    """The files that a release touches."""

    repository: Path

    @property
    def changelog(self) -> Path:
        """The root CHANGELOG.md."""
        return self.repository / "CHANGELOG.md"

    @property
    def changes(self) -> Path:
        """The folder of fragments."""
        return self.repository / "changes"

    def staging(self, version: str) -> Path:
        """Where fragments wait while their section is being written."""
        return self.changes / f"{STAGING_PREFIX}{version}"

    def archive(self, version: str) -> Path:
        """Where a released version's fragments stay."""
        return self.changes / version


def versions_in(changelog: str) -> list[str]:
    """The versions that have a section, newest first as written."""
    return [v for v in _SECTION.findall(changelog) if v != "Unreleased"]


def _read_report(folder: Path) -> tuple[dict[str, Any], str]:
    """A report folder's report.json and CHANGELOG.md. Raises ConfigError when either is missing or unreadable."""
    try:
        data = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        tables = (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} is not a report ({error.filename} is missing): render it first") from error
    except ValueError as error:
        raise ConfigError(f"{folder}/report.json is not JSON ({error}): render the report again") from error
    return data, tables


def _refuse_uncommitted(places: Places) -> None:
    """Refuse to rewrite files whose present state git does not hold. Outside a checkout there is nothing to compare."""
    try:
        done = subprocess.run(
            ["git", "status", "--porcelain", "--", "CHANGELOG.md", "changes"],
            cwd=places.repository,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigError("git is not installed: it is needed to see uncommitted changes") from error
    if done.returncode == 0 and done.stdout.strip():
        raise ConfigError(
            "CHANGELOG.md or changes/ has uncommitted changes, which a release would mix with its own:\n"
            f"{done.stdout.rstrip()}\ncommit them first"
        )


def recover(places: Places) -> list[str]:
    """Finish or take back interrupted releases; returns what was done, one sentence each."""
    done = []
    for staging in sorted(places.changes.glob(f"{STAGING_PREFIX}*")):
        version = staging.name.removeprefix(STAGING_PREFIX)
        released = versions_in(places.changelog.read_text(encoding="utf-8")) if places.changelog.is_file() else []
        if version in released:
            staging.rename(places.archive(version))
            done.append(f"finished the interrupted release {version}: its fragments are in changes/{version}/")
            continue
        for path in fragment_files(staging):
            target = places.changes / path.name
            if target.exists():
                raise ConfigError(f"{path} of an interrupted release and {target} both exist: keep one of them")
            path.rename(target)
        staging.rmdir()
        done.append(f"took back the interrupted release {version}: its fragments are open again")
    return done


def _demote(markdown: str, levels: int) -> str:
    """Lower every heading by `levels`, at most to level 6, outside code fences."""
    lines = []
    fenced = False
    for line in markdown.splitlines():
        fenced ^= line.startswith("```")
        found = re.match(r"(#{1,6}) ", line)
        if found and not fenced:
            line = "#" * min(6, len(found[1]) + levels) + line[len(found[1]) :]
        lines.append(line)
    return "\n".join(lines)


def section(version: str, date: str, fragments: list[Fragment], run: str, tables: str) -> str:
    """One version's section: the fragments by category, then the run's tables."""
    lines = [f"## [{version}] - {date}", ""]
    for category in CATEGORIES:
        chosen = [f for f in fragments if f.category == category]
        if chosen:
            lines += [f"### {category}", "", *[f"- {f.sentence()}" for f in chosen], ""]
    lines += ["### Measured", "", f"Report folder: `reports/{run}/`.", "", _demote(tables, 3).strip(), ""]
    return "\n".join(lines)


def insert_section(changelog: str, text: str) -> str:
    """Put a section below Unreleased. Raises ConfigError when there is no such heading."""
    if UNRELEASED not in changelog:
        raise ConfigError(f"CHANGELOG.md has no line {UNRELEASED!r}: add it below the introduction (Keep a Changelog)")
    after = changelog.index(UNRELEASED) + len(UNRELEASED)
    following = _SECTION.search(changelog, after)
    at = following.start() if following else len(changelog)
    before, behind = changelog[:at].rstrip("\n"), changelog[at:]
    return f"{before}\n\n{text.rstrip()}\n" + (f"\n{behind}" if following else "")


def release(version: str, report: Path, repository: Path) -> list[str]:
    """Make the release's section; returns what was done, one sentence each. Raises ConfigError and changes nothing
    when the version is no SemVer or exists already, differs from the report's or the project's, or has no fragment."""
    places = Places(repository)
    messages = recover(places)
    if SEMVER.fullmatch(version) is None:
        raise ConfigError(f"version {version!r} is not of the form MAJOR.MINOR.PATCH (SemVer)")
    if not places.changelog.is_file():
        raise ConfigError(f"{places.changelog} does not exist: create it with a line {UNRELEASED!r}")
    changelog = places.changelog.read_text(encoding="utf-8")
    if version in versions_in(changelog) or places.archive(version).exists():
        raise ConfigError(f"version {version} is already in CHANGELOG.md or changes/{version}/: choose the next one")
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    data, tables = _read_report(report)
    for what, found in (("pyproject.toml", project), (f"report {report.name}", data.get("version"))):
        if found != version:
            raise ConfigError(f"{what} is of version {found!r}, not {version!r}: a section describes what was measured")
    fragments = read_fragments(places.changes)
    if not fragments:
        raise ConfigError("changes/ holds no fragment: describe what changed first (see changes/README.md)")
    refuse_claims([f.sentence() for f in fragments], "changes/")
    _refuse_uncommitted(places)
    date = str(data["measured"]["ended_at"])[:10]
    text = insert_section(changelog, section(version, date, fragments, str(data["run"]), tables))
    _write(places, version, text)
    return [*messages, f"CHANGELOG.md has section {version}; {len(fragments)} fragments are in changes/{version}/"]


def _write(places: Places, version: str, text: str) -> None:
    """Stage the fragments, replace the CHANGELOG, archive the fragments."""
    temporary = places.changelog.with_name(f".CHANGELOG.md.{os.getpid()}.tmp")
    staging = places.staging(version)
    try:
        temporary.write_text(text, encoding="utf-8")
        staging.mkdir()
        for path in fragment_files(places.changes):
            path.rename(staging / path.name)
        temporary.replace(places.changelog)
    finally:
        temporary.unlink(missing_ok=True)
        recover(places)
