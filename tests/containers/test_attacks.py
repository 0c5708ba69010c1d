"""Every attack on a signed image: the right refusal, named, and no partial success (Attested.verify asserts that)."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sparkinfer_containers import statements
from sparkinfer_containers.attest import attach
from sparkinfer_containers.private.instance import running
from sparkinfer_containers.sign import sign
from sparkinfer_containers.trust import credentials

Bundle = dict[str, Any]


def reason(outcome: dict[str, Any]) -> str:
    (problem,) = outcome["problems"]
    return str(problem["text"])


def test_untouched_image_verifies(attested: Any) -> None:
    code, outcome = attested.verify()
    assert code == 0
    assert outcome["level"] == "integrity only"
    assert set(outcome["signers"]) == {"provenance", "sbom"}
    assert any("who signed" in line for line in outcome["not_proved"])


# Bundles.


def flip_payload(bundle: Bundle) -> None:
    payload = bytearray(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    payload[len(payload) // 2] ^= 1
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()


def flip_signature(bundle: Bundle) -> None:
    signature = bytearray(base64.b64decode(bundle["dsseEnvelope"]["signatures"][0]["sig"]))
    signature[-1] ^= 1
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(signature).decode()


def strip_timestamp(bundle: Bundle) -> None:
    del bundle["verificationMaterial"]["timestampVerificationData"]


def empty_timestamps(bundle: Bundle) -> None:
    bundle["verificationMaterial"]["timestampVerificationData"] = {"rfc3161Timestamps": []}


def flip_timestamp(bundle: Bundle) -> None:
    stamp = bundle["verificationMaterial"]["timestampVerificationData"]["rfc3161Timestamps"][0]
    data = bytearray(base64.b64decode(stamp["signedTimestamp"]))
    data[-1] ^= 1
    stamp["signedTimestamp"] = base64.b64encode(data).decode()


def strip_log_entry(bundle: Bundle) -> None:
    bundle["verificationMaterial"]["tlogEntries"] = []


def other_payload_type(bundle: Bundle) -> None:
    bundle["dsseEnvelope"]["payloadType"] = "text/plain"


def old_media_type(bundle: Bundle) -> None:
    bundle["mediaType"] = "application/vnd.dev.sigstore.bundle+json;version=0.1"


CHANGES = [
    (flip_payload, "signature"),
    (flip_signature, "signature|ASN.1|timestamp"),
    (strip_timestamp, "no signed timestamp"),
    (empty_timestamps, "no signed timestamp"),
    (flip_timestamp, "timestamp"),
    (strip_log_entry, "log entry"),
    (other_payload_type, "signature"),
    (old_media_type, "mediaType"),
]


@pytest.mark.parametrize(("change", "expected"), CHANGES, ids=lambda value: getattr(value, "__name__", ""))
def test_changed_bundle(attested: Any, change: Callable[[Bundle], None], expected: str) -> None:
    import re

    bundles = attested.bundles()
    change(bundles[0])
    attested.replace_bundles([json.dumps(bundle) for bundle in bundles])
    code, outcome = attested.verify()
    assert code == 3
    assert re.search(expected, reason(outcome)), reason(outcome)


def test_swapped_log_entry(attested: Any) -> None:
    first, second = attested.bundles()
    material = first["verificationMaterial"], second["verificationMaterial"]
    material[0]["tlogEntries"], material[1]["tlogEntries"] = material[1]["tlogEntries"], material[0]["tlogEntries"]
    attested.replace_bundles([json.dumps(first), json.dumps(second)])
    code, outcome = attested.verify()
    assert code == 3
    assert "log entry" in reason(outcome)


def test_bundle_of_another_image(
    attested: Any, tmp_path: Path, signer: Callable[..., str], toy: Callable[..., Any], about: Callable[[str], Any]
) -> None:
    other = toy(tmp_path / "other", text="other\n").image()
    attested.replace_bundles([signer(item) for item in about(other.digest)])
    code, outcome = attested.verify()
    assert code == 3
    assert f"about {other.digest}, not {attested.image.digest}" in reason(outcome)


@pytest.mark.parametrize("subjects", ["none", "empty", "two"])
def test_other_than_one_subject(
    attested: Any, signer: Callable[..., str], about: Callable[[str], Any], subjects: str
) -> None:
    provenance, sbom = about(attested.image.digest)
    if subjects == "none":
        del provenance["subject"]
    else:
        provenance["subject"] = [] if subjects == "empty" else provenance["subject"] * 2
    attested.replace_bundles([signer(provenance), signer(sbom)])
    code, outcome = attested.verify()
    assert code == 3
    assert "subjects, expected exactly one" in reason(outcome)


def test_expired_leaf(attested: Any, signer: Callable[..., str], about: Callable[[str], Any]) -> None:
    attested.replace_bundles([signer(item, expired=True) for item in about(attested.image.digest)])
    code, outcome = attested.verify()
    assert code == 3
    assert "validation time" in reason(outcome)


@pytest.mark.parametrize("kind", [statements.PROVENANCE, statements.SBOM])
def test_second_attestation_that_contradicts_the_first(
    attested: Any, signer: Callable[..., str], about: Callable[[str], Any], kind: str
) -> None:
    (second,) = [item for item in about(attested.image.digest) if item["predicateType"] == kind]
    if kind == statements.PROVENANCE:
        second["predicate"]["buildDefinition"]["externalParameters"] = {"variant": "cuda13"}
    else:
        second["predicate"]["components"] = [{"type": "library", "name": "something else"}]
    attach(attested.layout, attested.image, signer(second), statements.SBOM)
    code, outcome = attested.verify()
    assert code == 3
    assert "contradict each other" in reason(outcome)


def test_same_statement_twice_is_no_contradiction(
    attested: Any, signer: Callable[..., str], about: Callable[[str], Any]
) -> None:
    for item in about(attested.image.digest):
        attach(attested.layout, attested.image, signer(item), statements.SBOM)
    assert attested.verify()[0] == 0


@pytest.mark.parametrize("field", ["buildType", "externalParameters", "resolvedDependencies", "builder", "digest"])
def test_provenance_without_a_required_field(
    attested: Any, signer: Callable[..., str], about: Callable[[str], Any], field: str
) -> None:
    provenance, sbom = about(attested.image.digest)
    definition = provenance["predicate"]["buildDefinition"]
    if field == "builder":
        provenance["predicate"]["runDetails"]["builder"] = {}
    elif field == "digest":
        definition["resolvedDependencies"] = [{"uri": "https://example.invalid/x"}]
    else:
        del definition[field]
    attested.replace_bundles([signer(provenance), signer(sbom)])
    code, outcome = attested.verify()
    assert code == 3
    assert "provenance" in reason(outcome)


@pytest.mark.parametrize(
    "builder", ["https://github.com/actions/runner/github-hosted", "https://example.invalid/builder"]
)
def test_builder_that_the_certificate_does_not_support(
    attested: Any, signer: Callable[..., str], about: Callable[[str], Any], builder: str
) -> None:
    provenance, sbom = about(attested.image.digest)
    provenance["predicate"]["runDetails"]["builder"]["id"] = builder
    attested.replace_bundles([signer(provenance), signer(sbom)])
    code, outcome = attested.verify()
    assert code == 3
    assert "builder" in reason(outcome)


def test_unknown_predicate_type(attested: Any, signer: Callable[..., str], about: Callable[[str], Any]) -> None:
    provenance, sbom = about(attested.image.digest)
    provenance["predicateType"] = "https://example.invalid/claims/v1"
    attested.replace_bundles([signer(provenance), signer(sbom)])
    code, outcome = attested.verify()
    assert code == 3
    assert "unknown predicate type" in reason(outcome)


def test_statement_with_a_key_twice(attested: Any, signer: Callable[..., str], about: Callable[[str], Any]) -> None:
    provenance, sbom = about(attested.image.digest)
    text = json.dumps(provenance)
    doubled = text[:-1] + ', "predicateType": "https://cyclonedx.org/bom"}'
    attested.replace_bundles([signer(doubled.encode()), signer(sbom)])
    code, outcome = attested.verify()
    assert code == 3
    assert "same key twice" in reason(outcome)


def test_missing_sbom(attested: Any) -> None:
    kept = [item for item in attested.bundles() if "slsa" in base64.b64decode(item["dsseEnvelope"]["payload"]).decode()]
    attested.replace_bundles([json.dumps(kept[0])])
    code, outcome = attested.verify()
    assert code == 4
    assert "missing attestation: sbom" in reason(outcome)


def test_no_attestation_at_all(attested: Any) -> None:
    attested.replace_bundles([])
    code, outcome = attested.verify()
    assert code == 4
    assert "no attestation" in reason(outcome)


def test_every_removed_field_of_a_bundle_is_survived(attested: Any) -> None:
    """A bundle that lacks any one field either verifies (the field was not needed) or is refused in one sentence."""
    bundles = attested.bundles()
    accepted = []
    for path in field_paths(bundles[0]):
        broken = json.loads(json.dumps(bundles[0]))
        parent = broken
        for key in path[:-1]:
            parent = parent[key]
        del parent[path[-1]]
        attested.replace_bundles([json.dumps(broken), json.dumps(bundles[1])])
        code, _ = attested.verify()
        assert code in (0, 3), path
        if code == 0:
            accepted.append(path[-1])
    assert set(accepted) <= {"keyid", "inclusionPromise", "logId", "integratedTime"}


def field_paths(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all fields and list items of a JSON value."""
    found: list[tuple[Any, ...]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += [(*before, key), *field_paths(inner, (*before, key))]
    return found


# Signers.


def test_wrong_identity(attested: Any, host: str) -> None:
    options = ["--identity", f"https://{host}/someone", "--issuer", f"https://oidc.{host}"]
    code, outcome = attested.verify(*options)
    assert code == 3
    assert "SANs do not match" in reason(outcome)


def test_wrong_issuer(attested: Any, host: str) -> None:
    code, outcome = attested.verify("--identity", f"https://{host}/release", "--issuer", "https://evil.invalid")
    assert code == 3
    assert "OIDCIssuer does not match" in reason(outcome)


def test_signed_by_another_instance(attested: Any, tmp_path: Path, about: Callable[[str], Any]) -> None:
    with credentials("private", state=tmp_path / "stranger") as held:
        attested.replace_bundles(sign(about(attested.image.digest), held))
    assert attested.verify()[0] == 3


def test_strangers_bundle_beside_the_right_ones(attested: Any, tmp_path: Path, about: Callable[[str], Any]) -> None:
    with credentials("private", state=tmp_path / "stranger") as held:
        (strange, _) = sign(about(attested.image.digest), held)
    attach(attested.layout, attested.image, strange, statements.SBOM)
    assert attested.verify()[0] == 3


def test_private_signature_where_public_is_required(attested: Any) -> None:
    code, outcome = attested.verify("--require-public")
    assert code == 5
    assert "integrity only" in reason(outcome)


def test_identity_without_issuer_is_a_usage_error(attested: Any, host: str) -> None:
    assert attested.verify("--identity", f"https://{host}/release")[0] == 2


def test_trust_root_that_is_none(attested: Any, tmp_path: Path) -> None:
    attested.trusted_root = tmp_path / "root.json"
    attested.trusted_root.write_text('{"tlogs": []}')
    assert attested.verify()[0] == 2


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--require-public"], 5)])
def test_without_a_named_root_this_hosts_and_the_public_one_are_tried(
    attested: Any, state: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], code: int
) -> None:
    from sparkinfer_containers.verify.cli import main

    monkeypatch.setenv("ATTEST_STATE", str(state))
    assert main([str(attested.layout.path), *options]) == code


