"""Which root is used, what level it stands for, and whom it expects to have signed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from sigstore.errors import VerificationError
from sigstore.models import ClientTrustConfig
from sparkinfer_containers import statements, trust
from sparkinfer_containers.errors import SignatureProblem, UsageProblem
from sparkinfer_containers.private import certs
from sparkinfer_containers.private.instance import PrivateInstance
from sparkinfer_containers.verify.attestations import HOSTED_BUILDER, slsa_level
from sparkinfer_containers.verify.bundle import ExpectedSigner, Verified

RELEASE = f"{trust.PUBLIC_IDENTITY_PREFIX}1.2.3"


@pytest.fixture(scope="module")
def public_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The public trust root as shipped with sigstore-python: no network."""
    path = tmp_path_factory.mktemp("root") / "trusted_root.json"
    path.write_text(ClientTrustConfig.production(offline=True).trusted_root._inner.to_json())
    return path


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> PrivateInstance:
    return PrivateInstance(tmp_path_factory.mktemp("attest") / "state")


def leaf(instance: PrivateInstance, subject: str, issuer: str) -> x509.Certificate:
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    return certs.signing_leaf(instance.authority, instance.ct_key, key, {"sub": subject, "iss": issuer})


def test_public_root_from_a_file_is_recognised(public_root: Path) -> None:
    found = trust.trust_root(public_root)
    assert (found.mode, found.issuer, found.prefix) == ("public", trust.PUBLIC_ISSUER, True)


def test_public_root_with_one_more_authority_is_not_public(public_root: Path, instance: PrivateInstance) -> None:
    data = json.loads(public_root.read_text())
    data["certificateAuthorities"].append(instance.root["certificateAuthorities"][0])
    path = public_root.with_name("mixed.json")
    path.write_text(json.dumps(data))
    assert trust.trust_root(path).mode == "private"


@pytest.mark.parametrize("kind", ["tlogs", "ctlogs", "timestampAuthorities"])
def test_public_root_with_one_more_key_is_not_public(public_root: Path, instance: PrivateInstance, kind: str) -> None:
    data = json.loads(public_root.read_text())
    data[kind].append(instance.root[kind][0])
    path = public_root.with_name("mixed.json")
    path.write_text(json.dumps(data))
    assert trust.trust_root(path).mode == "private"


@pytest.mark.parametrize("kind", ["certificateAuthorities", "tlogs", "ctlogs", "timestampAuthorities"])
@pytest.mark.parametrize("value", [None, [], 5, [5]])
def test_root_without_keys_of_one_kind_is_none(
    instance: PrivateInstance, tmp_path: Path, kind: str, value: object
) -> None:
    data = json.loads(instance.trusted_root_file.read_text())
    data.pop(kind)
    if value is not None:
        data[kind] = value
    (tmp_path / "root.json").write_text(json.dumps(data))
    with pytest.raises(UsageProblem, match=r"root\.json"):
        trust.trust_root(tmp_path / "root.json")


def test_private_root_names_its_own_signer(instance: PrivateInstance) -> None:
    found = trust.trust_root(instance.trusted_root_file)
    assert (found.mode, found.identity, found.issuer) == ("private", instance.identity, instance.issuer.issuer)


def test_private_bundle_does_not_verify_under_the_public_root(attested: Any, public_root: Path) -> None:
    attested.trusted_root = public_root
    assert attested.verify()[0] == 3


@pytest.mark.parametrize(
    ("subject", "issuer", "fits"),
    [
        (RELEASE, trust.PUBLIC_ISSUER, True),
        (RELEASE, "https://oidc.evil.invalid", False),
        (RELEASE.replace("/tags/v", "/heads/v"), trust.PUBLIC_ISSUER, False),
        (RELEASE.replace("release.yml", "other.yml"), trust.PUBLIC_ISSUER, False),
        (RELEASE.replace("gittensor-ai-lab", "gittensor-ai-lab-evil"), trust.PUBLIC_ISSUER, False),
        (f"{RELEASE}/../x", trust.PUBLIC_ISSUER, False),
        (trust.PUBLIC_IDENTITY_PREFIX, trust.PUBLIC_ISSUER, False),
    ],
)
def test_public_signer_is_the_release_workflow_at_a_version_tag(
    public_root: Path, instance: PrivateInstance, subject: str, issuer: str, fits: bool
) -> None:
    signer = ExpectedSigner(trust.trust_root(public_root), None, None)
    if fits:
        signer.verify(leaf(instance, subject, issuer))
    else:
        with pytest.raises(VerificationError):
            signer.verify(leaf(instance, subject, issuer))


def test_foreign_root_needs_an_identity(instance: PrivateInstance, tmp_path: Path) -> None:
    text = instance.trusted_root_file.read_text().replace(trust.PRIVATE_SUFFIX, ".example.invalid")
    (tmp_path / "root.json").write_text(text)
    found = trust.trust_root(tmp_path / "root.json")
    with pytest.raises(UsageProblem, match="--identity and --issuer"):
        ExpectedSigner(found, None, None)
    ExpectedSigner(found, "https://x.invalid/", "https://y.invalid/")


def provenance(builder: str, hosted: bool) -> Verified:
    predicate = statements.provenance(
        external_parameters={"variant": "cpu"},
        dependencies=[{"uri": "x", "digest": {"sha256": "0" * 64}}],
        builder_id=builder,
        invocation_id="x",
    )
    return Verified(statements.PROVENANCE, predicate, "x", "sha256:" + "0" * 64, RELEASE, "i", "t", hosted)


def test_levels_are_stated_honestly() -> None:
    assert "Build L1, self-attested" in slsa_level(provenance(statements.SELF_BUILDER, hosted=True), public=True)
    assert "Build L2" in slsa_level(provenance(HOSTED_BUILDER, hosted=True), public=True)
    for hosted, public in ((False, True), (True, False)):
        with pytest.raises(SignatureProblem, match="hosted builder"):
            slsa_level(provenance(HOSTED_BUILDER, hosted=hosted), public=public)


@pytest.mark.parametrize(("value", "hosted"), [(b"github-hosted", True), (b"not-github-hosted", False)])
def test_runner_that_only_ends_like_a_hosted_one(value: bytes, hosted: bool) -> None:
    from sparkinfer_containers.verify.bundle import HOSTED_RUNNER

    assert (b"\x0c" + bytes([len(value)]) + value == HOSTED_RUNNER) is hosted
