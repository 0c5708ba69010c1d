"""Image or source tree: what a release measures, and why not the image where it cannot."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from sparkinfer_containers.image import choice, settings, wheels
from sparkinfer_eval.plan.identity import source_tree_digest

from sparkinfer.errors import EnvironmentProblem

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout with the files that decide an image."""
    folder = tmp_path / "checkout"
    recipe = settings.load(ROOT, "cpu")
    for name in [*wheels.inputs(recipe), *(str(p.relative_to(ROOT)) for p in (ROOT / "containers").rglob("*.py"))]:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(ROOT / name, target)
    git(folder, "init", "-q")
    git(folder, "config", "user.email", "x@example.invalid")
    git(folder, "config", "user.name", "x")
    commit(folder, "first")
    return folder


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)


@pytest.fixture(autouse=True)
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that can build and run images, whatever this one can."""
    monkeypatch.setattr(choice, "runtime_obstacle", lambda device: None)
    monkeypatch.setattr(choice, "build_obstacle", lambda: None)


def key(folder: Path) -> str:
    return choice.image_folder(folder, "cpu")[0]


def test_image_is_built_first_and_then_measured(checkout: Path) -> None:
    first = choice.choose(checkout, "auto", "cpu")
    assert first.digest is None
    assert first.pending == f"{key(checkout)}/image.json"
    record = checkout / str(first.pending)
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"digest": "sha256:1", "reference": "example.invalid/x:1"}))
    found = choice.choose(checkout, "auto", "cpu")
    assert (found.digest, found.pending) == ("sha256:1", None)


def test_only_what_goes_into_the_image_makes_another(checkout: Path) -> None:
    before = key(checkout)
    (checkout / "README.md").write_text("other words\n")
    (checkout / "reports").mkdir()
    (checkout / "reports" / "report.json").write_text("{}")
    commit(checkout, "a report")
    assert key(checkout) == before
    recipe = settings.load(checkout, "cpu")
    assert wheels.commit_of(checkout, recipe) == wheels.commit_of(checkout, recipe, "HEAD~1")
    (checkout / "sparkinfer" / "errors.py").open("a").write("# changed\n")
    commit(checkout, "the engine")
    changed = key(checkout)
    assert changed != before
    (checkout / "containers" / "sparkinfer_containers" / "image" / "rootfs.py").open("a").write("# changed\n")
    assert key(checkout) != changed, "another builder may make other bytes"


def test_uncommitted_engine_is_measured_from_source(checkout: Path) -> None:
    (checkout / "sparkinfer" / "errors.py").open("a").write("# changed\n")
    found = choice.choose(checkout, "auto", "cpu")
    assert (found.digest, found.pending) == (None, None)
    assert "sparkinfer/errors.py has changes that are not committed" in found.reason
    assert found.container() == {"measured": False, "reason": found.reason}
    with pytest.raises(EnvironmentProblem, match="engine_from is `image`, but sparkinfer/errors"):
        choice.choose(checkout, "image", "cpu")


def test_folder_without_history_is_measured_from_source(checkout: Path, tmp_path: Path) -> None:
    shutil.rmtree(checkout / ".git")
    assert "no image can be built from this folder" in choice.choose(checkout, "auto", "cpu").reason
    assert choice.image_folder(checkout, "cpu") == ("results/images/cpu-none", "none")


def test_shallow_clone_does_not_know_its_commit(checkout: Path, tmp_path: Path) -> None:
    (checkout / "README.md").write_text("second\n")
    commit(checkout, "second")
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{checkout}", str(tmp_path / "shallow"))
    assert "shallow clone" in choice.choose(tmp_path / "shallow", "auto", "cpu").reason


def test_host_that_cannot_take_the_image_says_why(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "runtime_obstacle", lambda device: "no sandbox here")
    found = choice.choose(checkout, "auto", "cpu")
    assert (found.digest, found.reason) == (None, "no sandbox here")
    assert choice.choose(checkout, "source", "cpu").reason == "the setting engine_from is `source`"


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "docker-registry" in str(choice.runtime_obstacle("cpu"))
    assert "mmdebstrap" in str(choice.build_obstacle())
    monkeypatch.setattr(shutil, "which", lambda name: "/x" if name == "docker-registry" else None)
    assert "bubblewrap" in str(choice.runtime_obstacle("cpu"))
    assert "NVIDIA container toolkit" in str(choice.runtime_obstacle("cuda"))


def test_files_of_the_image_are_the_engine_that_a_run_from_source_names(checkout: Path, tmp_path: Path) -> None:
    """The image's label and a run from source name the same tree by the same digest."""
    commit_id, _ = wheels.commit_of(checkout, settings.load(checkout, "cpu"))
    source = wheels.project_source(checkout, commit_id, tmp_path / "work")
    assert source_tree_digest(source) == source_tree_digest(checkout)
    assert not (source / "eval").exists()
