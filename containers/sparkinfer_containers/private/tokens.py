"""Identity tokens (OIDC, ES256): minting for the instance's own signer, and the check the CA makes."""

from __future__ import annotations

import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

from sparkinfer.errors import RequestError
from sparkinfer_containers.private.state import StateFolder

AUDIENCE = "sigstore"
LIFETIME_S = 300


class TokenIssuer:
    """Mints and checks the tokens of one instance; `issuer` is its fixed name, independent of any port."""

    def __init__(self, state: StateFolder, issuer: str) -> None:
        self._key = state.key("oidc", ec.SECP256R1())
        self.issuer = issuer

    def mint(self, subject: str, claims: dict[str, str], lifetime_s: int = LIFETIME_S, audience: str = AUDIENCE) -> str:
        """A signed token for `subject` with the extra `claims`."""
        now = int(time.time())
        body = {**claims, "iss": self.issuer, "sub": subject, "aud": audience, "iat": now, "exp": now + lifetime_s}
        return jwt.encode(body, self._key, algorithm="ES256")

    def verify(self, token: str) -> dict[str, Any]:
        """The claims of a valid token. Raises RequestError for a wrong signature, issuer, audience or time."""
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                self._key.public_key(),
                algorithms=["ES256"],
                audience=AUDIENCE,
                issuer=self.issuer,
                options={"require": ["aud", "sub", "iat", "exp", "iss"]},
            )
        except jwt.InvalidTokenError as error:
            raise RequestError(f"identity token refused: {error}", "Authorization") from error
        return claims
