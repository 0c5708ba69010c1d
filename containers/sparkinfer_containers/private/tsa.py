"""The timestamp authority: RFC 3161 answers over SHA-256 imprints, signed with ECDSA P-256."""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime

from asn1crypto import algos, cms, core, tsp
from asn1crypto import x509 as asn1_x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sparkinfer.errors import RequestError
from sparkinfer_containers.private.certs import Authority

POLICY = "1.3.6.1.4.1.57264.2"
"""Policy identifier that sigstore's own timestamp authority uses."""


def _sha256() -> algos.DigestAlgorithm:
    return algos.DigestAlgorithm({"algorithm": "sha256"})


def _token_info(request: tsp.TimeStampReq, now: datetime) -> tsp.TSTInfo:
    info = {
        "version": "v1",
        "policy": POLICY,
        "message_imprint": request["message_imprint"],
        "serial_number": secrets.randbits(120),
        "gen_time": now,
        "ordering": False,
    }
    if request["nonce"].native is not None:
        info["nonce"] = request["nonce"].native
    return tsp.TSTInfo(info)


def _signed_attributes(info: bytes, certificate: bytes, now: datetime) -> cms.CMSAttributes:
    reference = tsp.SigningCertificateV2(
        {"certs": [tsp.ESSCertIDv2({"hash_algorithm": _sha256(), "cert_hash": hashlib.sha256(certificate).digest()})]}
    )
    return cms.CMSAttributes(
        [
            cms.CMSAttribute({"type": "content_type", "values": ["tst_info"]}),
            cms.CMSAttribute({"type": "signing_time", "values": [cms.Time({"utc_time": core.UTCTime(now)})]}),
            cms.CMSAttribute({"type": "message_digest", "values": [hashlib.sha256(info).digest()]}),
            cms.CMSAttribute({"type": "signing_certificate_v2", "values": [reference]}),
        ]
    )


def answer(authority: Authority, query: bytes) -> bytes:
    """DER TimeStampResp for a DER TimeStampReq. Raises RequestError for a malformed query or another hash."""
    try:
        request = tsp.TimeStampReq.load(query, strict=True)
        algorithm = request["message_imprint"]["hash_algorithm"]["algorithm"].native
        imprint = request["message_imprint"]["hashed_message"].native
    except (ValueError, TypeError) as error:
        raise RequestError(f"malformed timestamp query: {error}") from error
    if algorithm != "sha256" or len(imprint) != 32:
        raise RequestError(f"only sha256 imprints are timestamped, not {algorithm}")
    now = datetime.now(UTC).replace(microsecond=0)
    info = _token_info(request, now).dump()
    certificate = authority.certificate.public_bytes(serialization.Encoding.DER)
    attributes = _signed_attributes(info, certificate, now)
    signature = authority.key.sign(attributes.dump(), ec.ECDSA(hashes.SHA256()))
    parsed = asn1_x509.Certificate.load(certificate)
    signer = cms.SignerInfo(
        {
            "version": "v1",
            "sid": cms.SignerIdentifier(
                {
                    "issuer_and_serial_number": cms.IssuerAndSerialNumber(
                        {"issuer": parsed.issuer, "serial_number": parsed.serial_number}
                    )
                }
            ),
            "digest_algorithm": _sha256(),
            "signed_attrs": attributes,
            "signature_algorithm": algos.SignedDigestAlgorithm({"algorithm": "sha256_ecdsa"}),
            "signature": signature,
        }
    )
    signed = cms.SignedData(
        {
            "version": "v3",
            "digest_algorithms": [_sha256()],
            "encap_content_info": {"content_type": "tst_info", "content": core.ParsableOctetString(info)},
            "certificates": [parsed] if request["cert_req"].native else [],
            "signer_infos": [signer],
        }
    )
    response = tsp.TimeStampResp(
        {"status": {"status": "granted"}, "time_stamp_token": {"content_type": "signed_data", "content": signed}}
    )
    return bytes(response.dump())