def test_without_any_root_that_knows_the_signer(attested: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparkinfer_containers.verify.cli import main

    monkeypatch.setenv("ATTEST_STATE", str(tmp_path / "none"))
    report = tmp_path / "outcome.json"
    assert main([str(attested.layout.path), "--json", str(report)]) == 3
    assert "(--trusted-root FILE)" in reason(json.loads(report.read_text()))


# Blobs.


@pytest.mark.parametrize("part", ["layer", "config", "manifest", "referrer", "bundle"])
def test_flipped_byte_in_a_blob(attested: Any, part: str) -> None:
    layout = attested.layout
    manifest = json.loads(layout.manifest(attested.image.digest))
    referrer = next(iter(layout.referrers(attested.image.digest)))
    digest = {
        "layer": manifest["layers"][1]["digest"],
        "config": manifest["config"]["digest"],
        "manifest": attested.image.digest,
        "referrer": referrer.digest,
        "bundle": json.loads(layout.manifest(referrer.digest))["layers"][0]["digest"],
    }[part]
    path = layout.blob_path(digest)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    code, outcome = attested.verify()
    assert code == 4
    assert digest in reason(outcome)


@pytest.mark.parametrize("part", ["layers", "config"])
def test_missing_blob(attested: Any, part: str) -> None:
    manifest = json.loads(attested.layout.manifest(attested.image.digest))
    digest = (manifest["layers"][0] if part == "layers" else manifest["config"])["digest"]
    attested.layout.blob_path(digest).unlink()
    code, outcome = attested.verify()
    assert code == 4
    assert f"blob {digest} is missing" in reason(outcome)


def test_blob_that_is_a_link_out_of_the_layout(attested: Any, tmp_path: Path) -> None:
    digest = json.loads(attested.layout.manifest(attested.image.digest))["layers"][0]["digest"]
    path = attested.layout.blob_path(digest)
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert attested.verify()[0] == 4


def test_bundle_of_one_gigabyte_is_refused_unread(attested: Any) -> None:
    from sparkinfer_containers.oci.model import BUNDLE, MANIFEST, Descriptor, referrer_manifest

    layout = attested.layout
    huge = Descriptor(BUNDLE, "sha256:" + "a" * 64, 1 << 30)
    with layout.blob_path(huge.digest).open("wb") as handle:
        handle.truncate(1 << 30)
    manifest = layout.add(MANIFEST, referrer_manifest(attested.image, huge, statements.SBOM, "2026-01-01T00:00:00Z"))
    layout.list_manifest(Descriptor(MANIFEST, manifest.digest, manifest.size, BUNDLE))
    code, outcome = attested.verify()
    assert code == 4
    assert "refused unread" in reason(outcome)


def test_restarted_instance_still_vouches_for_old_bundles(attested: Any, state: Path) -> None:
    with running(state):
        pass
    assert attested.verify()[0] == 0


HOSTILE: list[Any] = [None, 5, True, "x", [], {}, {"a": 1}, [5], [[]]]


def changed_everywhere(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Copies of a JSON value with each place in turn replaced by each hostile value, and the place."""
    for path in field_paths(value):
        for hostile in HOSTILE:
            broken = json.loads(json.dumps(value))
            parent = broken
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = hostile
            yield path, broken


def test_every_change_of_a_referrer_manifest_is_survived(attested: Any) -> None:
    """Unsigned, so anyone can attach one: refused with a documented code, or the field was not needed."""
    from sparkinfer_containers.oci.model import BUNDLE, MANIFEST, Descriptor, canonical

    layout = attested.layout
    index = (layout.path / "index.json").read_bytes()
    manifest = json.loads(layout.manifest(next(iter(layout.referrers(attested.image.digest))).digest))
    for path, broken in changed_everywhere(manifest):
        (layout.path / "index.json").write_bytes(index)
        stored = layout.add(MANIFEST, canonical(broken))
        layout.list_manifest(Descriptor(MANIFEST, stored.digest, stored.size, BUNDLE))
        code, _ = attested.verify()
        assert code in (0, 3, 4), path
        if path[-1] == "layers":
            assert code in (3, 4), broken


def test_every_change_of_the_index_is_survived(attested: Any) -> None:
    index = json.loads((attested.layout.path / "index.json").read_bytes())
    for path, broken in changed_everywhere(index):
        (attested.layout.path / "index.json").write_text(json.dumps(broken))
        assert attested.verify()[0] in (0, 3, 4), path


def test_second_provenance_that_names_another_builder(attested: Any, signer: Any, about: Any) -> None:
    provenance, _ = about(attested.image.digest)
    provenance["predicate"]["runDetails"]["builder"]["id"] = "https://example.invalid/other"
    attach(attested.layout, attested.image, signer(provenance), statements.PROVENANCE)
    code, outcome = attested.verify()
    assert code == 3
    assert "contradict" in reason(outcome)


def test_outcome_that_cannot_be_written(attested: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sparkinfer_containers.verify.cli import main

    root = ["--trusted-root", str(attested.trusted_root)]
    for place in (tmp_path, tmp_path / "none" / "outcome.json"):
        assert main([str(attested.layout.path), *root, "--json", str(place)]) == 2
        assert "--json" in capsys.readouterr().out


def test_folder_that_does_not_exist_is_said_to_be_so(capsys: pytest.CaptureFixture[str]) -> None:
    from sparkinfer_containers.verify.cli import main

    assert main(["reports/typo"]) == 2
    assert "reports/typo does not exist" in capsys.readouterr().out


def test_image_without_the_evaluation_that_is_required(attested: Any) -> None:
    code, outcome = attested.verify("--require-evaluation", "run-1")
    assert code == 4
    assert "no evaluation of run run-1" in reason(outcome)
