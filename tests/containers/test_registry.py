"""Push, attach, pull and verify against a real registry, and against registries that lie."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sparkinfer_containers import cli
from sparkinfer_containers.attest import attach
from sparkinfer_containers.errors import DigestProblem, UsageProblem
from sparkinfer_containers.oci.layout import Layout
from sparkinfer_containers.oci.model import BUNDLE, INDEX, MANIFEST
from sparkinfer_containers.oci.registry import Reference, Registry
from sparkinfer_containers.sign import sign
from sparkinfer_containers.statements import SBOM
from sparkinfer_containers.trust import credentials

from sparkinfer.errors import EnvironmentProblem


def push(attested: Any, host: str) -> str:
    """Push the toy image with its attestations; the reference by digest."""
    reference = Reference.parse(f"{host}/sparkinfer/toy:1")
    with Registry(reference) as registry:
        assert registry.push_image(attested.layout, attested.image, reference.tag) == attested.image.digest
        for item in attested.layout.referrers(attested.image.digest):
            registry.push_referrer(attested.layout, item)
    return f"{host}/sparkinfer/toy@{attested.image.digest}"


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("127.0.0.1:5000/a/b:1", True),
        ("ghcr.io/org/name@sha256:" + "0" * 64, True),
        ("oci://ghcr.io/org/name:1", True),
        ("name", False),
        ("ghcr.io/org/name@sha256:12", False),
        ("ghcr.io/../name:1", False),
        ("ghcr.io/org/name:1 --x", False),
    ],
)
def test_references(text: str, fits: bool) -> None:
    if fits:
        assert str(Reference.parse(text)) == text.removeprefix("oci://")
    else:
        with pytest.raises(UsageProblem):
            Reference.parse(text)


def test_push_keeps_the_digest_and_pull_verifies(attested: Any, registry_host: str) -> None:
    target = push(attested, registry_host)
    code, outcome = attested.verify(target=target)
    assert code == 0
    assert set(outcome["signers"]) == {"provenance", "sbom"}
    with Registry(Reference.parse(f"{registry_host}/sparkinfer/toy:1")) as registry:
        assert registry.resolve("1").digest == attested.image.digest


def test_second_push_uploads_nothing_new(attested: Any, registry_host: str) -> None:
    push(attested, registry_host)
    target = push(attested, registry_host)
    assert attested.verify(target=target)[0] == 0


def test_skopeo_sees_the_same_digest(attested: Any, registry_host: str) -> None:
    if not shutil.which("skopeo"):
        pytest.skip("skopeo is not installed")
    push(attested, registry_host)
    command = ["skopeo", "inspect", "--tls-verify=false", "--format", "{{.Digest}}"]
    done = subprocess.run([*command, f"docker://{registry_host}/sparkinfer/toy:1"], capture_output=True, text=True)
    assert done.stdout.strip() == attested.image.digest, done.stderr


def test_github_cli_verifies_from_the_registry(
    attested: Any, registry_host: str, gh: str, host: str, trusted_root: Path, tmp_path: Path
) -> None:
    target = push(attested, registry_host)
    command = [gh, "attestation", "verify", f"oci://{target}", "--bundle-from-oci", "--owner", "example"]
    command += ["--custom-trusted-root", str(trusted_root), "--cert-identity", f"https://{host}/release"]
    command += ["--cert-oidc-issuer", f"https://oidc.{host}"]
    environment = {**os.environ, "GH_TOKEN": "unused", "GH_CONFIG_DIR": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    for predicate_type in ("https://slsa.dev/provenance/v1", SBOM):
        done = subprocess.run(
            [*command, "--predicate-type", predicate_type], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
    command[command.index("--cert-identity") + 1] += "x"
    assert subprocess.run(command, capture_output=True, env=environment).returncode != 0


def test_tag_is_no_target(attested: Any, registry_host: str) -> None:
    push(attested, registry_host)
    code, outcome = attested.verify(target=f"{registry_host}/sparkinfer/toy:1")
    assert code == 2
    assert "by digest" in outcome["problems"][0]["text"]


def test_image_that_is_not_there(attested: Any, registry_host: str) -> None:
    assert attested.verify(target=f"{registry_host}/sparkinfer/none@{attested.image.digest}")[0] == 4


def test_registry_that_does_not_answer(attested: Any) -> None:
    assert attested.verify(target=f"127.0.0.1:9/sparkinfer/none@{attested.image.digest}")[0] == 4


def test_local_corruption_is_not_pushed(attested: Any, registry_host: str) -> None:
    push(attested, registry_host)
    digest = json.loads(attested.layout.manifest(attested.image.digest))["layers"][0]["digest"]
    path = attested.layout.blob_path(digest)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DigestProblem, match=digest):
        push(attested, registry_host)


def fallback_url(host: str, digest: str) -> str:
    return f"http://{host}/v2/sparkinfer/toy/manifests/{digest.replace(':', '-')}"


def put_index(host: str, digest: str, manifests: list[dict[str, Any]]) -> None:
    body = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}).encode()
    answer = httpx.put(fallback_url(host, digest), content=body, headers={"Content-Type": INDEX}, trust_env=False)
    assert answer.status_code == 201, answer.text


def test_fallback_index_emptied_by_a_stranger(attested: Any, registry_host: str) -> None:
    target = push(attested, registry_host)
    put_index(registry_host, attested.image.digest, [])
    code, outcome = attested.verify(target=target)
    assert code == 4
    assert "no attestation" in outcome["problems"][0]["text"]


def test_fallback_index_overwritten_by_a_stranger(
    attested: Any, registry_host: str, tmp_path: Path, about: Callable[[str], Any]
) -> None:
    target = push(attested, registry_host)
    stranger = Layout(Path(shutil.copytree(attested.layout.path, tmp_path / "stranger")))
    with credentials("private", state=tmp_path / "keys") as held:
        bundles = sign(about(attested.image.digest), held)
    attached = [attach(stranger, attested.image, bundle, SBOM) for bundle in bundles]
    with Registry(Reference.parse(target)) as registry:
        for item in attached:
            registry.push_referrer(stranger, item)
    put_index(registry_host, attested.image.digest, [item.to_json() for item in attached])
    assert attested.verify(target=target)[0] == 3


def test_attach_repairs_nothing_silently(attested: Any, registry_host: str, signer: Any, about: Any) -> None:
    """A referrer pushed after the index was emptied is listed alone: the others stay missing and that is said."""
    target = push(attested, registry_host)
    put_index(registry_host, attested.image.digest, [])
    first = next(iter(attested.layout.referrers(attested.image.digest)))
    with Registry(Reference.parse(target)) as registry:
        assert registry.push_referrer(attested.layout, first) == "fallback tag"
    code, outcome = attested.verify(target=target)
    assert code == 4
    assert "missing attestation" in outcome["problems"][0]["text"]


@contextmanager
def lying_registry(layout: Layout, image: str, lie: str) -> Iterator[str]:
    """Serves a layout with the referrers API; `lie` says what it gets wrong."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, digest = self.path.split("/")[-2:]
            if lie == "cut " + ("referrers" if kind == "referrers" else "image" if digest == image else "manifest"):
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b"{")
                return
            if kind == "referrers":
                items = [item.to_json() for item in layout.referrers(digest)]
                self.answer(json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": items}).encode(), INDEX)
                return
            data = layout.blob_path(digest).read_bytes()
            if lie == "manifest" and digest == image:
                data = data.replace(b'"schemaVersion":2', b'"schemaVersion":2 ')
            if lie == "bundle" and b"dsseEnvelope" in data:
                data = data.replace(b"dsseEnvelope", b"dsseEnvelopf")
            if lie == "layer" and kind == "blobs" and b"ustar" in data[:512]:
                data = data[:-1] + b"x"
            if lie == "longer bundle" and b"dsseEnvelope" in data:
                self.endless()
                return
            if lie == "short" and kind == "blobs":
                data = data[:10]
            self.answer(data, MANIFEST)

        def answer(self, data: bytes, media_type: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def endless(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(1 << 14):
                    self.wfile.write(b" " * (1 << 16))  # a gigabyte in all
                sent_all.append(True)
            except (BrokenPipeError, ConnectionResetError):
                pass

        def log_message(self, *_: Any) -> None:
            pass

    sent_all: list[bool] = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}/sparkinfer/toy@{image}"
        assert not sent_all, "the client read a gigabyte"
    finally:
        server.shutdown()
        server.server_close()


def test_registry_with_the_referrers_api(attested: Any) -> None:
    with lying_registry(attested.layout, attested.image.digest, "nothing") as target:
        assert attested.verify(target=target)[0] == 0


@pytest.mark.parametrize("lie", ["manifest", "bundle", "layer", "longer bundle", "short"])
def test_registry_that_serves_another_digest(attested: Any, lie: str) -> None:
    with lying_registry(attested.layout, attested.image.digest, lie) as target:
        code, outcome = attested.verify(target=target)
    assert code == 4
    assert "sha256:" in outcome["problems"][0]["text"]


@pytest.mark.parametrize("lie", ["manifest", "layer", "short"])
def test_pull_from_a_lying_registry_leaves_nothing(attested: Any, lie: str, tmp_path: Path) -> None:
    with lying_registry(attested.layout, attested.image.digest, lie) as target:
        assert cli.main(["pull", "--anonymous", target, str(tmp_path / "pulled")]) == 4
    assert not (tmp_path / "pulled").exists()


def test_registry_that_stores_another_digest(attested: Any) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(201)
            self.send_header("Docker-Content-Digest", "sha256:" + "0" * 64)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with Registry(Reference.parse(f"127.0.0.1:{server.server_port}/x:1")) as registry:
            with pytest.raises(DigestProblem, match="the registry stored"):
                registry.push_manifest(b"{}", BUNDLE)
    finally:
        server.shutdown()
        server.server_close()


def test_push_to_a_registry_that_is_down(attested: Any) -> None:
    with Registry(Reference.parse("127.0.0.1:9/x:1")) as registry, pytest.raises(EnvironmentProblem, match="answer"):
        registry.push_image(attested.layout, attested.image)


@contextmanager
def api_registry(subject: str) -> Iterator[tuple[str, list[str]]]:
    """A registry with the referrers API that has every blob; yields its address and the paths that were written."""
    written: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.reply(200)

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            written.append(self.path)
            self.reply(201, {"OCI-Subject": subject})

        def reply(self, code: int, headers: dict[str, str] | None = None) -> None:
            self.send_response(code)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}", written
    finally:
        server.shutdown()
        server.server_close()


def test_attach_through_the_api_writes_no_fallback_tag(attested: Any) -> None:
    item = next(iter(attested.layout.referrers(attested.image.digest)))
    with api_registry(attested.image.digest) as (host, written):
        with Registry(Reference.parse(f"{host}/sparkinfer/toy:1")) as registry:
            assert registry.push_referrer(attested.layout, item) == "api"
    assert written == [f"/v2/sparkinfer/toy/manifests/{item.digest}"]


def test_login_is_not_sent_over_plain_http(attested: Any) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Bearer realm="http://login.example.invalid/token",service="x"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with Registry(Reference.parse(f"127.0.0.1:{server.server_port}/x:1")) as registry:
            with pytest.raises(EnvironmentProblem, match="not HTTPS"):
                registry.resolve("1")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("part", ["referrers", "image", "manifest"])
def test_registry_that_cuts_a_connection_off(attested: Any, part: str) -> None:
    with lying_registry(attested.layout, attested.image.digest, f"cut {part}") as target:
        code, outcome = attested.verify(target=target)
    assert code == 4
    assert "connection broke" in outcome["problems"][0]["text"]


@pytest.mark.parametrize("login", ["html", "list", "number", "down", "refused", "no address"])
def test_login_that_gives_no_token(attested: Any, login: str) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/token"):
                body = {"html": b"<html>", "list": b"[]", "number": b'{"token": 5}'}.get(login, b"{}")
                self.reply(403 if login == "refused" else 200, body)
                return
            port = 9 if login == "down" else server.server_port
            realm = "http://[" if login == "no address" else f"http://127.0.0.1:{port}/token"
            self.reply(401, b"", f'Bearer realm="{realm}",service="x"')

        def reply(self, code: int, body: bytes, challenge: str = "") -> None:
            self.send_response(code)
            if challenge:
                self.send_header("WWW-Authenticate", challenge)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        target = f"127.0.0.1:{server.server_port}/sparkinfer/toy@{attested.image.digest}"
        assert attested.verify(target=target)[0] == 4
    finally:
        server.shutdown()
        server.server_close()
