"""OCI image layouts on disk: a deterministic writer and a reader that trusts no digest it has not computed."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from sparkinfer.identity import file_sha256
from sparkinfer_containers.errors import DigestProblem, UsageProblem
from sparkinfer_containers.oci.model import (
    INDEX,
    MANIFEST,
    MANIFEST_LIMIT,
    REF_NAME,
    Descriptor,
    canonical,
    parse_object,
)
from sparkinfer_containers.oci.stream import checked, file_pieces
from sparkinfer_containers.statements import bare_sha256


class Layout:
    """An OCI layout folder (`oci-layout`, `index.json`, `blobs/sha256/`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "oci-layout").is_file() or not (path / "index.json").is_file():
            raise UsageProblem(f"{path} is not an OCI layout: it lacks oci-layout or index.json")

    @classmethod
    def create(cls, path: Path) -> Layout:
        """An empty layout in a folder that does not exist yet or is empty."""
        (path / "blobs" / "sha256").mkdir(parents=True)
        (path / "oci-layout").write_bytes(canonical({"imageLayoutVersion": "1.0.0"}))
        (path / "index.json").write_bytes(canonical({"schemaVersion": 2, "mediaType": INDEX, "manifests": []}))
        return cls(path)

    def blob_path(self, digest: str) -> Path:
        """Where the blob of `digest` lies, present or not."""
        return self.path / "blobs" / "sha256" / bare_sha256(digest)

    def add(self, media_type: str, data: bytes) -> Descriptor:
        """Store bytes as a blob."""
        made = Descriptor.of(media_type, data)
        target = self.blob_path(made.digest)
        temporary = target.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(data)
        temporary.rename(target)
        return made

    def add_file(self, media_type: str, source: Path) -> Descriptor:
        """Move a file into the layout as a blob (copied where the file system differs)."""
        made = Descriptor(media_type, "sha256:" + file_sha256(source), source.stat().st_size)
        shutil.move(source, self.blob_path(made.digest))
        return made

    def manifests(self) -> list[Descriptor]:
        """The descriptors of index.json, in order."""
        index = self.path / "index.json"
        if index.stat().st_size > MANIFEST_LIMIT:
            raise DigestProblem(f"{index} is over {MANIFEST_LIMIT} bytes")
        listed = parse_object(index.read_bytes(), str(index)).get("manifests")
        if not isinstance(listed, list):
            raise DigestProblem(f"{index} has no list of manifests")
        return [Descriptor.from_json(item, str(index)) for item in listed]

    def list_manifest(self, added: Descriptor) -> None:
        """Put a descriptor into index.json (sorted by digest, images before referrers), replacing an equal digest."""
        kept = {item.digest: item for item in self.manifests()}
        kept[added.digest] = added
        self._write_index(sorted(kept.values(), key=lambda item: (item.artifact_type is not None, item.digest)))

    def _write_index(self, ordered: list[Descriptor]) -> None:
        data = canonical({"schemaVersion": 2, "mediaType": INDEX, "manifests": [item.to_json() for item in ordered]})
        temporary = self.path / f".index.{os.getpid()}"
        temporary.write_bytes(data)
        temporary.rename(self.path / "index.json")

    def image(self, digest: str | None = None) -> Descriptor:
        """The one image manifest listed, or the one with `digest`. Raises when there is none or the choice is open."""
        images = [item for item in self.manifests() if item.artifact_type is None and item.media_type == MANIFEST]
        if digest is not None:
            images = [item for item in images if item.digest == digest]
        if len(images) != 1:
            found = ", ".join(item.digest for item in images) or "none"
            raise DigestProblem(
                f"{self.path}: expected one image manifest, found {found}: keep one image in a layout, or push it to a "
                "registry and name it there by HOST/NAME@sha256:..."
            )
        return images[0]

    # The source interface of verification: manifest, blob, referrers.

    def manifest(self, digest: str) -> bytes:
        """Bytes of a manifest, checked against its digest."""
        return self.read(Descriptor(MANIFEST, digest, -1), MANIFEST_LIMIT)

    def read(self, wanted: Descriptor, limit: int) -> bytes:
        """Bytes of a small blob, checked against digest and (unless -1) size. Raises DigestProblem."""
        path = self.blob_path(wanted.digest)
        if not path.is_file() or path.is_symlink():
            raise DigestProblem(f"blob {wanted.digest} is missing from {self.path}")
        size = path.stat().st_size
        if size > limit:
            raise DigestProblem(f"blob {wanted.digest} has {size} bytes, over the limit of {limit}: refused unread")
        data = path.read_bytes()
        if "sha256:" + hashlib.sha256(data).hexdigest() != wanted.digest or wanted.size not in (-1, size):
            raise DigestProblem(f"blob {wanted.digest} in {self.path} does not have that digest and size")
        return data

    def blob_file(self, wanted: Descriptor) -> Path:
        """The file of a large blob, checked against digest and size. Raises DigestProblem."""
        path = self.blob_path(wanted.digest)
        if not path.is_file() or path.is_symlink():
            raise DigestProblem(f"blob {wanted.digest} is missing from {self.path}")
        if path.stat().st_size != wanted.size or "sha256:" + file_sha256(path) != wanted.digest:
            raise DigestProblem(f"blob {wanted.digest} in {self.path} does not have that digest and size")
        return path

    def pieces(self, wanted: Descriptor) -> Iterator[bytes]:
        """The bytes of a large blob, read once; after the last piece digest and size are checked (`checked`)."""
        path = self.blob_path(wanted.digest)
        if not path.is_file() or path.is_symlink():
            raise DigestProblem(f"blob {wanted.digest} is missing from {self.path}")

        def refuse(_count: int, _digest: str) -> DigestProblem:
            return DigestProblem(f"blob {wanted.digest} in {self.path} does not have that digest and size")

        return checked(file_pieces(path), wanted, refuse)

    def referrers(self, digest: str) -> Iterator[Descriptor]:
        """Descriptors of the manifests listed here that name `digest` as their subject."""
        for item in self.manifests():
            if item.artifact_type is None:
                continue
            subject = parse_object(self.manifest(item.digest), item.digest).get("subject")
            if isinstance(subject, dict) and subject.get("digest") == digest:
                yield item

    def unlist_manifest(self, digest: str) -> None:
        """Take a descriptor out of index.json; its blobs stay."""
        self._write_index([item for item in self.manifests() if item.digest != digest])

    def tag(self, image: Descriptor, name: str) -> Descriptor:
        """List `image` under the reference name `name`."""
        named = Descriptor(image.media_type, image.digest, image.size, None, {REF_NAME: name})
        self.list_manifest(named)
        return named
