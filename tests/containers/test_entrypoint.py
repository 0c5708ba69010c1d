"""What the container starts: the model that is given, mounted or fetched, the presets' own; and the health check."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from sparkinfer_containers import entrypoint, health
from sparkinfer_containers.image import settings
from sparkinfer_containers.image.build import config, oci_annotations

from sparkinfer.errors import ConfigError, EnvironmentProblem

ROOT = Path(__file__).parents[2]
PRESETS = {
    "sparkinfer-qwen38": ("/models/qwen3.8-27b-nvfp4", "gittensor-model-hub/Qwen3.8-27B-NVFP4-RTX5090"),
    "sparkinfer-qwen36": ("/models/qwen3.6-35b-a3b-nvfp4", "nvidia/Qwen3.6-35B-A3B-NVFP4"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_image_of_a_preset_starts_its_model(name: str, tmp_path: Path) -> None:
    """What the image's environment makes the entry point do: serve the mounted model, or refuse without a revision."""
    recipe, (folder, hub) = settings.load(ROOT, "cpu", name), PRESETS[name]
    made = config(recipe, [], oci_annotations(recipe, "0" * 40, 0, "sha256:1"), 0)["config"]["Env"]
    environment = dict(item.split("=", 1) for item in made)
    assert (environment["SPARKINFER_PRESET_FOLDER"], environment["SPARKINFER_PRESET_HUB"]) == (folder, hub)
    # A revision that is not known is not made up, and nothing is fetched without one.
    assert "SPARKINFER_PRESET_REVISION" not in environment
    for revision in ("", "main", "1" * 39):
        with pytest.raises(ConfigError, match=rf"no model is mounted at {folder} .*{hub}.*SPARKINFER_MODEL_REVISION"):
            entrypoint.arguments([], {**environment, "SPARKINFER_MODEL_REVISION": revision}, tmp_path)
    fetched = tmp_path / f"{hub.replace('/', '--')}@{'1' * 12}"
    fetched.mkdir()
    (fetched / ".complete").touch()
    listed = entrypoint.arguments([], {**environment, "SPARKINFER_MODEL_REVISION": "1" * 40}, tmp_path)
    assert listed[:4] == ["serve", str(fetched), "--served-model-name", Path(folder).name]
    # A model of the user's own is never replaced by the preset's.
    own = {**environment, "SPARKINFER_MODEL": "/models/none", "SPARKINFER_MODEL_REVISION": "1" * 40}
    with pytest.raises(ConfigError, match="is no folder in this container"):
        entrypoint.arguments([], own, tmp_path)
    passed = dict(environment)
    entrypoint.arguments(["doctor"], passed)
    assert not any(key.startswith("SPARKINFER_") for key in passed), "the engine refuses what is no setting of its own"


def test_preset_with_revision_drafter_and_settings(tmp_path: Path) -> None:
    preset = settings.Preset("t", str(tmp_path / "m"), "a/b", "2" * 40, "/models/d", {"SPARKINFER_MIXED_CHUNK": "0"})
    fetched = tmp_path / "a--b@222222222222"
    fetched.mkdir()
    (fetched / ".complete").touch()
    environment = preset.environment()
    drafter = ["--draft-model", "/models/d"]
    assert entrypoint.arguments([], environment, tmp_path)[1:5] == [
        str(fetched),
        "--served-model-name",
        "m",
        drafter[0],
    ]
    assert environment == {"SPARKINFER_MIXED_CHUNK": "0"}
    (tmp_path / "m").mkdir()
    listed = entrypoint.arguments([], preset.environment(), tmp_path)
    assert listed[:4] == ["serve", str(tmp_path / "m"), *drafter]


def test_settings_of_presets_are_the_engines() -> None:
    from sparkinfer.settings import Settings

    known = {f"SPARKINFER_{field.name.upper()}" for field in dataclasses.fields(Settings)}
    for name in PRESETS:
        preset = settings.load(ROOT, "cpu", name).preset
        assert set(preset.settings) <= known
        assert not preset.drafter, "the server of this version loads none"


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
        *(
            ({"SPARKINFER_MODEL": name, "SPARKINFER_MODEL_REVISION": "1" * 40}, "mount one")
            for name in (
                "../x",
                "x/..",
                "a--b/c",
                "-a/b",
                "a/b.",
                "a/b.git",
                "a/" + "b" * 97,
                "none",
                "-x",
                "/etc/hosts",
            )
        ),
        ({"SPARKINFER_MODEL": "x" * 5000}, "name a folder under /models"),
        ({"SPARKINFER_PRESET_FOLDER": "/" + "x" * 5000}, "name a folder under /models"),
    ],
)
def test_model_that_cannot_be_had_is_explained(environment: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        entrypoint.arguments([], environment, tmp_path)


def test_folder_that_looks_like_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "-x").mkdir()
    monkeypatch.chdir(tmp_path)
    assert entrypoint.arguments([], {"SPARKINFER_MODEL": "-x"})[:2] == ["serve", str(tmp_path / "-x")]


@pytest.mark.parametrize("name", ["../x", "x" * 5000, "a/b.git"])
def test_bad_model_ends_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["entrypoint"])
    monkeypatch.setenv("SPARKINFER_MODEL", name)
    monkeypatch.setenv("SPARKINFER_MODEL_REVISION", "1" * 40)
    with pytest.raises(SystemExit) as ended:
        entrypoint.main()
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n"), len(said) < 500) == (2, 1, True)


def test_name_that_only_the_hub_s_client_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no name of a hub model"):
        entrypoint.fetch_model("../x", "1" * 40, tmp_path)


def test_hub_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own errors of the network are neither the hub's nor the system's."""
    import httpx
    import huggingface_hub

    def refuse(*_: Any, **__: Any) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(EnvironmentProblem, match=r"could not be fetched .*check the network"):
        entrypoint.fetch_model("a/b", "1" * 40, tmp_path)


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
