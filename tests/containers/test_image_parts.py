"""Parts of the image build that need no network and no root: locks, omissions, entry point, records, differences."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sparkinfer_containers.image import debs, rootfs, sbom, settings, wheels
from sparkinfer_containers.image.build import SOURCE_LABEL, config, dependencies, oci_annotations
from sparkinfer_containers.image.difference import differences
from sparkinfer_containers.oci.layout import Layout

from sparkinfer.errors import ConfigError, EnvironmentProblem

ROOT = Path(__file__).parents[2]


@pytest.fixture
def recipe() -> settings.Recipe:
    return settings.load(ROOT, "cpu", "sparkinfer-qwen38")


# Settings and locks as committed.


@pytest.mark.parametrize("variant", ["cpu", "cuda13"])
def test_committed_locks_are_complete(variant: str) -> None:
    made = settings.load(ROOT, variant)
    lock, python = debs.DebianLock.read(made.debian_lock), wheels.read_lock(made.python_lock)
    names = {deb.name for deb in lock.debs}
    assert set(made.variant.packages) <= names
    assert all(deb.architecture in ("amd64", "all") and len(deb.sha256) == 64 for deb in lock.debs)
    locked = {wheel.name.lower().replace("_", "-"): wheel.version for wheel in python}
    assert {root.split("==")[0] for root in made.variant.python} <= set(locked)
    assert locked["torch"] == {"cpu": "2.13.0+cpu", "cuda13": "2.11.0"}[variant]


def test_provenance_names_the_build_backend(recipe: settings.Recipe, tmp_path: Path) -> None:
    """What builds the project's own wheel, with version and digest, and the lock that says so."""
    (own := tmp_path / "sparkinfer.whl").write_bytes(b"wheel")
    lock, locked = debs.DebianLock.read(recipe.debian_lock), wheels.read_lock(recipe.python_lock)
    listed = dependencies(recipe, "0" * 40, lock, locked, own)
    (backend,) = wheels.read_lock(recipe.backend_lock)
    wanted = {"uri": f"pkg:pypi/setuptools@{backend.version}", "name": "build backend"}
    assert {**wanted, "digest": {"sha256": backend.sha256}} in listed
    assert "containers/locks/build.txt" in {item.get("name") for item in listed}
    assert "containers/locks/build.txt" in wheels.inputs(recipe), "another backend is another image"
    assert all(item["digest"] for item in listed)
    hashes = (ROOT / "workflow" / "envs" / "engine.txt").read_text().split(f"\nsetuptools=={backend.version} ")[1]
    assert backend.sha256 in hashes.split("==")[0], "run `make relock`"


def test_wheels_are_the_versions_that_the_project_tests(recipe: settings.Recipe) -> None:
    pinned = {}
    for name in reversed(recipe.variant.constraints):
        for pin in wheels.pins(ROOT / "workflow" / "envs" / name, recipe.python):
            package, _, version = pin.partition("==")
            pinned[package.lower().replace("_", "-")] = version
    for wheel in wheels.read_lock(recipe.python_lock):
        assert pinned[wheel.name.lower().replace("_", "-")] == wheel.version, "run `make relock`"


def test_one_setting_chooses_name_and_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.load(ROOT, "cuda13").reference.endswith("/sparkinfer-qwen38:0.1.0")
    monkeypatch.setenv(settings.NAME_SETTING, "sparkinfer-qwen36")
    other = settings.load(ROOT, "cpu")
    assert other.reference.endswith("/sparkinfer-qwen36:0.1.0-cpu")
    assert other.preset != settings.load(ROOT, "cpu", "sparkinfer-qwen38").preset


@pytest.mark.parametrize(("variant", "name"), [("tpu", None), ("cpu", "sparkinfer-qwen99")])
def test_unknown_name_or_variant(variant: str, name: str | None) -> None:
    with pytest.raises(ConfigError, match="unknown"):
        settings.load(ROOT, variant, name)


def test_config_is_hardened(recipe: settings.Recipe) -> None:
    made = config(recipe, [], oci_annotations(recipe, "0" * 40, 0, "sha256:1"), 0)["config"]
    assert made["User"] == "10001:10001"
    assert made["Entrypoint"][:2] == ["/usr/bin/tini", "--"]
    assert made["Volumes"] == {"/models": {}}
    assert made["Healthcheck"]["Test"][-1] == "sparkinfer_containers.health"
    assert "SPARKINFER_PRESET_FOLDER=/models/qwen3.8-27b-nvfp4" in made["Env"]
    assert "SPARKINFER_PRESET_HUB=gittensor-model-hub/Qwen3.8-27B-NVFP4-RTX5090" in made["Env"]
    assert made["Labels"]["org.opencontainers.image.revision"] == "0" * 40
    named = {"title", "description", "version", "revision", "source", "documentation", "licenses", "created"}
    assert {f"org.opencontainers.image.{name}" for name in named} | {SOURCE_LABEL} == set(made["Labels"])
    assert made["Labels"][SOURCE_LABEL] == "sha256:1"


