"""Verify an image: every blob re-hashed, every layer entry checked, every attestation verified."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from sparkinfer_containers import checks
from sparkinfer_containers.errors import DigestProblem, SignatureProblem
from sparkinfer_containers.oci.layers import check_streams
from sparkinfer_containers.oci.model import (
    BUNDLE,
    BUNDLE_LIMIT,
    CONFIG,
    LAYER,
    MANIFEST,
    MANIFEST_LIMIT,
    Descriptor,
    parse_object,
)
from sparkinfer_containers.statements import EVALUATION, PROVENANCE, SBOM, SHORT_NAMES
from sparkinfer_containers.trust import LEVELS, TrustRoot
from sparkinfer_containers.verify import attestations
from sparkinfer_containers.verify.bundle import BundleVerifier, Verified
from sparkinfer_containers.verify.outcome import Outcome

MAX_REFERRERS = 64


class Source(Protocol):
    """Where an image lies: a layout folder or a registry. Every call checks the bytes against their digest."""

    def manifest(self, digest: str) -> bytes: ...

    def read(self, wanted: Descriptor, limit: int) -> bytes: ...

    def blob_file(self, wanted: Descriptor) -> Path: ...

    def pieces(self, wanted: Descriptor) -> Iterable[bytes]: ...

    def referrers(self, digest: str) -> Iterable[Descriptor]: ...


def image_parts(source: Source, digest: str) -> tuple[dict[str, Any], list[Descriptor]]:
    """Config and layer descriptors of an image of this project's form. Raises DigestProblem for anything else."""
    manifest = parse_object(source.manifest(digest), f"manifest {digest}")
    if manifest.get("mediaType") != MANIFEST:
        raise DigestProblem(f"{digest} is a {manifest.get('mediaType')!r}, expected an image manifest")
    config_descriptor = Descriptor.from_json(manifest.get("config"), digest)
    layers = [Descriptor.from_json(item, digest) for item in _list(manifest, "layers", digest)]
    if config_descriptor.media_type != CONFIG or not layers or any(item.media_type != LAYER for item in layers):
        raise DigestProblem(f"{digest}: not an image of this project (config and plain tar layers expected)")
    config = parse_object(source.read(config_descriptor, MANIFEST_LIMIT), "image config")
    diff_ids = config.get("rootfs", {}).get("diff_ids") if isinstance(config.get("rootfs"), dict) else None
    if diff_ids != [item.digest for item in layers]:
        raise DigestProblem(f"{digest}: the config's diff_ids are not the layers' digests")
    return config, layers


def _list(manifest: dict[str, Any], name: str, where: str) -> list[Any]:
    value = manifest.get(name)
    if not isinstance(value, list):
        raise DigestProblem(f"{where}: its manifest has no list of {name}")
    return value


def check_image(source: Source, digest: str) -> tuple[int, int]:
    """Re-hash manifest, config and layers and check every layer entry; (layers, entries). Raises DigestProblem.

    Each layer is read once, and none is kept.
    """
    _, layers = image_parts(source, digest)
    return len(layers), check_streams((item.digest, source.pieces(item)) for item in layers)


def read_attestations(source: Source, digest: str, verifier: BundleVerifier) -> list[Verified]:
    """Every attached bundle, verified. One that fails refuses the whole image. Raises DigestProblem for none."""
    listed = [item for item in source.referrers(digest) if item.artifact_type in (BUNDLE, None)]
    if len(listed) > MAX_REFERRERS:
        raise DigestProblem(f"{len(listed)} referrers of {digest}, over the limit of {MAX_REFERRERS}")
    found = []
    for item in listed:
        manifest = parse_object(source.manifest(item.digest), f"referrer {item.digest}")
        if manifest.get("artifactType") != BUNDLE:
            continue
        subject = Descriptor.from_json(manifest.get("subject"), f"referrer {item.digest}")
        layers = _list(manifest, "layers", f"referrer {item.digest}")
        if subject.digest != digest or len(layers) != 1:
            raise SignatureProblem(f"referrer {item.digest} is about {subject.digest}, not {digest}")
        layer = Descriptor.from_json(layers[0], f"referrer {item.digest}")
        raw = source.read(layer, BUNDLE_LIMIT)
        found.append(verifier.verify(raw, digest, f"bundle {layer.digest}"))
    if not found:
        raise DigestProblem(f"no attestation is attached to {digest}")
    return found


def verify_image(source: Source, digest: str, trust: TrustRoot, verifier: BundleVerifier, outcome: Outcome) -> None:
    """Fill `outcome`. Raises DigestProblem or SignatureProblem on the first thing that does not hold."""
    found = read_attestations(source, digest, verifier)
    for statement in found:
        attestations.check_fields(statement)
    attestations.refuse_contradictions(found)
    attestations.require(found, PROVENANCE, SBOM)
    layers, entries = check_image(source, digest)
    outcome.level = LEVELS[trust.mode]
    outcome.proved.append(
        f"manifest, config and {layers} layers have the digests they are named by under {digest}; "
        f"none of {entries} layer entries reaches outside the root"
    )
    for statement in found:
        name = SHORT_NAMES[statement.predicate_type]
        outcome.signed(name, statement)
        if statement.predicate_type in (PROVENANCE, SBOM):
            outcome.proved.append(attestations.of_build(statement, public=trust.mode == "public"))
        elif statement.predicate_type == EVALUATION:
            run, cells = statement.predicate["run"], statement.predicate["cells"]
            outcome.evaluations.append(run)
            outcome.figures[run] = cells
            signed = [f"{len(cells)} signed figures"]
            if "checks" in statement.predicate:
                outcome.checks[run] = statement.predicate["checks"]
                signed.append(checks.summary(statement.predicate["checks"]))
            outcome.proved.append(f"evaluation of this image: run {run}, {' and '.join(signed)} (--json lists them)")
    if EVALUATION not in {statement.predicate_type for statement in found}:
        outcome.not_proved.append("any figure: no evaluation of this image is attached")
    else:
        outcome.not_proved.append("that the figures follow from the raw records: verify the report folder for that")
    outcome.not_proved += limits(trust)


def limits(trust: TrustRoot) -> list[str]:
    """What no signature of this trust configuration can prove."""
    stated = ["that the measurements were made honestly: a signature proves integrity, not honesty"]
    if trust.mode == "private":
        stated.insert(0, "who signed: the keys of a private instance lie beside the signer (integrity only)")
    return stated
