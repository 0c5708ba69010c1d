"""Sign in-toto statements: each becomes a sigstore bundle (v0.3) of its own, checked before it is handed out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import requests
from sigstore.dsse import Statement
from sigstore.errors import Error as SigstoreError
from sigstore.models import Bundle
from sigstore.sign import SigningContext
from sigstore.verify import Verifier, policy

from sparkinfer_containers.errors import SigningProblem
from sparkinfer_containers.trust import Credentials

BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"


def encode(statement: Mapping[str, Any]) -> bytes:
    """The bytes that are signed: JSON with sorted keys and no spaces, so equal statements sign equal bytes."""
    return json.dumps(statement, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sign(statements: Sequence[Mapping[str, Any]], held: Credentials) -> list[str]:
    """Bundles (JSON text) for `statements`, in order, under one short-lived certificate.

    All or nothing: raises SigningProblem when a service fails, a bundle lacks its RFC 3161 timestamp, or a bundle
    does not verify against the trust root it was made under.
    """
    context = SigningContext.from_trust_config(held.config)
    verifier = Verifier(trusted_root=held.config.trusted_root)
    expected = policy.Identity(identity=held.token.identity, issuer=held.token.federated_issuer)
    made = []
    try:
        with context.signer(held.token) as signer:
            for statement in statements:
                bundle = signer.sign_dsse(Statement(encode(statement)))
                _require_timestamp(bundle)
                verifier.verify_dsse(bundle, expected)
                made.append(bundle.to_json())
    except (SigstoreError, requests.RequestException) as error:
        raise SigningProblem(f"signing failed, nothing was kept: {error}") from error
    return made


def _require_timestamp(bundle: Bundle) -> None:
    stamps = bundle.verification_material.timestamp_verification_data
    if stamps is None or not stamps.rfc3161_timestamps:
        raise SigningProblem(
            "the timestamp authority gave no timestamp; a bundle without one is not kept. Try again when it answers."
        )