def test_every_omission_has_a_reason(recipe: settings.Recipe) -> None:
    assert recipe.omit
    assert all(len(reason) > 3 for reason in recipe.omit.values())


# Debian packages.


def a_deb(content: bytes = b"package") -> debs.Deb:
    return debs.Deb("x", "1.0", "amd64", "pool/x_1.0.deb", len(content), hashlib.sha256(content).hexdigest())


needs_apt = pytest.mark.skipif(not debs.APT_HELPER.exists(), reason="apt is not on this machine")


@needs_apt
def test_package_that_the_mirror_dropped_comes_from_the_snapshot(tmp_path: Path, mirror: Any) -> None:
    lock = debs.DebianLock("bookworm", "20260101T000000Z", [a_deb()])
    empty, snapshot = mirror({}), mirror({"/20260101T000000Z/pool/x_1.0.deb": b"package"})
    found = debs.fetch(lock, tmp_path, [empty], [snapshot])
    assert found["x"].read_bytes() == b"package"


@needs_apt
@pytest.mark.parametrize("served", [{}, {"/pool/x_1.0.deb": b"another"}])
def test_package_that_nobody_has_is_named(tmp_path: Path, mirror: Any, served: dict[str, bytes]) -> None:
    lock = debs.DebianLock("bookworm", "20260101T000000Z", [a_deb()])
    with pytest.raises(EnvironmentProblem, match=r"x 1\.0.*make relock") as caught:
        debs.fetch(lock, tmp_path, [mirror(served)], [])
    assert caught.value.exit_code == 3
    assert list(tmp_path.iterdir()) == []


def test_cache_can_be_carried_and_is_checked(tmp_path: Path) -> None:
    deb = a_deb()
    lock = debs.DebianLock("bookworm", "20260101T000000Z", [deb])
    (tmp_path / deb.file).write_bytes(b"package")
    assert debs.fetch(lock, tmp_path, [], [])["x"].read_bytes() == b"package"
    (tmp_path / deb.file).write_bytes(b"spoiled")
    with pytest.raises(EnvironmentProblem, match=r"x 1\.0"):
        debs.fetch(lock, tmp_path, [], [])


@pytest.mark.parametrize("command", [["build", "--output", "x"], ["relock"], ["rebuild-check", "x"]])
def test_caches_are_named_by_variables(command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sparkinfer_containers import cli

    monkeypatch.setenv("DEB_CACHE", str(tmp_path / "debs"))
    monkeypatch.setenv("WHEEL_CACHE", str(tmp_path / "wheels"))
    args = cli._parser().parse_args(command)
    assert (args.deb_cache, args.wheel_cache) == (tmp_path / "debs", tmp_path / "wheels")
    monkeypatch.setenv("DEB_CACHE", "")
    assert cli._parser().parse_args(command).deb_cache == ROOT / ".cache" / "debs"


def test_lock_survives_writing_and_reading(tmp_path: Path) -> None:
    lock = debs.DebianLock("bookworm", "20260101T000000Z", [a_deb()])
    lock.write(tmp_path / "lock.json")
    assert debs.DebianLock.read(tmp_path / "lock.json") == lock
    (tmp_path / "lock.json").write_text("{}")
    with pytest.raises(ConfigError, match="make relock"):
        debs.DebianLock.read(tmp_path / "lock.json")


def test_root_is_normalised(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "raw.tar", "w") as tar:
        for name, kind, mode in [
            ("./usr/bin/su", tarfile.REGTYPE, 0o4755),
            ("./dev/null", tarfile.CHRTYPE, 0o666),
            ("./etc/hostname", tarfile.REGTYPE, 0o644),
            ("./var/log/apt/history.log", tarfile.REGTYPE, 0o644),
            ("./tmp", tarfile.DIRTYPE, 0o1777),
        ]:
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.mtime = kind, mode, 99
            tar.addfile(info)
    rootfs.normalise(tmp_path / "raw.tar", tmp_path / "root.tar", 7)
    with tarfile.open(tmp_path / "root.tar") as tar:
        found = {entry.name: (oct(entry.mode), entry.mtime) for entry in tar}
    assert found == {"tmp": ("0o1777", 7), "usr/bin/su": ("0o755", 7)}


# Wheels and the bill of materials.


@pytest.mark.parametrize("line", ["torch", "torch==2", "torch==2 --hash=md5:1", "torch>=2 --hash=sha256:" + "0" * 64])
def test_lock_line_without_digest_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "lock.txt").write_text(f"# comment\n{line}\n")
    with pytest.raises(ConfigError, match=":2: not a locked wheel"):
        wheels.read_lock(tmp_path / "lock.txt")


