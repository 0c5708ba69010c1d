"""The transparency log: Rekor's v1 API over an append-only file.

`log.jsonl` holds one entry a line; `checkpoint` holds the newest signed checkpoint. At start the tree is recomputed
and must extend the signed checkpoint: a file with an entry removed, reordered or changed is refused. The time beside
an entry (`integratedTime`) is not part of the tree, as in Rekor: verifiers take the RFC 3161 timestamp. Entries are
DSSE envelopes whose signature was checked before they were taken in.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rfc8785
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sparkinfer.errors import ConfigError, RequestError
from sparkinfer_containers.private import merkle
from sparkinfer_containers.private.state import StateFolder, write_private


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the log: `body` is the canonical JSON that the leaf hash is taken over; time in unix seconds."""

    body: bytes
    integrated_time: int


def pae(payload_type: str, payload: bytes) -> bytes:
    """Pre-authentication encoding of DSSE v1."""
    return b"DSSEv1 %d %s %d %s" % (len(payload_type.encode()), payload_type.encode(), len(payload), payload)


def dsse_entry(proposed: dict[str, Any]) -> bytes:
    """Check a proposed `dsse` 0.0.1 entry and return its canonical body. Raises RequestError when it is not one."""
    if proposed.get("kind") != "dsse" or proposed.get("apiVersion") != "0.0.1":
        raise RequestError("this log takes entries of kind dsse 0.0.1 only", "kind")
    try:
        content = proposed["spec"]["proposedContent"]
        text: str = content["envelope"]
        envelope = json.loads(text)
        payload = base64.b64decode(envelope["payload"], validate=True)
        (signature,) = envelope["signatures"]
        (verifier,) = content["verifiers"]
        certificate = x509.load_pem_x509_certificate(base64.b64decode(verifier, validate=True))
        key = certificate.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise RequestError("the verifier's key is not an elliptic-curve key", "verifiers")
        key.verify(
            base64.b64decode(signature["sig"], validate=True),
            pae(envelope["payloadType"], payload),
            ec.ECDSA(hashes.SHA256()),
        )
    except InvalidSignature:
        raise RequestError("the envelope's signature does not verify", "envelope") from None
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"malformed dsse entry: {error}", "proposedContent") from error
    return rfc8785.dumps(
        {
            "apiVersion": "0.0.1",
            "kind": "dsse",
            "spec": {
                "envelopeHash": {"algorithm": "sha256", "value": hashlib.sha256(text.encode()).hexdigest()},
                "payloadHash": {"algorithm": "sha256", "value": hashlib.sha256(payload).hexdigest()},
                "signatures": [{"signature": signature["sig"], "verifier": verifier}],
            },
        }
    )


