"""The real image, end to end: built, attested, pushed, verified by us and by others, pulled, run, rebuilt.

Needs root, Debian's tools and the package index or caches (DEB_CACHE, WHEEL_CACHE). IMAGE=DIR takes an image that
`python -m sparkinfer_containers build` made instead of building one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from packageurl import PackageURL
from sparkinfer_containers import cli, ship
from sparkinfer_containers.image import daemon
from sparkinfer_containers.image.build import LIBRARY, SOURCE_LABEL
from sparkinfer_containers.image.run import Container, command
from sparkinfer_containers.image.start import start
from sparkinfer_containers.loopback import registry
from sparkinfer_containers.oci.layout import Layout
from sparkinfer_containers.verify.cli import main as verify

from sparkinfer.identity import SOURCE_PACKAGES, package_files, short, tree_digest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
PROGRAMS = ("mmdebstrap", "bwrap", "docker-registry", "git")


@pytest.fixture(scope="module")
def caches() -> list[str]:
    """Options that name the download caches."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparkinfer"
    debs, wheels = os.environ.get("DEB_CACHE") or cache / "debs", os.environ.get("WHEEL_CACHE") or cache / "wheels"
    return ["--deb-cache", str(debs), "--wheel-cache", str(wheels)]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory, caches: list[str]) -> Iterator[Path]:
    """A copy of the built image that may be attested."""
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if os.getuid() != 0:
        pytest.skip("mmdebstrap and the sandbox's user mapping need root here")
    folder = tmp_path_factory.mktemp("release") / "image"
    given = os.environ.get("IMAGE")
    if given:
        shutil.copytree(given, folder, copy_function=os.link)
        unsigned(folder)
    else:
        assert cli.main(["build", "--variant", "cpu", "--output", str(folder), *caches]) == 0
    yield folder
    shutil.rmtree(folder)


def unsigned(folder: Path) -> None:
    """Take attestations that a given image carries out of its index."""
    index = folder / "layout" / "index.json"
    data = json.loads(index.read_text())
    data["manifests"] = [item for item in data["manifests"] if "artifactType" not in item]
    index.unlink()  # the copy is made of hard links
    index.write_text(json.dumps(data))


