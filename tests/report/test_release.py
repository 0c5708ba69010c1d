"""Change fragments, the root CHANGELOG and the release note's parts that come from git."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from sparkinfer_eval.report.fragments import fragments_of, parse_fragment, read_fragments
from sparkinfer_eval.report.history import parse_log, read_history
from sparkinfer_eval.report.release import Places, insert_section, recover, release, versions_in
from sparkinfer_eval.report.text import refuse_claims
from sparkinfer_eval.report.writer import write_report

from sparkinfer.errors import ConfigError

CHANGELOG = "# Changelog\n\nAll changes.\n\n## [Unreleased]\n\nSee changes/.\n\n## [0.0.9] - 2026-11-01\n\n- Old.\n"


def git(folder: Path, *arguments: str) -> str:
    """Run git with a fixed identity."""
    identity = ["-c", "user.name=Ada Ångström", "-c", "user.email=7+ada@users.noreply.github.com"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path: Path, changes: Path) -> Path:
    """A checkout with pyproject.toml, CHANGELOG.md, changes/ and a report, all committed."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    report = tmp_path / "reports" / "0.1.0-cpu-0a1b2c3d"
    report.mkdir(parents=True)
    (report / "report.json").write_text(json.dumps(
        {"version": "0.1.0", "run": report.name, "measured": {"ended_at": "2026-12-01T10:00:00+00:00"}}
    ))  # fmt: skip
    (report / "CHANGELOG.md").write_text("# Title\n\n## Model\n\n| a | b |\n|---|---:|\n| chat | 1 |\n")
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "start")
    return tmp_path


def make(project: Path, version: str = "0.1.0") -> list[str]:
    """Release with the project's only report."""
    return release(version, project / "reports" / "0.1.0-cpu-0a1b2c3d", project)


def test_release_writes_the_section_and_archives_the_fragments(project):
    make(project)
    text = (project / "CHANGELOG.md").read_text()
    assert versions_in(text) == ["0.1.0", "0.0.9"]
    section = text[text.index("## [0.1.0]") : text.index("## [0.0.9]")]
    assert section.startswith("## [0.1.0] - 2026-12-01\n")
    assert "### Added\n\n- A server.\n" in section
    assert "Setting: `SPARKINFER_MIXED_CHUNK`. To turn it off: `SPARKINFER_MIXED_CHUNK=0`." in section
    assert "#### Title" in section
    assert "##### Model" in section
    assert "| chat | 1 |" in section
    assert text.startswith(CHANGELOG[: CHANGELOG.index("## [0.0.9]")])
    assert text.endswith("## [0.0.9] - 2026-11-01\n\n- Old.\n")
    assert read_fragments(project / "changes") == []
    assert [f.name for f in fragments_of(project / "changes", "0.1.0")] == ["server.md", "mixing.md"]


def test_first_section_of_a_changelog():
    text = insert_section("# Changelog\n\n## [Unreleased]\n", "## [0.1.0] - 2026-12-01\n\n- New.\n")
    assert text == "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2026-12-01\n\n- New.\n"


def test_same_version_twice_is_refused(project):
    make(project)
    git(project, "add", "-A")
    git(project, "commit", "-qm", "release")
    before = (project / "CHANGELOG.md").read_text()
    with pytest.raises(ConfigError, match="already in CHANGELOG"):
        make(project)
    assert (project / "CHANGELOG.md").read_text() == before


@pytest.mark.parametrize("version", ["1", "v0.1.0", "0.1", "0.01.0", "0.1.0 "])
def test_version_that_is_no_semver(project, version):
    with pytest.raises(ConfigError, match="SemVer"):
        make(project, version)