class TransparencyLog:
    """An append-only log with signed checkpoints. `name` is the log's host name, part of the checkpoint's origin."""

    def __init__(self, state: StateFolder, name: str) -> None:
        self._file = state.path / "log.jsonl"
        self._checkpoint_file = state.path / "checkpoint"
        self._key = state.key("log", ec.SECP256R1())
        self.public_der = self._key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self.log_id = hashlib.sha256(self.public_der).digest()
        self.name = name
        self.tree_id = str(int.from_bytes(self.log_id[:7], "big"))
        self._mutex = threading.Lock()
        self._entries = self._load()
        self._leaves = [merkle.leaf_hash(entry.body) for entry in self._entries]
        self._refuse_rewrite()
        if self._partial:  # a write cut off by a crash: never acknowledged, so dropping it rewrites nothing
            os.truncate(self._file, self._file.stat().st_size - self._partial)
        self._write_checkpoint()

    _partial = 0
    """Bytes of an unfinished last line: dropped once the lines before it are found to be the signed ones."""

    def _load(self) -> list[Entry]:
        if not self._file.exists():
            return []
        raw = self._file.read_bytes()
        complete, _, partial = raw.rpartition(b"\n")
        self._partial = len(partial)
        entries = []
        for number, line in enumerate(complete.splitlines(), 1):
            try:
                data = json.loads(line)
                entries.append(Entry(base64.b64decode(data["body"]), int(data["integratedTime"])))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{self._file}:{number}: not a log entry ({error}); the log was altered") from error
        return entries

    def _refuse_rewrite(self) -> None:
        if not self._checkpoint_file.exists():
            if self._entries:
                raise ConfigError(f"{self._file} has entries but {self._checkpoint_file} is missing: restore it")
            return
        note = self._checkpoint_file.read_text(encoding="utf-8")
        head, _, signatures = note.partition("\n\n")
        try:
            signed = base64.b64decode(signatures.split()[-1])[4:]
            self._key.public_key().verify(signed, (head + "\n").encode(), ec.ECDSA(hashes.SHA256()))
            _origin, size_text, root_text = head.splitlines()[:3]
            size, expected = int(size_text), base64.b64decode(root_text)
        except (InvalidSignature, ValueError, IndexError):
            raise ConfigError(
                f"{self._checkpoint_file}: its signature is not this log's, or it is damaged; the log was altered"
            ) from None
        if size > len(self._leaves) or merkle.root(self._leaves[:size]) != expected:
            raise ConfigError(
                f"{self._file} does not extend the checkpoint over {size} entries signed earlier: the log was "
                "rewritten. Restore it from a backup, or start a new instance with another state folder."
            )

    def checkpoint(self) -> str:
        """The signed note over the present tree: origin, size, root, blank line, signature line."""
        root = base64.b64encode(merkle.root(self._leaves)).decode()
        head = f"{self.name} - {self.tree_id}\n{len(self._leaves)}\n{root}\n"
        signature = self._key.sign(head.encode(), ec.ECDSA(hashes.SHA256()))
        return f"{head}\n— {self.name} {base64.b64encode(self.log_id[:4] + signature).decode()}\n"

    def _write_checkpoint(self) -> None:
        write_private(self._checkpoint_file, self.checkpoint().encode())

    def append(self, proposed: dict[str, Any]) -> dict[str, Any]:
        """Take in a proposed entry and return the v1 answer `{uuid: entry}`. Raises RequestError for a bad one."""
        body = dsse_entry(proposed)
        with self._mutex:
            entry = Entry(body, int(time.time()))
            line = json.dumps({"body": base64.b64encode(body).decode(), "integratedTime": entry.integrated_time})
            self._append_line(self._file, line)
            self._entries.append(entry)
            self._leaves.append(merkle.leaf_hash(body))
            self._write_checkpoint()
            return self._answer(len(self._entries) - 1)

    @staticmethod
    def _append_line(path: Path, line: str) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(handle, "ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def entry(self, index: int) -> dict[str, Any]:
        """The answer for an entry already in the log. Raises RequestError when there is none at `index`."""
        with self._mutex:
            if not 0 <= index < len(self._entries):
                raise RequestError(f"no entry {index}: the log has {len(self._entries)}", "logIndex")
            return self._answer(index)

    def _answer(self, index: int) -> dict[str, Any]:
        entry = self._entries[index]
        promise: dict[str, str | int] = {
            "body": base64.b64encode(entry.body).decode(),
            "integratedTime": entry.integrated_time,
            "logID": self.log_id.hex(),
            "logIndex": index,
        }
        signed_timestamp = self._key.sign(rfc8785.dumps(promise), ec.ECDSA(hashes.SHA256()))
        proof = {
            "checkpoint": self.checkpoint(),
            "hashes": [sibling.hex() for sibling in merkle.inclusion(index, self._leaves)],
            "logIndex": index,
            "rootHash": merkle.root(self._leaves).hex(),
            "treeSize": len(self._leaves),
        }
        verification = {
            "inclusionProof": proof,
            "signedEntryTimestamp": base64.b64encode(signed_timestamp).decode(),
        }
        return {self._leaves[index].hex(): {**promise, "verification": verification}}

    def head(self) -> dict[str, Any]:
        """What `GET /api/v1/log` answers."""
        with self._mutex:
            return {
                "rootHash": merkle.root(self._leaves).hex(),
                "treeSize": len(self._leaves),
                "treeID": self.tree_id,
                "signedTreeHead": self.checkpoint(),
            }

    def proof(self, first: int) -> dict[str, Any]:
        """Consistency proof from the tree of `first` leaves to the present one."""
        with self._mutex:
            try:
                path = merkle.consistency(first, self._leaves)
            except IndexError as error:
                raise RequestError(str(error), "firstSize") from error
            return {"rootHash": merkle.root(self._leaves).hex(), "hashes": [item.hex() for item in path]}
