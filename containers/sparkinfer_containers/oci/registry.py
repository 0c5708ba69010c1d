"""A registry client over plain HTTP calls (distribution-spec 1.1): push without changing a byte, attach, pull.

Loopback registries are spoken to over HTTP, all others over HTTPS. Credentials, where a registry wants them, come
from ATTEST_REGISTRY_USER and ATTEST_REGISTRY_PASSWORD; without them access is anonymous.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sparkinfer.errors import EnvironmentProblem
from sparkinfer_containers.errors import DigestProblem, UsageProblem
from sparkinfer_containers.oci.layout import Layout
from sparkinfer_containers.oci.model import (
    INDEX,
    MANIFEST,
    MANIFEST_LIMIT,
    Descriptor,
    canonical,
    parse_object,
    parts_of,
    sha256,
)
from sparkinfer_containers.oci.stream import AHEAD, PIECE, checked, gathered
from sparkinfer_containers.statements import bare_sha256

_REFERENCE = re.compile(
    r"(?P<host>[A-Za-z0-9.-]+(?::[0-9]+)?)/(?P<name>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?\Z"
)
_LOOPBACK = {"127.0.0.1", "localhost"}
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Reference:
    """`host/name[:tag][@sha256:...]`."""

    host: str
    name: str
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Read a reference. Raises UsageProblem when it is not one."""
        found = _REFERENCE.match(text.removeprefix("oci://"))
        if not found:
            raise UsageProblem(f"{text!r} is not an image reference: expected host/name:tag or host/name@sha256:...")
        return cls(found["host"], found["name"], found["tag"], found["digest"])

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.host}/{self.name}{tag}" + (f"@{self.digest}" if self.digest else "")


