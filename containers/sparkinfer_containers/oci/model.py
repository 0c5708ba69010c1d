"""Descriptors, media types and size limits of the OCI forms used here (image-spec 1.1)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkinfer_containers.errors import DigestProblem
from sparkinfer_containers.statements import bare_sha256

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
EMPTY = "application/vnd.oci.empty.v1+json"
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
REF_NAME = "org.opencontainers.image.ref.name"

MANIFEST_LIMIT = 4 << 20
"""Largest manifest or index read, bytes (the limit registries use themselves)."""
BUNDLE_LIMIT = 16 << 20
"""Largest attestation bundle read, bytes: a larger one is refused unread."""


def canonical(value: object) -> bytes:
    """JSON bytes that depend on the value alone: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sha256(data: bytes) -> str:
    """`sha256:<hex>` of bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object without duplicate keys. Raises DigestProblem naming `what`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("an object has the same key twice")
        return made

    try:
        value = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DigestProblem(f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DigestProblem(f"{what} is not a JSON object")
    return value


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A content descriptor: media type, `sha256:` digest, size in bytes."""

    media_type: str
    digest: str
    size: int
    artifact_type: str | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The JSON form; absent fields are left out."""
        made: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        if self.artifact_type:
            made["artifactType"] = self.artifact_type
        if self.annotations:
            made["annotations"] = dict(self.annotations)
        return made

    @classmethod
    def from_json(cls, value: object, where: str) -> Descriptor:
        """Read and check a descriptor. Raises DigestProblem naming `where` it stood."""
        if not isinstance(value, dict):
            raise DigestProblem(f"{where}: a descriptor is not an object")
        size, digest, media_type = value.get("size"), value.get("digest"), value.get("mediaType")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0 or not isinstance(media_type, str):
            raise DigestProblem(f"{where}: a descriptor has no valid size or mediaType")
        try:
            bare_sha256(digest if isinstance(digest, str) and digest.startswith("sha256:") else "")
        except ValueError as error:
            raise DigestProblem(f"{where}: {error}") from error
        artifact_type = value.get("artifactType")
        annotations = value.get("annotations") or {}
        if not isinstance(annotations, dict):
            raise DigestProblem(f"{where}: the annotations of a descriptor are not an object")
        return cls(
            media_type, str(digest), size, artifact_type if isinstance(artifact_type, str) else None, annotations
        )

    @classmethod
    def of(cls, media_type: str, data: bytes) -> Descriptor:
        """The descriptor of bytes at hand."""
        return cls(media_type, sha256(data), len(data))


def parts_of(manifest: Mapping[str, Any], where: str) -> list[Descriptor]:
    """The descriptors of a manifest's config and layers, in this order. Raises DigestProblem naming `where`."""
    layers = manifest.get("layers")
    if not isinstance(layers, list):
        raise DigestProblem(f"{where}: its manifest has no list of layers")
    return [Descriptor.from_json(item, where) for item in (manifest.get("config"), *layers)]


EMPTY_CONFIG = Descriptor.of(EMPTY, b"{}")


def referrer_manifest(subject: Descriptor, bundle: Descriptor, predicate_type: str, created: str) -> bytes:
    """The manifest that attaches a sigstore bundle to an image (the form cosign, gh and sigstore-go look for)."""
    return canonical(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": BUNDLE,
            "config": EMPTY_CONFIG.to_json(),
            "layers": [bundle.to_json()],
            "subject": Descriptor(subject.media_type, subject.digest, subject.size).to_json(),
            "annotations": {
                "dev.sigstore.bundle.content": "dsse-envelope",
                "dev.sigstore.bundle.predicateType": predicate_type,
                "org.opencontainers.image.created": created,
            },
        }
    )
