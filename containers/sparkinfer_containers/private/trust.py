"""The private instance's trust root and client configuration, in sigstore's own JSON forms."""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import UTC, datetime
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from sparkinfer_containers.private.certs import ORGANIZATION, Authority


def _stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _certificate(certificate: x509.Certificate) -> dict[str, str]:
    return {"rawBytes": _b64(certificate.public_bytes(serialization.Encoding.DER))}


def _authority(authority: Authority, uri: str) -> dict[str, Any]:
    return {
        "subject": {"organization": ORGANIZATION, "commonName": "sparkinfer private"},
        "uri": uri,
        "certChain": {"certificates": [_certificate(authority.certificate), _certificate(authority.root)]},
        "validFor": {"start": _stamp(authority.certificate.not_valid_before_utc)},
    }


def _log(public_der: bytes, uri: str, start: datetime) -> dict[str, Any]:
    return {
        "baseUrl": uri,
        "hashAlgorithm": "SHA2_256",
        "publicKey": {
            "rawBytes": _b64(public_der),
            "keyDetails": "PKIX_ECDSA_P256_SHA_256",
            "validFor": {"start": _stamp(start)},
        },
        "logId": {"keyId": _b64(hashlib.sha256(public_der).digest())},
    }


def trusted_root(
    host: str, authority: Authority, timestamps: Authority, log_key: bytes, ct_key: bytes
) -> dict[str, Any]:
    """`trusted_root.json`: what a verifier needs. `host` names the instance, no port or address is in it."""
    start = authority.certificate.not_valid_before_utc
    return {
        "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
        "tlogs": [_log(log_key, f"https://log.{host}", start)],
        "certificateAuthorities": [_authority(authority, f"https://ca.{host}")],
        "ctlogs": [_log(ct_key, f"https://ct.{host}", start)],
        "timestampAuthorities": [_authority(timestamps, f"https://tsa.{host}")],
    }


def client_config(root: dict[str, Any], base_url: str) -> dict[str, Any]:
    """`ClientTrustConfig`: the trust root with the addresses of an instance, which only a signer asks."""
    start = root["certificateAuthorities"][0]["validFor"]["start"]

    def service(path: str) -> list[dict[str, Any]]:
        return [
            {
                "url": base_url + path,
                "majorApiVersion": 1,
                "validFor": {"start": start},
                "operator": "sparkinfer private",
            }
        ]

    signing = {
        "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
        "caUrls": service(""),
        "oidcUrls": service("/oidc"),
        "rekorTlogUrls": service(""),
        "rekorTlogConfig": {"selector": "ANY"},
        "tsaUrls": service("/api/v1/timestamp"),
        "tsaConfig": {"selector": "ANY"},
    }
    return {
        "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
        "trustedRoot": root,
        "signingConfig": signing,
    }


def one_line(root: dict[str, Any]) -> str:
    """The form the GitHub CLI takes: one JSON object on one line, ended by a newline."""
    return json.dumps(root, separators=(",", ":"), sort_keys=True) + "\n"
