"""Signing: bundle form, timestamp, the public path's hard failure, and one code path for both configurations."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sigstore.models import ClientTrustConfig
from sparkinfer_containers import statements
from sparkinfer_containers.errors import SigningProblem
from sparkinfer_containers.private import instance as instance_module
from sparkinfer_containers.private.instance import Running, running
from sparkinfer_containers.sign import BUNDLE_TYPE, sign
from sparkinfer_containers.trust import credentials

SUBJECT = statements.statement("x", "sha256:" + "1" * 64, statements.SBOM, {"bomFormat": "CycloneDX"})


def test_each_statement_becomes_a_v03_bundle_with_a_timestamp(tmp_path: Path) -> None:
    other = statements.statement("y", "sha256:" + "2" * 64, statements.SBOM, {"bomFormat": "CycloneDX"})
    with credentials("private", state=tmp_path / "state") as held:
        bundles = [json.loads(text) for text in sign([SUBJECT, other], held)]
    assert [bundle["mediaType"] for bundle in bundles] == [BUNDLE_TYPE] * 2
    for bundle in bundles:
        material = bundle["verificationMaterial"]
        assert len(material["timestampVerificationData"]["rfc3161Timestamps"]) == 1
        assert len(material["tlogEntries"]) == 1
    assert [bundle["verificationMaterial"]["tlogEntries"][0]["logIndex"] for bundle in bundles] == ["0", "1"]


def test_without_the_timestamp_authority_nothing_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(*_: Any) -> bytes:
        raise instance_module.RequestError("down")

    monkeypatch.setattr(instance_module.tsa, "answer", down)
    with credentials("private", state=tmp_path / "state") as held, pytest.raises(SigningProblem, match="timestamp"):
        sign([SUBJECT], held)


def test_public_signing_fails_hard_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("GITHUB_", "ACTIONS_", "GITLAB_", "BUILDKITE", "CIRCLE", "GCE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SigningProblem, match="needs an identity token"):
        with credentials("public", public_config=_never):
            raise AssertionError("credentials were given")


def _never() -> ClientTrustConfig:
    raise AssertionError("the public configuration must not be asked for before a token is held")


def test_public_signing_fails_hard_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", raising=False)
    with pytest.raises(SigningProblem, match="ACTIONS_ID_TOKEN_REQUEST_TOKEN"):
        with credentials("public", public_config=_never):
            raise AssertionError("credentials were given")


@contextmanager
def ci_token_endpoint(served: Running, identity: str) -> Iterator[str]:
    """Plays the CI provider: answers `{"value": token}` to the request token `ci-secret` only."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers["Authorization"] == "bearer ci-secret" and "audience=sigstore" in self.path
            self.send_response(200 if allowed else 401)
            self.end_headers()
            token = served.instance.issuer.mint(identity, {}) if allowed else ""
            self.wfile.write(json.dumps({"value": token}).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/token?x=1"
    finally:
        server.shutdown()
        server.server_close()


def test_public_path_signs_with_the_ambient_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public code path end to end; only the addresses of the public services are replaced."""
    identity = "https://github.com/example/project/.github/workflows/release.yml@refs/tags/v1"
    with running(tmp_path / "state") as served, ci_token_endpoint(served, identity) as url:
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "ci-secret")
        monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_URL", url)
        config = ClientTrustConfig.from_json(served.client_config)
        with credentials("public", public_config=lambda: config) as held:
            assert held.token.identity == identity
            assert len(sign([SUBJECT], held)) == 1
