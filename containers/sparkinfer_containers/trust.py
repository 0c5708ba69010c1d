"""Two trust configurations, one code path: the public sigstore instance and the private one.

`public` takes the identity token that the CI provider offers (ambient OIDC) and fails hard without one.
`private` runs the instance of `sparkinfer_containers.private` on loopback and asks it for a token in the same form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
from sigstore.errors import Error as SigstoreError
from sigstore.models import ClientTrustConfig, TrustedRoot
from sigstore.oidc import IdentityError, IdentityToken, detect_credential
from sigstore.verify import Verifier

from sparkinfer_containers.errors import SigningProblem, UsageProblem
from sparkinfer_containers.private.instance import running
from sparkinfer_containers.private.state import default_folder

Mode = Literal["public", "private"]
PUBLIC_ISSUER = "https://token.actions.githubusercontent.com"
PUBLIC_IDENTITY_PREFIX = "https://github.com/gittensor-ai-lab/sparkinfer/.github/workflows/release.yml@refs/tags/v"
PRIVATE_SUFFIX = ".private.sparkinfer.invalid"
ROOT_SIZE_LIMIT = 4 << 20

LEVELS = {"private": "integrity only", "public": "identity and integrity"}
"""What a success under each configuration proves."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a signer needs: where to sign, as whom, and under which configuration."""

    mode: Mode
    config: ClientTrustConfig
    token: IdentityToken


@contextmanager
def credentials(
    mode: Mode,
    *,
    state: Path | None = None,
    claims: Mapping[str, str] | None = None,
    public_config: Callable[[], ClientTrustConfig] = ClientTrustConfig.production,
) -> Iterator[Credentials]:
    """Credentials for signing. Raises SigningProblem when there is no token or a service cannot be reached."""
    if mode == "public":
        token = _ambient_token()
        yield Credentials(mode, _public_config(public_config), token)
        return
    with running(state) as served:
        answer = httpx.get(
            f"{served.base_url}/oidc/token",
            params={**(claims or {}), "audience": "sigstore"},
            headers={"Authorization": f"bearer {served.instance.request_token}"},
            trust_env=False,
        )
        answer.raise_for_status()
        token = IdentityToken(answer.json()["value"])
        yield Credentials(mode, ClientTrustConfig.from_json(served.client_config), token)


def _ambient_token() -> IdentityToken:
    try:
        raw = detect_credential()
    except IdentityError as error:
        raise SigningProblem(f"the CI provider gave no identity token: {error}") from error
    if not raw:
        raise SigningProblem(
            "public signing needs an identity token from the CI provider and none is offered here. Run it in a "
            "workflow with `permissions: id-token: write`, or sign with --trust private (integrity only)."
        )
    return IdentityToken(raw)


def _public_config(load: Callable[[], ClientTrustConfig]) -> ClientTrustConfig:
    try:
        return load()
    except (SigstoreError, OSError) as error:
        raise SigningProblem(f"the public sigstore configuration could not be fetched: {error}") from error


@dataclass(frozen=True, slots=True)
class TrustRoot:
    """A root to verify against, and the identity and issuer expected when the caller names none."""

    mode: Mode
    root: TrustedRoot
    identity: str
    issuer: str
    prefix: bool
    """Whether `identity` is a prefix (public: any release tag of the workflow) or the whole identity."""


def trust_root(path: Path) -> TrustRoot:
    """The root in a trusted_root.json. Raises UsageProblem when it is none."""
    return _from_file(path)


def default_roots(public_first: bool) -> Iterator[TrustRoot]:
    """The roots to try when the caller names none: this host's private one, if it has one, and the public one."""
    private = default_folder() / "trusted_root.json"
    if public_first:
        yield _public(_public_root())
    if private.exists():
        yield _from_file(private)
    if not public_first:
        yield _public(_public_root())


def _public_root() -> TrustedRoot:
    """The public root: refreshed, or without a network as cached or shipped with sigstore-python."""
    try:
        return ClientTrustConfig.production().trusted_root
    except (SigstoreError, OSError):
        return ClientTrustConfig.production(offline=True).trusted_root


def _public(root: TrustedRoot) -> TrustRoot:
    return TrustRoot("public", root, PUBLIC_IDENTITY_PREFIX, PUBLIC_ISSUER, prefix=True)


def _from_file(path: Path) -> TrustRoot:
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, and is read twice below
            raise UsageProblem(f"{path} is not a regular file: name a trusted_root.json")
        if path.stat().st_size > ROOT_SIZE_LIMIT:
            raise UsageProblem(f"{path} is over {ROOT_SIZE_LIMIT} bytes: not a trusted_root.json")
        data = json.loads(path.read_bytes())
        root = TrustedRoot.from_file(str(path))
        Verifier(trusted_root=root)  # needs keys of every kind
        hosts = [log["baseUrl"].removeprefix("https://log.") for log in data["tlogs"]]
        if len({kind for kind, _ in _keys(root)}) < 4:
            raise UsageProblem(f"{path} lacks a certificate authority, a timestamp authority or the key of a log")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SigstoreError) as error:
        said = "; ".join(line.strip() for line in str(error).splitlines()[:3])  # a validator's go on for pages
        raise UsageProblem(f"{path} is not a sigstore trusted_root.json: {said}") from error
    if len(hosts) == 1 and hosts[0].endswith(PRIVATE_SUFFIX):
        return TrustRoot("private", root, f"https://{hosts[0]}/release", f"https://oidc.{hosts[0]}", prefix=False)
    if _keys(root) <= _keys(ClientTrustConfig.production(offline=True).trusted_root):
        return _public(root)
    return TrustRoot("private", root, "", "", prefix=False)


def _keys(root: TrustedRoot) -> set[tuple[str, str]]:
    """Everything that a root trusts: (kind, base64 DER) of authorities' certificates and logs' keys.

    The public instance's are those shipped with sigstore-python (or refreshed by it): no network.
    """
    data = json.loads(root._inner.to_json())
    found = {
        (kind, certificate["rawBytes"])
        for kind in ("certificateAuthorities", "timestampAuthorities")
        for authority in data.get(kind, [])
        for certificate in authority["certChain"]["certificates"]
    }
    return found | {(kind, log["publicKey"]["rawBytes"]) for kind in ("tlogs", "ctlogs") for log in data.get(kind, [])}
