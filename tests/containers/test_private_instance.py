"""The private instance: keys stay private, tokens are checked, the log is append-only and survives restarts."""

from __future__ import annotations

import base64
import stat
import time
from pathlib import Path

import httpx
import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from sparkinfer_containers import statements
from sparkinfer_containers.private.instance import PrivateInstance, Running, running
from sparkinfer_containers.private.state import StateFolder
from sparkinfer_containers.sign import sign
from sparkinfer_containers.trust import credentials

from sparkinfer.errors import ConfigError, EnvironmentProblem

SUBJECT = statements.statement("x", "sha256:" + "1" * 64, statements.SBOM, {"bomFormat": "CycloneDX"})


def sign_one(state: Path) -> str:
    with credentials("private", state=state) as held:
        (bundle,) = sign([SUBJECT], held)
    return bundle


def csr(key: ec.EllipticCurvePrivateKey) -> str:
    made = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return base64.b64encode(made.public_bytes(serialization.Encoding.PEM)).decode()


def ask_certificate(served: Running, token: str, request: str | None = None) -> httpx.Response:
    body = {"certificateSigningRequest": request or csr(ec.generate_private_key(ec.SECP256R1()))}
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.post(f"{served.base_url}/api/v2/signingCert", json=body, headers=headers, trust_env=False)


def test_state_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    instance = PrivateInstance(tmp_path / "state")
    assert stat.S_IMODE(instance.state.path.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in instance.state.path.iterdir()}
    assert {"ca-root.key", "ca-intermediate.key", "tsa.key", "oidc.key", "log.key", "ct.key"} <= modes.keys()
    assert set(modes.values()) == {0o600}


