"""Bundles of the private instance verify in three other implementations, and fail there when they should."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sparkinfer_containers.private import trust

Check = Callable[[str, str], subprocess.CompletedProcess[str]]
"""Runs a verifier on (bundle text, expected identity)."""


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}, check=False
    )


@pytest.fixture
def sigstore_cli(tmp_path: Path, trusted_root: Path, host: str, artifact: Path) -> Check:
    """sigstore-python's own command line."""
    config = tmp_path / "client_trust_config.json"
    config.write_text(json.dumps(trust.client_config(json.loads(trusted_root.read_text()), "http://127.0.0.1:9")))

    def check(bundle: str, identity: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "bundle.json"
        path.write_text(bundle)
        command = [sys.executable, "-m", "sigstore", "--trust-config", str(config), "verify", "identity", "--offline"]
        command += ["--bundle", str(path), "--cert-identity", identity, "--cert-oidc-issuer", f"https://oidc.{host}"]
        return run([*command, str(artifact)])

    return check


@pytest.fixture
def npm_verify(tmp_path: Path, npm_folder: Path, trusted_root: Path, host: str) -> Check:
    """@sigstore/verify."""

    def check(bundle: str, identity: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "bundle.json"
        path.write_text(bundle)
        command = ["node", str(npm_folder / "verify.js"), str(path), str(trusted_root), identity]
        return run([*command, f"https://oidc.{host}"])

    return check


@pytest.fixture
def github_cli(tmp_path: Path, gh: str, trusted_root: Path, host: str, artifact: Path) -> Check:
    """`gh attestation verify` with the custom trusted root."""

    def check(bundle: str, identity: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "bundle.json"
        path.write_text(bundle)
        command = [gh, "attestation", "verify", str(artifact), "--bundle", str(path), "--owner", "example"]
        command += ["--custom-trusted-root", str(trusted_root), "--cert-identity", identity]
        command += ["--cert-oidc-issuer", f"https://oidc.{host}", "--format", "json"]
        return run(command, GH_TOKEN="unused", GH_CONFIG_DIR=str(tmp_path), GH_NO_UPDATE_NOTIFIER="1")

    return check


VERIFIERS = ["sigstore_cli", "npm_verify", "github_cli"]


@pytest.mark.parametrize("name", VERIFIERS)
def test_bundle_verifies(name: str, request: pytest.FixtureRequest, provenance_bundle: str, host: str) -> None:
    check: Check = request.getfixturevalue(name)
    done = check(provenance_bundle, f"https://{host}/release")
    assert done.returncode == 0, done.stdout + done.stderr


def flip_payload(bundle: dict[str, object]) -> None:
    envelope = bundle["dsseEnvelope"]
    assert isinstance(envelope, dict)
    payload = base64.b64decode(envelope["payload"])
    envelope["payload"] = base64.b64encode(payload.replace(b'"cpu"', b'"cpx"')).decode()


def flip_signature(bundle: dict[str, object]) -> None:
    envelope = bundle["dsseEnvelope"]
    assert isinstance(envelope, dict)
    signature = bytearray(base64.b64decode(envelope["signatures"][0]["sig"]))
    signature[-1] ^= 1
    envelope["signatures"][0]["sig"] = base64.b64encode(signature).decode()


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("change", [flip_payload, flip_signature])
def test_changed_bundle_is_refused(
    name: str,
    change: Callable[[dict[str, object]], None],
    request: pytest.FixtureRequest,
    provenance_bundle: str,
    host: str,
) -> None:
    check: Check = request.getfixturevalue(name)
    bundle = json.loads(provenance_bundle)
    change(bundle)
    assert check(json.dumps(bundle), f"https://{host}/release").returncode != 0


@pytest.mark.parametrize("name", VERIFIERS)
def test_wrong_identity_is_refused(
    name: str, request: pytest.FixtureRequest, provenance_bundle: str, host: str
) -> None:
    check: Check = request.getfixturevalue(name)
    assert check(provenance_bundle, f"https://{host}/someone-else").returncode != 0