class Registry:
    """One repository of one registry."""

    def __init__(self, reference: Reference, scratch: Path | None = None, *, anonymous: bool = False) -> None:
        self.reference = reference
        scheme = "http" if reference.host.split(":")[0] in _LOOPBACK else "https"
        self._base = f"{scheme}://{reference.host}/v2/{reference.name}"
        local = scheme == "http"
        self._http = httpx.Client(follow_redirects=True, timeout=httpx.Timeout(60, read=300), trust_env=not local)
        self._anonymous = anonymous
        self._scratch = tempfile.TemporaryDirectory(prefix="sparkinfer-pull-", dir=scratch)

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._scratch.cleanup()

    def _send(self, method: str, url: str, **options: Any) -> httpx.Response:
        """One request; after a 401 with a bearer challenge a token is fetched and the request made once more."""
        stream = options.pop("stream", False)
        content = options.pop("content", None)
        for attempt in (1, 2):
            body = content() if callable(content) else content
            request = self._http.build_request(method, url, content=body, **options)
            try:
                answer = self._http.send(request, stream=stream)
            except httpx.HTTPError as error:
                raise EnvironmentProblem(
                    f"registry {self.reference.host} did not answer {method} {url}: {error}"
                ) from error
            if answer.status_code != 401 or attempt == 2 or not self._login(answer):
                return answer
        raise AssertionError("unreachable")

    def _login(self, answer: httpx.Response) -> bool:
        kind, _, rest = answer.headers.get("www-authenticate", "").partition(" ")
        user, password = os.environ.get("ATTEST_REGISTRY_USER"), os.environ.get("ATTEST_REGISTRY_PASSWORD")
        basic = httpx.BasicAuth(user, password) if user and password and not self._anonymous else None
        if kind.lower() == "basic" and basic:
            self._http.auth = basic
            return True
        if kind.lower() != "bearer":
            return False
        fields = dict(_CHALLENGE.findall(rest))
        try:
            realm = httpx.URL(fields.get("realm", ""))
        except httpx.InvalidURL as error:
            raise EnvironmentProblem(
                f"registry {self.reference.host} names no address to log in at: {error}"
            ) from error
        if realm.scheme != "https" and realm.host not in _LOOPBACK:
            raise EnvironmentProblem(f"registry {self.reference.host} wants a login at {realm}, which is not HTTPS")
        query = {key: fields[key] for key in ("service", "scope") if key in fields}
        try:
            granted = self._http.get(realm, params=query, auth=basic or httpx.USE_CLIENT_DEFAULT)
        except httpx.HTTPError as error:
            raise EnvironmentProblem(f"the login of registry {self.reference.host} did not answer: {error}") from error
        if not granted.is_success:
            return False
        said = parse_object(granted.content, f"answer of the login at {realm.host}")
        token = said.get("token") or said.get("access_token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise EnvironmentProblem(f"the login of registry {self.reference.host} gave no token")
        self._http.headers["Authorization"] = f"Bearer {token}"
        return True

    def _expect(self, answer: httpx.Response, what: str, *codes: int) -> httpx.Response:
        if answer.status_code in codes:
            return answer
        try:
            body = answer.read()[:300].decode(errors="replace")
        except httpx.HTTPError as error:
            body = f"(the connection broke: {error})"
        text = f"{what}: registry {self.reference.host} answered {answer.status_code}: {body}"
        if answer.status_code == 404:
            raise DigestProblem(text)
        raise EnvironmentProblem(text)

    # Reading.

    def _limited(self, url: str, accept: str, limit: int, what: str) -> bytes | None:
        answer = self._send("GET", url, headers={"Accept": accept}, stream=True)
        try:
            if answer.status_code == 404:
                return None
            self._expect(answer, what, 200)
            data = bytearray()
            for piece in answer.iter_bytes():
                data += piece
                if len(data) > limit:
                    raise DigestProblem(f"{what}: over the limit of {limit} bytes, reading stopped")
            return bytes(data)
        except httpx.HTTPError as error:
            raise EnvironmentProblem(f"{what}: the connection broke ({error}): try again") from error
        finally:
            answer.close()

    def resolve(self, tag: str) -> Descriptor:
        """The descriptor a tag points to now."""
        data = self._limited(f"{self._base}/manifests/{tag}", MANIFEST, MANIFEST_LIMIT, f"tag {tag}")
        if data is None:
            raise DigestProblem(f"{self.reference.host}/{self.reference.name} has no tag {tag}")
        return Descriptor.of(MANIFEST, data)

    def manifest(self, digest: str) -> bytes:
        """Bytes of a manifest, checked against `digest`. Raises DigestProblem when absent or different."""
        url = f"{self._base}/manifests/{digest}"
        data = self._limited(url, f"{MANIFEST}, {INDEX}", MANIFEST_LIMIT, f"manifest {digest}")
        if data is None:
            raise DigestProblem(f"{self.reference.host}/{self.reference.name} has no manifest {digest}")
        if sha256(data) != digest:
            raise DigestProblem(f"the registry served {sha256(data)} when asked for {digest}")
        return data

    def read(self, wanted: Descriptor, limit: int) -> bytes:
        """Bytes of a small blob, checked against digest and size. Raises DigestProblem."""
        if wanted.size > limit:
            raise DigestProblem(
                f"blob {wanted.digest} has {wanted.size} bytes, over the limit of {limit}: refused unread"
            )
        return self._fetch(wanted).read_bytes()

    def blob_file(self, wanted: Descriptor) -> Path:
        """A temporary file with a blob, checked against digest and size while it arrives."""
        return self._fetch(wanted)

    def _fetch(self, wanted: Descriptor) -> Path:
        target = Path(self._scratch.name) / bare_sha256(wanted.digest)
        if target.exists():
            return target
        partial = target.with_suffix(".part")
        with partial.open("wb") as handle, ThreadPoolExecutor(1) as pool:
            written: deque[Future[int]] = deque()
            for piece in self.pieces(wanted):
                written.append(pool.submit(handle.write, piece))
                if len(written) > AHEAD:
                    written.popleft().result()
            for future in written:
                future.result()
        partial.rename(target)
        return target

    def pieces(self, wanted: Descriptor) -> Iterator[bytes]:
        """The bytes of a blob as they arrive; after the last piece digest and size are checked (`checked`)."""

        def refuse(count: int, digest: str) -> DigestProblem:
            return DigestProblem(f"blob {wanted.digest}: the registry served {count} bytes of sha256:{digest}")

        return checked(gathered(self._raw(wanted)), wanted, refuse)

    def _raw(self, wanted: Descriptor) -> Iterator[bytes]:
        answer = self._send("GET", f"{self._base}/blobs/{wanted.digest}", stream=True)
        try:
            self._expect(answer, f"blob {wanted.digest}", 200)
            yield from answer.iter_raw()
        except httpx.HTTPError as error:
            raise EnvironmentProblem(f"blob {wanted.digest}: the connection broke ({error}): try again") from error
        finally:
            answer.close()

    def referrers(self, digest: str) -> Iterator[Descriptor]:
        """Referrers of a manifest: by the referrers API; when that is absent or lists none, by the fallback tag."""
        what = f"referrers of {digest}"
        for path in (f"referrers/{digest}", f"manifests/{digest.replace(':', '-')}"):
            data = self._limited(f"{self._base}/{path}", INDEX, MANIFEST_LIMIT, what)
            listed = parse_object(data, what).get("manifests") if data is not None else []
            if not isinstance(listed, list):
                raise DigestProblem(f"{what}: no list of manifests")
            if listed:
                yield from (Descriptor.from_json(item, what) for item in listed)
                return

    # Writing.

    def push_blob(self, layout: Layout, wanted: Descriptor) -> None:
        """Upload a blob unless the registry has it. The local file is hashed first."""
        path = layout.blob_file(wanted)
        if self._send("HEAD", f"{self._base}/blobs/{wanted.digest}").status_code == 200:
            return
        start = self._send("POST", f"{self._base}/blobs/uploads/")
        self._expect(start, "blob upload", 202)
        try:
            said = start.headers["location"]
            location = httpx.URL(self._base).join(said).copy_merge_params({"digest": wanted.digest})
        except (KeyError, httpx.InvalidURL) as error:
            raise EnvironmentProblem(
                f"registry {self.reference.host} names no address to upload to: {error}"
            ) from error

        def pieces() -> Iterator[bytes]:
            with path.open("rb") as handle:
                while piece := handle.read(PIECE):
                    yield piece

        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(wanted.size)}
        self._expect(self._send("PUT", str(location), content=pieces, headers=headers), "blob upload", 201)

    def push_manifest(self, data: bytes, media_type: str, name: str | None = None) -> httpx.Response:
        """Upload manifest bytes under `name` (a tag) or their digest; the stored digest must be theirs."""
        digest = sha256(data)
        url = f"{self._base}/manifests/{name or digest}"
        answer = self._send("PUT", url, content=data, headers={"Content-Type": media_type})
        self._expect(answer, f"manifest {name or digest}", 201)
        stored = answer.headers.get("docker-content-digest", digest)
        if stored != digest:
            raise DigestProblem(f"the registry stored {stored} for manifest {digest}")
        return answer

    def push_image(self, layout: Layout, image: Descriptor, tag: str | None = None) -> str:
        """Push an image with its blobs; returns its digest, unchanged."""
        data = layout.manifest(image.digest)
        manifest = parse_object(data, image.digest)
        for item in parts_of(manifest, image.digest):
            self.push_blob(layout, item)
        self.push_manifest(data, MANIFEST)
        if tag:
            self.push_manifest(data, MANIFEST, tag)
        if self.manifest(image.digest) != data:
            raise DigestProblem(f"the registry does not serve {image.digest} as pushed")
        return image.digest

    def push_referrer(self, layout: Layout, item: Descriptor) -> str:
        """Push a referrer manifest and make it findable; returns `api` or `fallback tag`."""
        data = layout.manifest(item.digest)
        manifest = parse_object(data, item.digest)
        subject = Descriptor.from_json(manifest.get("subject"), item.digest).digest
        for part in parts_of(manifest, item.digest):
            self.push_blob(layout, part)
        answer = self.push_manifest(data, MANIFEST)
        if answer.headers.get("oci-subject") == subject:
            return "api"
        listed = {found.digest: found for found in self.referrers(subject)}
        listed[item.digest] = Descriptor(
            MANIFEST, item.digest, item.size, item.artifact_type, manifest.get("annotations", {})
        )
        ordered = [listed[digest].to_json() for digest in sorted(listed)]
        index = canonical({"schemaVersion": 2, "mediaType": INDEX, "manifests": ordered})
        self.push_manifest(index, INDEX, subject.replace(":", "-"))
        return "fallback tag"
