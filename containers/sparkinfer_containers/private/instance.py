"""The running private instance: one loopback HTTP server over the state folder, and the names it goes by."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sparkinfer.errors import EnvironmentProblem, RequestError
from sparkinfer_containers.private import certs, trust, tsa
from sparkinfer_containers.private.log import TransparencyLog
from sparkinfer_containers.private.state import StateFolder, default_folder, write_private
from sparkinfer_containers.private.tokens import TokenIssuer

BODY_LIMIT = 32 << 20
"""Largest request body taken, bytes."""


class PrivateInstance:
    """Keys, log and names of one instance. `host` ends in `.invalid`, so no public name can be mistaken for it."""

    def __init__(self, folder: Path | None = None) -> None:
        self.state = StateFolder(folder or default_folder())
        self.authority = certs.certificate_authority(self.state)
        self.timestamps = certs.timestamp_authority(self.state)
        self.ct_key = self.state.key("ct", ec.SECP256R1())
        fingerprint = certs.spki(self.state.key("ca-root", ec.SECP384R1()).public_key())
        self.host = f"{hashlib.sha256(fingerprint).hexdigest()[:12]}.private.sparkinfer.invalid"
        self.issuer = TokenIssuer(self.state, f"https://oidc.{self.host}")
        self.log = TransparencyLog(self.state, f"log.{self.host}")
        self.request_token = self.state.secret("request-token")
        self.root = trust.trusted_root(
            self.host, self.authority, self.timestamps, self.log.public_der, certs.spki(self.ct_key.public_key())
        )
        write_private(self.trusted_root_file, trust.one_line(self.root).encode())

    @property
    def trusted_root_file(self) -> Path:
        """The file to hand to verifiers."""
        return self.state.path / "trusted_root.json"

    @property
    def identity(self) -> str:
        """The certificate identity that this instance's own signer gets."""
        return f"https://{self.host}/release"

    def sign_certificate(self, token: str, csr_pem: bytes) -> list[str]:
        """PEM chain (leaf, intermediate, root) for a valid token and a CSR that proves possession of its key."""
        claims = self.issuer.verify(token)
        try:
            request = x509.load_pem_x509_csr(csr_pem)
        except ValueError as error:
            raise RequestError(
                f"malformed certificate signing request: {error}", "certificateSigningRequest"
            ) from error
        key = request.public_key()
        if not request.is_signature_valid or not isinstance(key, ec.EllipticCurvePublicKey):
            raise RequestError(
                "the signing request does not prove possession of an EC key", "certificateSigningRequest"
            )
        texts = {name: value for name, value in claims.items() if isinstance(value, str)}
        leaf = certs.signing_leaf(self.authority, self.ct_key, key, texts)
        chain = (leaf, self.authority.certificate, self.authority.root)
        return [item.public_bytes(serialization.Encoding.PEM).decode() for item in chain]


def _bearer(request: Request) -> str:
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not value:
        raise RequestError("no bearer token in the Authorization header", "Authorization")
    return value


async def _body(request: Request) -> bytes:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > BODY_LIMIT:
            raise RequestError(f"request body over {BODY_LIMIT} bytes")
    return bytes(data)


async def _json_body(request: Request) -> dict[str, Any]:
    try:
        parsed = json.loads(await _body(request))
    except ValueError as error:
        raise RequestError(f"body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise RequestError("body is not a JSON object")
    return parsed


def application(instance: PrivateInstance) -> Starlette:
    """The HTTP routes: Fulcio v2 signingCert, Rekor v1 log, RFC 3161 timestamp, and the token endpoint."""

    async def certificate(request: Request) -> Response:
        token = _bearer(request)
        asked = (await _json_body(request)).get("certificateSigningRequest", "")
        try:
            csr = base64.b64decode(asked, validate=True)
        except (ValueError, TypeError) as error:
            raise RequestError(f"certificateSigningRequest is not base64: {error}") from error
        chain = await run_in_threadpool(instance.sign_certificate, token, csr)
        return JSONResponse({"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}}, 201)

    async def add_entry(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(instance.log.append, await _json_body(request)), 201)

    def number(request: Request, name: str) -> int:
        text = request.query_params.get(name, "")
        if not text.isdigit():
            raise RequestError(f"query parameter {name} must be a number, not {text!r}", name)
        return int(text)

    async def get_entry(request: Request) -> Response:
        return JSONResponse(instance.log.entry(number(request, "logIndex")))

    async def head(_request: Request) -> Response:
        return JSONResponse(instance.log.head())

    async def proof(request: Request) -> Response:
        return JSONResponse(instance.log.proof(number(request, "firstSize")))

    async def timestamp(request: Request) -> Response:
        made = tsa.answer(instance.timestamps, await _body(request))
        return Response(made, 201, media_type="application/timestamp-reply")

    async def token(request: Request) -> Response:
        if not secrets.compare_digest(_bearer(request), instance.request_token):
            return JSONResponse({"code": 401, "message": "wrong request token"}, 401)
        claims = {k: v for k, v in request.query_params.items() if k in certs.CLAIM_EXTENSIONS}
        audience = request.query_params.get("audience", "sigstore")
        return JSONResponse({"value": instance.issuer.mint(instance.identity, claims, audience=audience)})

    async def refused(_request: Request, error: Exception) -> Response:
        status = 401 if getattr(error, "param", None) == "Authorization" else 400
        return JSONResponse({"code": status, "message": str(error)}, status)

    routes = [
        Route("/api/v2/signingCert", certificate, methods=["POST"]),
        Route("/api/v1/log/entries", add_entry, methods=["POST"]),
        Route("/api/v1/log/entries", get_entry, methods=["GET"]),
        Route("/api/v1/log/proof", proof, methods=["GET"]),
        Route("/api/v1/log", head, methods=["GET"]),
        Route("/api/v1/timestamp", timestamp, methods=["POST"]),
        Route("/oidc/token", token, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={RequestError: refused})


@dataclass(frozen=True, slots=True)
class Running:
    """A served instance: its address and the client configuration that points to it."""

    instance: PrivateInstance
    base_url: str

    @property
    def client_config(self) -> str:
        """ClientTrustConfig as JSON text."""
        return json.dumps(trust.client_config(self.instance.root, self.base_url))


@contextmanager
def running(folder: Path | None = None, port: int = 0) -> Iterator[Running]:
    """Serve the instance in `folder` on a loopback port (0: any free one) until the block ends."""
    state = StateFolder(folder or default_folder())
    with state.lock():
        instance = PrivateInstance(state.path)
        listener = socket.socket()
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            listener.close()
            raise EnvironmentProblem(f"port {port} on 127.0.0.1 is not free ({error}): choose another one") from error
        config = uvicorn.Config(application(instance), log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="private-sigstore", daemon=True)
        thread.start()
        try:
            deadline = time.monotonic() + 20
            while not server.started:
                if not thread.is_alive() or time.monotonic() > deadline:
                    raise EnvironmentProblem("the private sigstore instance did not start within 20 s")
                time.sleep(0.005)
            yield Running(instance, f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            server.should_exit = True
            thread.join(timeout=20)
            listener.close()