def test_version_that_differs_from_the_project_or_the_report(project):
    with pytest.raises(ConfigError, match=r"pyproject\.toml is of version '0\.1\.0'"):
        make(project, "0.2.0")
    (project / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    with pytest.raises(ConfigError, match="report 0"):
        make(project, "0.2.0")


def test_no_fragments(project):
    git(project, "rm", "-q", "changes/server.md", "changes/mixing.md")
    git(project, "commit", "-qm", "none")
    with pytest.raises(ConfigError, match="holds no fragment"):
        make(project)


@pytest.mark.parametrize("name", ["CHANGELOG.md", "changes/server.md", "changes/new.md"])
def test_uncommitted_changes_are_refused(project, name):
    path = project / name
    extra = "\nmore\n" if path.exists() else "---\ncategory: Fixed\n---\nx\n"
    path.write_text((path.read_text() if path.exists() else "") + extra)
    before = path.read_text()
    with pytest.raises(ConfigError, match="uncommitted changes"):
        make(project)
    assert path.read_text() == before
    assert "## [0.1.0]" not in (project / "CHANGELOG.md").read_text()


def test_not_a_report_and_no_unreleased_heading(project, tmp_path):
    with pytest.raises(ConfigError, match="not a report"):
        release("0.1.0", tmp_path, project)
    (project / "CHANGELOG.md").write_text("# Changelog\n")
    git(project, "commit", "-qam", "short")
    with pytest.raises(ConfigError, match="Unreleased"):
        make(project)


def test_failure_before_the_changelog_is_replaced_takes_everything_back(project, monkeypatch):
    original = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if Path(target).name == "CHANGELOG.md":
            raise OSError(28, "No space left on device")
        return original(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        make(project)
    monkeypatch.undo()
    assert git(project, "status", "--porcelain") == ""
    make(project)


@pytest.mark.parametrize("replaced", [False, True])
def test_killed_release_is_taken_back_or_finished(project, replaced):
    places = Places(project)
    places.staging("0.1.0").mkdir()
    for name in ("server.md", "mixing.md"):
        (places.changes / name).rename(places.staging("0.1.0") / name)
    if replaced:
        text = places.changelog.read_text()
        places.changelog.write_text(insert_section(text, "## [0.1.0] - 2026-12-01\n"))
    done = recover(places)
    assert len(done) == 1
    assert not places.staging("0.1.0").exists()
    assert places.archive("0.1.0").is_dir() is replaced
    assert len(read_fragments(places.changes)) == (0 if replaced else 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A change.", "YAML head"),
        ("---\n---\nA change.", "category"),
        ("---\ncategory: New\n---\nA change.", "category is 'New'"),
        ("---\ncategory: Added\nwhy: x\n---\nA change.", "unknown fields why"),
        ("---\ncategory: Added\nturn off: 0\n---\nA change.", "must be text"),
        ("---\ncategory: Added\n---\n\n", "says nothing"),
        ("---\ncategory: [\n---\nA change.", "not YAML"),
    ],
)
def test_bad_fragments(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_fragment("x.md", text)


def test_two_headlines_are_refused(changes):
    (changes / "more.md").write_text("---\ncategory: Added\nheadline: another\n---\nx\n")
    with pytest.raises(ConfigError, match="more than one fragment has a headline"):
        read_fragments(changes)


@pytest.mark.parametrize(
    "claim",
    ["prefill is 5% faster", "TTFT matches vLLM", "beats the baseline", "level with vLLM", "12 % lower latency"],
)
def test_claims_without_a_verdict_are_refused(raw_run, changes, tmp_path, claim):
    (changes / "claim.md").write_text(f"---\ncategory: Changed\n---\nNow {claim}.\n")
    raw = raw_run(cells=["chat-c1"])
    with pytest.raises(ConfigError, match="claims a comparison"):
        write_report(raw.folder, tmp_path / "out", tmp_path, changes)
    assert not (tmp_path / "out").exists()


def test_plain_statements_are_no_claims():
    refuse_claims(
        ["A prefix hit matches whole blocks.", "Decode and prefill share a pass.", "Heartbeats are sent."], "x"
    )


def test_release_note_has_the_parts_of_the_form(raw_run, project, monkeypatch):
    monkeypatch.setattr("sparkinfer_eval.report.writer.draw_all", lambda figures: {})
    git(project, "tag", "v0.0.9")
    git(project, "commit", "-q", "--allow-empty", "-m", "perf(runtime): mixed steps (#12)")
    git(project, "commit", "-q", "--allow-empty", "-m", "docs: settings")
    raw = raw_run()
    path = raw.folder / "run.json"
    info = json.loads(path.read_text())
    info["source"] = {"commit": git(project, "rev-parse", "HEAD"), "dirty": False}
    path.write_text(json.dumps(info))
    write_report(raw.folder, project / "out", project, project / "changes")
    note = (project / "out" / "RELEASE_NOTE.md").read_text()
    parts = ["# v0.1.0 — the first server", "## Measured", "16 chats: vLLM 0.30.0",
             "Per-token latency (ITL p50, ms) at 1 / 16 chats: sparkinfer 0.1.0 ", "## What changed", "A server.",
             "To turn it off: `SPARKINFER_MIXED_CHUNK=0`.", "Container:", "## What's Changed",
             "perf(runtime): mixed steps by @ada in #12", "docs: settings by @ada in ", "v0.0.9...v0.1.0"]  # fmt: skip
    places = [note.index(part) for part in parts]
    assert places == sorted(places)
    assert "start by" not in note


def test_history_without_checkout_commit_or_tag(tmp_path, project):
    assert read_history(tmp_path, None, "0.1.0").reason == "the run was not made from a git checkout"
    reason = read_history(project, "0" * 40, "0.1.0").reason
    assert reason is not None
    assert "not in this repository" in reason
    history = read_history(project, git(project, "rev-parse", "HEAD"), "0.1.0")
    assert (history.previous_tag, [c.title for c in history.changes]) == (None, ["start"])


def test_own_tag_is_not_the_previous_one(project):
    git(project, "tag", "v0.0.9")
    git(project, "commit", "-q", "--allow-empty", "-m", "new")
    git(project, "tag", "v0.1.0")
    assert read_history(project, git(project, "rev-parse", "HEAD"), "0.1.0").previous_tag == "v0.0.9"


def test_merge_commit_takes_its_title_from_the_body():
    record = "\x1f".join(("a" * 40, "Ann", "ann@example.org", "Merge pull request #7 from ann/x", "Packed prefill\n"))
    (change,) = parse_log(record + "\x1e\n")
    assert change.line() == "Packed prefill by Ann in #7"