def test_a_key_open_to_others_is_refused(tmp_path: Path) -> None:
    PrivateInstance(tmp_path / "state")
    (tmp_path / "state" / "log.key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"log\.key is readable by others"):
        PrivateInstance(tmp_path / "state")


def test_keys_never_lie_in_a_repository(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    with pytest.raises(ConfigError, match="git work tree"):
        StateFolder(tmp_path / "deep" / "state")


def test_link_into_a_repository_is_one(tmp_path: Path) -> None:
    (tmp_path / "tree" / ".git").mkdir(parents=True)
    (tmp_path / "tree" / "state").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "tree" / "state")
    with pytest.raises(ConfigError, match="git work tree"):
        StateFolder(tmp_path / "link")


def test_restart_keeps_identity_and_log(tmp_path: Path) -> None:
    sign_one(tmp_path / "state")
    first = PrivateInstance(tmp_path / "state")
    root = first.trusted_root_file.read_bytes()
    sign_one(tmp_path / "state")
    second = PrivateInstance(tmp_path / "state")
    assert second.trusted_root_file.read_bytes() == root
    assert (first.log.head()["treeSize"], second.log.head()["treeSize"]) == (1, 2)
    assert second.identity == first.identity


@pytest.mark.parametrize("rewrite", ["drop", "edit", "swap", "checkpoint", "no checkpoint", "empty", "word"])
def test_log_refuses_rewrites(tmp_path: Path, rewrite: str) -> None:
    state = tmp_path / "state"
    for _ in range(3):
        sign_one(state)
    log, checkpoint = state / "log.jsonl", state / "checkpoint"
    lines = log.read_text().splitlines(keepends=True)
    if rewrite == "drop":
        log.write_text("".join(lines[:-1]))
    elif rewrite == "edit":
        log.write_text("".join([lines[0], lines[0], *lines[2:]]))
    elif rewrite == "swap":
        log.write_text("".join([lines[1], lines[0], *lines[2:]]))
    elif rewrite == "checkpoint":
        checkpoint.write_text(checkpoint.read_text().replace("\n3\n", "\n2\n"))
    elif rewrite in ("empty", "word"):
        checkpoint.write_text("" if rewrite == "empty" else "checkpoint\n")
    else:
        checkpoint.unlink()
    with (state / "log.jsonl").open("a") as handle:
        handle.write('{"half')
    before = log.read_bytes()
    with pytest.raises(ConfigError, match=r"rewritten|altered|missing"):
        PrivateInstance(state)
    assert log.read_bytes() == before, "a log that is refused is not touched"


def test_a_write_cut_off_by_a_crash_is_dropped(tmp_path: Path) -> None:
    state = tmp_path / "state"
    sign_one(state)
    with (state / "log.jsonl").open("a") as handle:
        handle.write('{"body": "abc')
    assert PrivateInstance(state).log.head()["treeSize"] == 1
    sign_one(state)
    assert PrivateInstance(state).log.head()["treeSize"] == 2


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    with folder.lock(), pytest.raises(EnvironmentProblem, match="another process holds"):
        with StateFolder(tmp_path / "state").lock(wait_s=0.1):
            pass


def test_log_has_no_way_to_change_or_remove_an_entry(served: Running) -> None:
    for method in ("PUT", "DELETE", "PATCH"):
        answer = httpx.request(method, f"{served.base_url}/api/v1/log/entries?logIndex=0", trust_env=False)
        assert answer.status_code == 405


def test_log_takes_only_envelopes_that_verify(served: Running) -> None:
    url = f"{served.base_url}/api/v1/log/entries"
    size = served.instance.log.head()["treeSize"]
    for body in ({"kind": "hashedrekord", "apiVersion": "0.0.1"}, {"kind": "dsse", "apiVersion": "0.0.1"}):
        answer = httpx.post(url, json=body, trust_env=False)
        assert answer.status_code == 400
        assert answer.json()["code"] == 400
    assert httpx.post(url, content=b"[", trust_env=False).status_code == 400
    assert served.instance.log.head()["treeSize"] == size


@pytest.mark.parametrize("fault", ["key", "audience", "issuer", "expired", "algorithm none", "no subject"])
def test_ca_refuses_bad_tokens(served: Running, fault: str) -> None:
    issuer = served.instance.issuer
    now = int(time.time())
    claims = {"iss": issuer.issuer, "sub": "https://x.invalid/", "aud": "sigstore", "iat": now, "exp": now + 60}
    key = issuer._key if fault != "key" else ec.generate_private_key(ec.SECP256R1())
    claims |= {
        "audience": {"aud": "other"},
        "issuer": {"iss": "https://evil.invalid"},
        "expired": {"iat": now - 600, "exp": now - 300},
    }.get(fault, {})
    if fault == "no subject":
        del claims["sub"]
    token = (
        jwt.encode(claims, None, algorithm="none")
        if fault == "algorithm none"
        else jwt.encode(claims, key, algorithm="ES256")
    )
    answer = ask_certificate(served, token)
    assert answer.status_code == 401, answer.text
    assert "identity token refused" in answer.json()["message"]


def test_ca_refuses_a_request_without_its_key(served: Running) -> None:
    token = served.instance.issuer.mint("https://x.invalid/", {})
    good = bytearray(base64.b64decode(csr(ec.generate_private_key(ec.SECP256R1()))))
    der = bytearray(x509.load_pem_x509_csr(bytes(good)).public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    pem = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM)
    answer = ask_certificate(served, token, base64.b64encode(pem).decode())
    assert answer.status_code == 400
    assert "possession" in answer.json()["message"]


def test_token_endpoint_wants_the_request_token(served: Running) -> None:
    url = f"{served.base_url}/oidc/token"
    assert httpx.get(url, trust_env=False).status_code == 401
    assert httpx.get(url, headers={"Authorization": "bearer wrong"}, trust_env=False).status_code == 401


def test_timestamps_only_for_sha256_queries(served: Running) -> None:
    answer = httpx.post(f"{served.base_url}/api/v1/timestamp", content=b"\x30\x03\x02\x01\x01", trust_env=False)
    assert answer.status_code == 400


def test_port_in_use_is_named(tmp_path: Path, served: Running) -> None:
    port = int(served.base_url.rsplit(":", 1)[1])
    with pytest.raises(EnvironmentProblem, match=f"port {port}"), running(tmp_path / "other", port):
        pass
