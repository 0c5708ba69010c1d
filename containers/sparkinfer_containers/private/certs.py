"""X.509 of the private instance: CA root and intermediate, timestamping certificate, short-lived signing leaves."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sparkinfer_containers.private.state import StateFolder, write_private

ORGANIZATION = "sparkinfer private instance (integrity only)"
"""One organisation in every certificate: the GitHub CLI picks its verifier by the issuer's organisation."""

LEAF_LIFETIME = timedelta(minutes=10)
SCT_LIST = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
FULCIO = "1.3.6.1.4.1.57264.1"
CLAIM_EXTENSIONS = {
    "job_workflow_uri": 9,
    "source_repository": 12,
    "source_digest": 13,
    "source_ref": 14,
    "source_owner": 16,
    "job_workflow": 18,
}
"""Token claim to Fulcio's certificate extension number (1.3.6.1.4.1.57264.1.<n>, DER UTF8String)."""


def name(common: str) -> x509.Name:
    """Subject or issuer name with the instance's organisation."""
    return x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATION_NAME, ORGANIZATION), x509.NameAttribute(NameOID.COMMON_NAME, common)]
    )


def spki(key: ec.EllipticCurvePublicKey) -> bytes:
    """DER SubjectPublicKeyInfo."""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def utf8_string(text: str) -> bytes:
    """DER UTF8String of up to 65535 bytes."""
    data = text.encode()
    if len(data) < 0x80:
        return bytes([0x0C, len(data)]) + data
    if len(data) < 0x100:
        return bytes([0x0C, 0x81, len(data)]) + data
    return b"\x0c\x82" + struct.pack("!H", len(data)) + data


def _key_usage(*, sign: bool, certify: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certify,
        crl_sign=certify,
        encipher_only=False,
        decipher_only=False,
    )


def _base(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, issuer_key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _stored(state: StateFolder, file_name: str) -> Path:
    return state.path / file_name


def _long_lived(
    state: StateFolder,
    file_name: str,
    common: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None,
    *,
    depth: int | None,
) -> x509.Certificate:
    """A ten-year certificate kept as PEM in the state folder; `depth` is a CA's path length, None a TSA leaf."""
    path = _stored(state, file_name)
    if path.exists():
        return x509.load_pem_x509_certificate(path.read_bytes())
    signer_name, signer = (issuer[0].subject, issuer[1]) if issuer else (name(common), key)
    start = datetime.now(UTC).replace(microsecond=0)
    builder = (
        _base(name(common), signer_name, key.public_key(), signer.public_key())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=3650))
        .add_extension(x509.BasicConstraints(ca=depth is not None, path_length=depth), critical=True)
        .add_extension(_key_usage(sign=depth is None, certify=depth is not None), critical=True)
    )
    if depth is None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.TIME_STAMPING]), critical=True)
    made = builder.sign(signer, hashes.SHA384() if signer.curve.key_size == 384 else hashes.SHA256())
    write_private(path, made.public_bytes(serialization.Encoding.PEM))
    return made


@dataclass(frozen=True, slots=True)
class Authority:
    """A signing certificate with its key and root: the CA's intermediate, or the timestamping certificate."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    root: x509.Certificate


def certificate_authority(state: StateFolder) -> Authority:
    """The CA of signing leaves: P-384 root and intermediate."""
    root_key = state.key("ca-root", ec.SECP384R1())
    root = _long_lived(state, "ca-root.pem", "sparkinfer private CA root", root_key, None, depth=1)
    key = state.key("ca-intermediate", ec.SECP384R1())
    issuer = (root, root_key)
    made = _long_lived(state, "ca-intermediate.pem", "sparkinfer private CA intermediate", key, issuer, depth=0)
    return Authority(made, key, root)


def timestamp_authority(state: StateFolder) -> Authority:
    """The timestamping certificate under a root of its own."""
    root_key = state.key("tsa-root", ec.SECP256R1())
    root = _long_lived(state, "tsa-root.pem", "sparkinfer private TSA root", root_key, None, depth=0)
    key = state.key("tsa", ec.SECP256R1())
    made = _long_lived(state, "tsa.pem", "sparkinfer private TSA", key, (root, root_key), depth=None)
    return Authority(made, key, root)


def _signed_certificate_timestamp(
    ct_key: ec.EllipticCurvePrivateKey, issuer: x509.Certificate, precertificate: x509.Certificate, at: datetime
) -> x509.UnrecognizedExtension:
    """SCT list of one SCT over the precertificate's TBS (RFC 6962, 3.2 and 3.3), as a certificate extension."""
    issuer_key = issuer.public_key()
    assert isinstance(issuer_key, ec.EllipticCurvePublicKey)
    tbs = precertificate.tbs_certificate_bytes
    milliseconds = int(at.timestamp() * 1000)
    signed = (
        struct.pack("!BBQH", 0, 0, milliseconds, 1)
        + hashlib.sha256(spki(issuer_key)).digest()
        + len(tbs).to_bytes(3, "big")
        + tbs
        + b"\x00\x00"
    )
    signature = ct_key.sign(signed, ec.ECDSA(hashes.SHA256()))
    sct = (
        b"\x00"
        + hashlib.sha256(spki(ct_key.public_key())).digest()
        + struct.pack("!QH", milliseconds, 0)
        + b"\x04\x03"  # sha256, ecdsa
        + struct.pack("!H", len(signature))
        + signature
    )
    listed = struct.pack("!H", len(sct)) + sct
    listed = struct.pack("!H", len(listed)) + listed
    octets = bytes([0x04, 0x81, len(listed)]) + listed if len(listed) > 0x7F else bytes([0x04, len(listed)]) + listed
    return x509.UnrecognizedExtension(SCT_LIST, octets)


def signing_leaf(
    authority: Authority,
    ct_key: ec.EllipticCurvePrivateKey,
    key: ec.EllipticCurvePublicKey,
    claims: Mapping[str, str],
    lifetime: timedelta = LEAF_LIFETIME,
) -> x509.Certificate:
    """A short-lived code-signing certificate for a verified token's claims (`sub` a URI, `iss`, optional others)."""
    start = datetime.now(UTC).replace(microsecond=0)
    builder = (
        _base(x509.Name([]), authority.certificate.subject, key, authority.key.public_key())
        .not_valid_before(start)
        .not_valid_after(start + lifetime)
        .add_extension(_key_usage(sign=True, certify=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(claims["sub"])]), critical=True)
    )
    issuer_oids = [(1, claims["iss"].encode()), (8, utf8_string(claims["iss"]))]
    others = [(number, utf8_string(claims[claim])) for claim, number in CLAIM_EXTENSIONS.items() if claim in claims]
    for number, value in issuer_oids + others:
        oid = x509.ObjectIdentifier(f"{FULCIO}.{number}")
        builder = builder.add_extension(x509.UnrecognizedExtension(oid, value), critical=False)
    precertificate = builder.sign(authority.key, hashes.SHA384())
    sct = _signed_certificate_timestamp(ct_key, authority.certificate, precertificate, datetime.now(UTC))
    return builder.add_extension(sct, critical=False).sign(authority.key, hashes.SHA384())
