"""Parts of the image build that need no network and no root: locks, omissions, entry point, records, differences."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sparkinfer_containers import entrypoint, health
from sparkinfer_containers.image import debs, rootfs, sbom, settings, wheels
from sparkinfer_containers.image.build import SOURCE_LABEL, config, oci_annotations
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
    assert other.environment != settings.load(ROOT, "cpu", "sparkinfer-qwen38").environment


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
    assert "SPARKINFER_MODEL=/models/qwen3.8-27b-nvfp4" in made["Env"]
    assert made["Labels"]["org.opencontainers.image.revision"] == "0" * 40
    assert made["Labels"][SOURCE_LABEL] == "sha256:1"


def test_every_omission_has_a_reason(recipe: settings.Recipe) -> None:
    assert recipe.omit
    assert all(len(reason) > 3 for reason in recipe.omit.values())


# Debian packages.


def a_deb(content: bytes = b"package") -> debs.Deb:
    return debs.Deb("x", "1.0", "amd64", "pool/x_1.0.deb", len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Callable[[dict[str, bytes]], str]]:
    """Starts a web server with the given paths; returns its address."""
    servers = []

    def start(files: dict[str, bytes]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = files.get(self.path)
                self.send_response(200 if data is not None else 404)
                self.send_header("Content-Length", str(len(data or b"")))
                self.end_headers()
                self.wfile.write(data or b"")

            def log_message(self, *_: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


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


# The entry point and the health check.


def test_arguments_for_a_mounted_model(tmp_path: Path) -> None:
    environment = {"SPARKINFER_MODEL": str(tmp_path), "SPARKINFER_PORT": "9", "SPARKINFER_MIXED_CHUNK": "0"}
    made = entrypoint.arguments(["--seed", "1"], environment)
    assert made == ["serve", str(tmp_path), "--host", "0.0.0.0", "--port", "9", "--seed", "1"]
    assert environment == {"SPARKINFER_MIXED_CHUNK": "0"}


def test_a_subcommand_passes_through() -> None:
    assert entrypoint.arguments(["doctor"], {"SPARKINFER_MODEL": "x"}) == ["doctor"]
    made = entrypoint.arguments(["serve", "/models/x", "--port", "9"], {"SPARKINFER_PORT": "1"})
    assert made == ["serve", "--host", "0.0.0.0", "--port", "1", "/models/x", "--port", "9"]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "SPARKINFER_MODEL is not set"),
        ({"SPARKINFER_MODEL": "/models/none"}, "mount one"),
        ({"SPARKINFER_MODEL": "a/b"}, "pinned revision"),
        ({"SPARKINFER_MODEL": "a/b", "SPARKINFER_MODEL_REVISION": "main"}, "pinned revision"),
        ({"SPARKINFER_MODEL": "../../none/at/all"}, "mount one"),
    ],
)
def test_model_that_cannot_be_had_is_explained(environment: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        entrypoint.arguments([], environment, tmp_path)


def test_fetched_model_is_not_fetched_again(tmp_path: Path) -> None:
    folder = tmp_path / "a--b@111111111111"
    folder.mkdir()
    (folder / ".complete").touch()
    assert entrypoint.find_model("a/b", "1" * 40, tmp_path) == folder


def test_hub_model_is_fetched_at_its_pinned_revision(tmp_path: Path) -> None:
    """From a server that speaks the hub's protocol; a model at another commit is not taken for it."""
    revision, files = "2" * 40, {"config.json": b"{}", "model.safetensors": b"weights"}

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith(f"/api/models/a/b/revision/{revision}"):
                siblings = [{"rfilename": name} for name in files]
                self.answer(json.dumps({"id": "a/b", "sha": revision, "siblings": siblings}).encode())
                return
            if self.path.startswith(f"/api/models/a/b/tree/{revision}"):
                tree = [{"type": "file", "path": k, "size": len(v), "oid": "0" * 40} for k, v in files.items()]
                self.answer(json.dumps(tree).encode())
                return
            name = self.path.partition(f"/a/b/resolve/{revision}/")[2]
            self.answer(files.get(name))

        do_HEAD = do_GET

        def answer(self, data: bytes | None) -> None:
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
            self.send_header("X-Repo-Commit", revision)
            self.send_header("ETag", f'"{hashlib.sha1(data or b"").hexdigest()}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data or b"")

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    script = "import sys; from sparkinfer_containers.entrypoint import arguments; from pathlib import Path; import os;"
    script += "print(arguments([], os.environ, Path(sys.argv[1]))[1])"
    outer = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home")}
    outer |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "containers")]), "NO_PROXY": "127.0.0.1"}
    outer |= {"SPARKINFER_MODEL": "a/b", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    def fetch(commit: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, str(tmp_path / "models")]
        return subprocess.run(
            command, env=outer | {"SPARKINFER_MODEL_REVISION": commit}, capture_output=True, text=True, check=False
        )

    try:
        done = fetch(revision)
        assert done.returncode == 0, done.stderr
        other = fetch("3" * 40)
    finally:
        server.shutdown()
        server.server_close()
    folder = tmp_path / "models" / f"a--b@{revision[:12]}"
    assert done.stdout.strip() == str(folder)
    assert {name: (folder / name).read_bytes() for name in files} == files
    assert other.returncode != 0
    assert "could not be fetched" in other.stderr
    # With the server gone a second start finds what the first one fetched.
    assert fetch(revision).stdout.strip() == str(folder)


def test_health_check(mirror: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKINFER_PORT", mirror({"/health": b"{}"}).rsplit(":", 1)[1])
    assert health.main() == 0
    monkeypatch.setenv("SPARKINFER_PORT", mirror({}).rsplit(":", 1)[1])
    assert health.main() == 1
    monkeypatch.setenv("SPARKINFER_PORT", "9")
    assert health.main() == 1


def test_unpacked_image_runs_read_only_as_another_user(tmp_path: Path) -> None:
    """A tiny root with the host's busybox-like tools bound in: what the sandbox lets a process do."""
    from sparkinfer_containers.image.run import command

    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    root = tmp_path / "image" / "root"
    for name in ("dev", "proc", "tmp", "usr", "models", "etc"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    settings_ = {"User": "10001:10001", "WorkingDir": "/", "Env": ["PATH=/usr/bin"], "Entrypoint": ["/bin/sh", "-c"]}
    (tmp_path / "image" / "config.json").write_text(json.dumps({"config": settings_}))
    script = 'id -u; echo "$SPARKINFER_IMAGE_DIGEST"; echo $$; touch /etc/x 2>/dev/null || echo read-only; '
    script += "touch /tmp/x && ls /tmp"
    listed = command(tmp_path / "image", "sha256:1", arguments=[script])
    at = listed.index("--dev")
    listed[at:at] = ["--ro-bind", "/usr", "/usr"]
    done = subprocess.run(listed, capture_output=True, text=True, timeout=60, env=dict(os.environ, SECRET="1"))
    if "No permissions" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip(f"namespaces are not allowed here: {done.stderr.strip()}")
    assert done.stdout.split() == ["10001", "sha256:1", "1", "read-only", "x"], done.stderr


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