@pytest.fixture(scope="module")
def pushed(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The attested image in a registry: its reference by digest, and the private trust root."""
    folder = tmp_path_factory.mktemp("registry")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTEST_STATE", str(folder / "state"))
        start = time.monotonic()
        assert cli.main(["attest", str(image)]) == 0
        assert time.monotonic() - start < 10
    with registry(folder / "registry") as host:
        assert cli.main(["push", str(image), f"{host}/sparkinfer/image:1"]) == 0
        digest = Layout(image / "layout").image().digest
        yield f"{host}/sparkinfer/image@{digest}", folder / "state" / "trusted_root.json"
    shutil.rmtree(folder)


def test_pushed_image_verifies(pushed: tuple[str, Path], tmp_path: Path) -> None:
    reference, root = pushed
    assert verify([reference, "--trusted-root", str(root), "--json", str(tmp_path / "outcome.json")]) == 0
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["level"] == "integrity only"
    assert set(outcome["signers"]) == {"provenance", "sbom"}


def test_github_cli_verifies_the_pushed_image(pushed: tuple[str, Path], gh: str, tmp_path: Path) -> None:
    reference, root = pushed
    host = json.loads(root.read_text())["tlogs"][0]["baseUrl"].removeprefix("https://log.")
    command = [gh, "attestation", "verify", f"oci://{reference}", "--bundle-from-oci", "--owner", "gittensor-ai-lab"]
    command += ["--custom-trusted-root", str(root), "--cert-identity", f"https://{host}/release"]
    command += ["--cert-oidc-issuer", f"https://oidc.{host}"]
    environment = {**os.environ, "GH_TOKEN": "unused", "GH_CONFIG_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def pulled(pushed: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The image as a user gets it: pulled anonymously by digest and unpacked."""
    folder = tmp_path_factory.mktemp("pulled") / "image"
    assert cli.main(["pull", "--anonymous", pushed[0], str(folder)]) == 0
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated toy model, by a link as the workflow places a model that lies in the repository."""
    folder = tmp_path_factory.mktemp("models") / "generated"
    folder.parent.chmod(0o755)  # the image's user is another one
    command = [sys.executable, str(ROOT / "models" / "generate.py"), "dense", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    link = tmp_path_factory.mktemp("links") / "spark-tiny-dense"
    link.symlink_to(folder)
    return link


@contextmanager
def running(engine: Path, model: Path, log: Path) -> Iterator[tuple[Container | daemon.Daemon, str]]:
    """The image serving `model`, with the base address of its API."""
    port, folder = ship.free_port(), model.resolve()
    environment = {"SPARKINFER_MODEL": f"/models/{folder.name}", "SPARKINFER_HOST": "127.0.0.1"}
    environment["SPARKINFER_PORT"] = str(port)
    with start(engine, log, environment=environment, models=folder.parent) as container:
        ship.wait_until_ready(container, port, log)
        yield container, f"http://127.0.0.1:{port}/v1"


@contextmanager
def streaming(base: str, model: str) -> Iterator[httpx.Response]:
    """A long answer of which the first bytes have arrived."""
    body = {"model": model, "messages": [{"role": "user", "content": "Go on."}], "max_completion_tokens": 300}
    with httpx.stream(
        "POST",
        f"{base}/chat/completions",
        json={**body, "stream": True, "ignore_eos": True},
        timeout=60,
        trust_env=False,
    ) as answer:
        assert answer.status_code == 200, answer.read()
        yield answer


def test_pulled_image_answers_a_chat_request(pulled: Path, model: Path, tmp_path: Path) -> None:
    timings = ship.Timings()
    info = ship.ask(pulled, model, tmp_path / "log", timings)
    assert info["engine_digest"] == (pulled / "digest").read_text()
    assert set(timings.seconds) == {"start the server", "answer a chat request"}
    log = (tmp_path / "log").read_text()
    assert "signal 15" in log, "the engine was not told to stop by the image's init"


def test_serve_command_starts_the_engine_from_the_image(pulled: Path, model: Path, tmp_path: Path) -> None:
    """The form that the sweep uses: the launcher passes SIGTERM on and ends when the engine has."""
    port = ship.free_port()
    command = [sys.executable, "-m", "sparkinfer_containers", "serve", "--unpacked", str(pulled), str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "4"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "containers")])}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        deadline = time.monotonic() + 240
        info: dict[str, Any] = {}
        while not info and time.monotonic() < deadline and process.poll() is None:
            try:
                info = httpx.get(f"http://127.0.0.1:{port}/v1/info", trust_env=False).json()
            except httpx.TransportError:
                time.sleep(0.2)
        assert info.get("engine_digest") == (pulled / "digest").read_text(), (tmp_path / "log").read_text()[-2000:]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def podman(monkeypatch: pytest.MonkeyPatch, image: Path) -> Iterator[list[str]]:
    """podman with the options that it needs here; what `daemon.load` put into its store is removed afterwards."""
    if not shutil.which("podman") or not shutil.which("skopeo"):
        pytest.skip("podman and skopeo are not installed")
    chosen = os.environ.get("ATTEST_RUNTIME", "podman --cgroup-manager=cgroupfs --runtime runc")
    monkeypatch.setenv("ATTEST_RUNTIME", chosen)
    limits = "--ulimit nofile=1024:1024 --ulimit nproc=4096:4096"  # the default ones need a capability
    monkeypatch.setenv("ATTEST_RUN_OPTIONS", os.environ.get("ATTEST_RUN_OPTIONS", limits))
    if subprocess.run([*shlex.split(chosen), "info"], capture_output=True, check=False).returncode:
        pytest.skip("podman does not work here")
    yield shlex.split(chosen)
    name = f"localhost/sparkinfer-measured:{short(Layout(image / 'layout').image().digest, 12)}"
    subprocess.run([*shlex.split(chosen), "rmi", "--force", name], capture_output=True, check=False)


def test_podman_runs_and_stops_the_image_by_its_own_digest(
    image: Path, model: Path, tmp_path: Path, podman: list[str]
) -> None:
    """What a GPU host does, without the GPU; then as an administrator stops a container, while it answers a request."""
    layout = Layout(image / "layout")
    digest = layout.image().digest
    engine, log = tmp_path / "engine", tmp_path / "log"
    daemon.load(layout, digest, "cpu", engine)
    info = ship.ask(engine, model, log, ship.Timings())
    assert info["engine_digest"] == digest

    with running(engine, model, log) as (container, base):
        listed = subprocess.run([*podman, "ps", "--format", "{{.Names}}"], capture_output=True, text=True, check=True)
        (name,) = listed.stdout.split()
        health = ["exec", name, "/usr/bin/python3", "-m", "sparkinfer_containers.health"]
        assert subprocess.run([*podman, *health], check=False).returncode == 0
        with streaming(base, info["model"]):
            stopping = subprocess.run(
                [*podman, "stop", "--time", "40", name], capture_output=True, text=True, check=False
            )
            assert stopping.returncode == 0, stopping.stderr
            # SIGKILL after the 40 s would give 137.
            assert container.process.wait(10) == 0, log.read_text()[-2000:]
    left = subprocess.run([*podman, "ps", "--all", "--quiet"], capture_output=True, text=True, check=True)
    assert left.stdout == ""


def test_model_that_the_images_user_may_not_read(image: Path, tmp_path: Path, podman: list[str]) -> None:
    layout = Layout(image / "layout")
    digest = layout.image().digest
    engine, models = tmp_path / "engine", tmp_path / "models"
    (models / "private").mkdir(parents=True)
    (models / "private").chmod(0o700)
    models.chmod(0o755)
    daemon.load(layout, digest, "cpu", engine)
    with start(
        engine, tmp_path / "log", environment={"SPARKINFER_MODEL": "/models/private"}, models=models
    ) as container:
        assert container.process.wait(60) == 2
    said = (tmp_path / "log").read_text()
    assert "user (10001) may not read /models/private" in said
    assert "Traceback" not in said


def test_signal_to_the_init_ends_a_busy_server_cleanly(pulled: Path, model: Path, tmp_path: Path) -> None:
    with running(pulled, model, tmp_path / "log") as (container, base):
        name = httpx.get(f"{base}/info", trust_env=False).json()["model"]
        with streaming(base, name) as stream:
            begun = time.monotonic()
            assert container.stop() == 0, (tmp_path / "log").read_text()[-2000:]
            assert time.monotonic() - begun < 15
            rest = stream.read().decode()
    # The answer under way was finished, not cut.
    assert "data: [DONE]" in rest
    assert "signal 15" in (tmp_path / "log").read_text()


def test_image_holds_the_engine_that_its_label_names(pulled: Path) -> None:
    config = json.loads((pulled / "config.json").read_text())
    library = pulled / "root" / LIBRARY
    files: dict[str, Path] = {}
    for package in SOURCE_PACKAGES:
        files |= package_files(package, library / package)
    assert tree_digest(files) == config["config"]["Labels"][SOURCE_LABEL]
    assert not (library / "sparkinfer_eval").exists()
    assert not (library / "pandas").exists()


def test_unpacked_size(image: Path) -> None:
    record = json.loads((image / "image.json").read_text())
    assert record["unpacked_bytes"] < 700e6
    assert sum(layer["size"] for layer in record["layers"]) == record["unpacked_bytes"]
    assert all(item["bytes"] and item["reason"] for item in record["left_out"])


def plain(name: str) -> str:
    """A Python package's name in its normal form (PEP 503)."""
    return re.sub("[._-]+", "-", name.lower())


def test_sbom_lists_what_is_installed(image: Path, pulled: Path) -> None:
    """Against the image's own records: dpkg's status file and the dist-info folders."""
    listed = json.loads((image / "sbom.json").read_text())["components"]
    purls = {PackageURL.from_string(item["purl"]) for item in listed}
    named = {(item.type, item.name if item.type == "deb" else plain(item.name), item.version) for item in purls}
    installed = set()
    for text in (pulled / "root" / "var" / "lib" / "dpkg" / "status").read_text().strip().split("\n\n"):
        found = dict(re.findall(r"^(Package|Version): (.+)$", text, re.MULTILINE))
        installed.add(("deb", found["Package"], found["Version"]))
    for folder in (pulled / "root" / LIBRARY).glob("*.dist-info"):
        found = dict(re.findall(r"^(Name|Version): (.+)$", (folder / "METADATA").read_text(), re.MULTILINE))
        installed.add(("pypi", plain(found["Name"]), found["Version"]))
    assert named == installed
    assert any(name == "sparkinfer" for _, name, _ in named)


def test_own_wheel_is_built_by_the_backend_that_the_provenance_names(image: Path, pulled: Path) -> None:
    listed = json.loads((image / "provenance.json").read_text())["buildDefinition"]["resolvedDependencies"]
    (uri,) = [item["uri"] for item in listed if item.get("name") == "build backend"]
    version = uri.removeprefix("pkg:pypi/setuptools@")
    (made,) = (pulled / "root" / LIBRARY).glob("sparkinfer-*.dist-info/WHEEL")
    assert f"Generator: setuptools ({version})" in made.read_text()


def test_image_without_a_model_says_what_to_do(pulled: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Container(pulled, (pulled / "digest").read_text(), log) as container:
        assert container.process.wait(60) == 2
    said = log.read_text()
    assert "no model is mounted at /models/qwen3.8-27b-nvfp4" in said
    assert "set SPARKINFER_MODEL_REVISION to its commit" in said


def test_command_in_the_image(pulled: Path) -> None:
    """`docker exec NAME sparkinfer doctor`: the container's own variables do not get in the engine's way."""
    listed = command(pulled, (pulled / "digest").read_text(), entrypoint=["/usr/local/bin/sparkinfer", "doctor"])
    done = subprocess.run(listed, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "packages      all there" in done.stdout


def test_root_of_the_image_holds_no_secret_of_the_build(pulled: Path) -> None:
    root = pulled / "root"
    assert not list(root.glob("opt/sparkinfer/lib/bin"))
    assert not (root / "etc" / "hostname").exists()
    assert not (root / "etc" / "machine-id").exists()
    assert not list(root.rglob("direct_url.json"))
    names = [path for path in root.rglob("*.key")]
    assert names == []


def test_second_build_elsewhere_has_the_same_digest(
    image: Path, caches: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["rebuild-check", str(image), "--scratch", str(tmp_path / "some other place"), *caches])
    assert code == 0, capsys.readouterr().out
