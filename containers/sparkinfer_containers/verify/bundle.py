"""Verify one attestation bundle completely: form, signature, identity, timestamp, log entry, subject, predicate.

sigstore-python checks the cryptography. It does not check the subject, the predicate type or that a signed timestamp
is there; this module does, and refuses statements with other than one subject.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.x509.extensions import ExtensionNotFound
from sigstore.errors import Error as SigstoreError
from sigstore.errors import VerificationError
from sigstore.models import Bundle
from sigstore.verify import Verifier, policy

from sparkinfer_containers.errors import DigestProblem, SignatureProblem, UsageProblem
from sparkinfer_containers.oci.model import BUNDLE, BUNDLE_LIMIT, parse_object
from sparkinfer_containers.statements import SHORT_NAMES, STATEMENT, bare_sha256
from sparkinfer_containers.trust import TrustRoot

PAYLOAD_TYPE = "application/vnd.in-toto+json"
RUNNER_ENVIRONMENT = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.11")
HOSTED_RUNNER = b"\x0c\x0dgithub-hosted"
"""The extension's value on the CI provider's own machine: a DER UTF8String."""
_RELEASE_TAG = re.compile(r"[0-9A-Za-z.+-]+\Z")


@dataclass(frozen=True, slots=True)
class Verified:
    """A statement that holds, and who signed it when."""

    predicate_type: str
    predicate: dict[str, Any]
    subject_name: str
    subject_digest: str
    identity: str
    issuer: str
    signed_at: str
    hosted_runner: bool
    """Whether the certificate says that the job ran on the CI provider's own machine."""


class ExpectedSigner:
    """Certificate policy: exact identity and issuer, or the release workflow at any version tag."""

    def __init__(self, trust: TrustRoot, identity: str | None, issuer: str | None) -> None:
        if (identity is None) != (issuer is None):
            raise UsageProblem("--identity and --issuer belong together: an identity means nothing without its issuer")
        self.identity = identity or trust.identity
        self.issuer = issuer or trust.issuer
        self._prefix = trust.prefix and identity is None
        if not self.identity:
            raise UsageProblem("this trust root needs --identity and --issuer: it is not one of this project's own")

    def verify(self, cert: x509.Certificate) -> None:
        """Raises VerificationError when the certificate is someone else's."""
        if not self._prefix:
            policy.Identity(identity=self.identity, issuer=self.issuer).verify(cert)
            return
        policy.OIDCIssuer(self.issuer).verify(cert)
        found = subject_uris(cert)
        if len(found) != 1 or not found[0].startswith(self.identity):
            raise VerificationError(f"certificate identity {found} is not {self.identity}<version>")
        if not _RELEASE_TAG.match(found[0].removeprefix(self.identity)):
            raise VerificationError(f"certificate identity {found[0]} is not a release tag of the workflow")


def subject_uris(cert: x509.Certificate) -> list[str]:
    """The URI names in a certificate's subject alternative name."""
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return list(names.get_values_for_type(x509.UniformResourceIdentifier))


class BundleVerifier:
    """Verifies bundles under one trust root and one expected signer."""

    def __init__(self, trust: TrustRoot, signer: ExpectedSigner) -> None:
        self._verifier = Verifier(trusted_root=trust.root)
        self._signer = signer

    def verify(self, raw: bytes, subject_digest: str, where: str) -> Verified:
        """The statement in `raw` if every check holds and its one subject is `subject_digest`.

        Raises SignatureProblem, naming `where` the bundle came from.
        """
        if len(raw) > BUNDLE_LIMIT:
            raise SignatureProblem(f"{where}: {len(raw)} bytes, over the limit of {BUNDLE_LIMIT} for a bundle")
        try:
            media_type = parse_object(raw, where).get("mediaType")
            if media_type != BUNDLE:
                raise SignatureProblem(f"{where}: mediaType is {media_type!r}, expected {BUNDLE}")
            bundle = Bundle.from_json(raw)
            signed_at = self._timestamp(bundle, where)
            payload_type, payload = self._verifier.verify_dsse(bundle, self._signer)
        except (SigstoreError, DigestProblem, ExtensionNotFound, ValueError, TypeError) as error:
            raise SignatureProblem(f"{where}: {error}") from error
        if payload_type != PAYLOAD_TYPE:
            raise SignatureProblem(f"{where}: payload type is {payload_type!r}, expected {PAYLOAD_TYPE}")
        return self._statement(payload, bundle.signing_certificate, signed_at, subject_digest, where)

    def _timestamp(self, bundle: Bundle, where: str) -> str:
        """ISO time of the verified RFC 3161 timestamp: required even where the log's own time would do."""
        material = bundle.verification_material.timestamp_verification_data
        if material is None or not material.rfc3161_timestamps:
            raise SignatureProblem(f"{where}: the bundle has no signed timestamp")
        verified = self._verifier._verify_timestamp_authority(bundle)
        if not verified:
            raise SignatureProblem(f"{where}: no timestamp in the bundle is from a trusted timestamp authority")
        return verified[0].time.strftime("%Y-%m-%dT%H:%M:%SZ")

    def _statement(
        self, payload: bytes, cert: x509.Certificate, signed_at: str, subject_digest: str, where: str
    ) -> Verified:
        try:
            statement = parse_object(payload, f"{where}: payload")
        except DigestProblem as error:
            raise SignatureProblem(str(error)) from error
        if statement.get("_type") != STATEMENT:
            raise SignatureProblem(f"{where}: not an in-toto v1 statement but {statement.get('_type')!r}")
        subjects = statement.get("subject")
        if not isinstance(subjects, list) or len(subjects) != 1:
            count = len(subjects) if isinstance(subjects, list) else "no"
            raise SignatureProblem(f"{where}: the statement has {count} subjects, expected exactly one")
        digests = subjects[0].get("digest") if isinstance(subjects[0], dict) else None
        digest = digests.get("sha256") if isinstance(digests, dict) else None
        if digest != bare_sha256(subject_digest):
            raise SignatureProblem(f"{where}: the statement is about sha256:{digest}, not {subject_digest}")
        predicate_type, predicate = statement.get("predicateType"), statement.get("predicate")
        if not isinstance(predicate_type, str) or predicate_type not in SHORT_NAMES or not isinstance(predicate, dict):
            raise SignatureProblem(f"{where}: unknown predicate type {predicate_type!r}")
        return Verified(
            predicate_type=predicate_type,
            predicate=predicate,
            subject_name=str(subjects[0].get("name", "")),
            subject_digest=subject_digest,
            identity=", ".join(subject_uris(cert)),
            issuer=self._signer.issuer,
            signed_at=signed_at,
            hosted_runner=_extension(cert, RUNNER_ENVIRONMENT) == HOSTED_RUNNER,
        )


def _extension(cert: x509.Certificate, oid: x509.ObjectIdentifier) -> bytes:
    try:
        value = cert.extensions.get_extension_for_oid(oid).value
    except ExtensionNotFound:
        return b""
    return value.value if isinstance(value, x509.UnrecognizedExtension) else b""