def test_omitted_paths_are_named_with_their_reason(tmp_path: Path) -> None:
    (tmp_path / "torch" / "test").mkdir(parents=True)
    (tmp_path / "torch" / "kept.py").touch()
    (tmp_path / "torch" / "test" / "x").write_bytes(b"12345")
    (tmp_path / "models" / "a").mkdir(parents=True)
    (tmp_path / "models" / "b").mkdir()
    patterns = {"torch/test": "tests", "torch/**/x": "gone with its folder", "models/*": "unused", "absent/*": "none"}
    gone = wheels.omit(tmp_path, patterns, {"models/b": "used"})
    assert [(item.pattern, item.reason, item.paths, item.bytes) for item in gone] == [
        ("torch/test", "tests", 1, 5),
        ("models/*", "unused", 1, 0),
    ]
    assert [path.name for path in (tmp_path / "torch").iterdir()] == ["kept.py"]
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["b"]


def test_sbom_lists_every_package_and_is_the_same_twice(recipe: settings.Recipe) -> None:
    lock, locked = debs.DebianLock.read(recipe.debian_lock), wheels.read_lock(recipe.python_lock)
    text = sbom.make(recipe, "sha256:" + "1" * 64, lock, locked)
    assert text == sbom.make(recipe, "sha256:" + "1" * 64, lock, locked)
    data = json.loads(text)
    assert (data["bomFormat"], data["specVersion"]) == ("CycloneDX", "1.6")
    assert len(data["components"]) == len(lock.debs) + len(locked)
    purls = {component["purl"].split("@")[0] for component in data["components"]}
    assert {"pkg:pypi/torch", "pkg:deb/debian/libc6"} <= purls
    assert all(component["hashes"] for component in data["components"])


# Differences between builds.


def test_differing_path_is_named(tmp_path: Path, toy: Callable[..., Layout]) -> None:
    first, second = toy(tmp_path / "1"), toy(tmp_path / "2", text="other\n", version="9")
    lines = differences(first, second)
    assert "layer 1: srv/text differs in content" in lines
    assert any(line.startswith("config: config is") for line in lines)
    assert differences(first, toy(tmp_path / "3")) == []


def test_second_build_that_differs_is_not_reproduced(
    toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """rebuild-check on two builds of which the second holds another file: exit 1 and the file is named."""
    from sparkinfer_containers import cli
    from sparkinfer_containers.image import rebuild as module

    repository = tmp_path / "repository"
    repository.mkdir()
    for command in (
        ["init", "-q"],
        ["-c", "user.name=x", "-c", "user.email=x", "commit", "-q", "--allow-empty", "-mx"],
    ):
        subprocess.run(["git", "-C", str(repository), *command], check=True)
    head = subprocess.run(
        ["git", "-C", str(repository), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    toy(tmp_path / "image" / "layout")
    record = {"commit": head.stdout.strip(), "variant": "cpu", "name": "toy"}
    (tmp_path / "image" / "image.json").write_text(json.dumps(record))
    text = "hello\n"

    def build(_recipe: Any, _clone: Path, output: Path, *_: Any) -> None:
        toy(output / "layout", text=text)

    monkeypatch.setattr(module, "build", build)
    monkeypatch.setattr(module, "load", lambda *_: None)
    command = [
        "--repository",
        str(repository),
        "rebuild-check",
        str(tmp_path / "image"),
        "--scratch",
        str(tmp_path / "s"),
    ]
    record_file = tmp_path / "rebuilt.json"
    assert cli.main([*command, "--record", str(record_file)]) == 0
    assert record_file.exists()
    record_file.unlink()
    text = "other\n"
    capsys.readouterr()
    assert cli.main([*command, "--record", str(record_file)]) == 1
    said = capsys.readouterr().out
    assert "NOT REPRODUCED" in said
    assert "srv/text" in said
    assert not record_file.exists()
