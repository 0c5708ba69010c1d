"""Where the private instance keeps its keys and its log: outside every repository, readable by its owner only."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sparkinfer.errors import ConfigError, EnvironmentProblem

STATE_SETTING = "ATTEST_STATE"
NOTICE = """\
Keys and log of a private sigstore instance of sparkinfer: test and air-gap equipment.
Signatures made with it prove integrity, not identity. Keep this folder to its owner:
others need trusted_root.json only.
"""


def default_folder() -> Path:
    """`$ATTEST_STATE`, else `sparkinfer/attest` under the XDG state directory."""
    named = os.environ.get(STATE_SETTING)
    if named:
        return Path(named)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "sparkinfer" / "attest"


def write_private(path: Path, data: bytes) -> None:
    """Write `data` to `path` with mode 0600 through a temporary name, flushed to disk before the rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


class StateFolder:
    """The folder of one instance. Created with mode 0700; refuses a folder inside a git work tree or open to others."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()  # a link into a work tree is found out
        for parent in (self.path, *self.path.parents):
            if (parent / ".git").exists():
                raise ConfigError(
                    f"{self.path} lies in the git work tree {parent}: signing keys stay outside repositories. "
                    f"Set {STATE_SETTING} to a folder elsewhere."
                )
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be the state folder ({error.strerror}): set {STATE_SETTING} to another one"
            ) from error
        self._refuse_shared(self.path)
        notice = self.path / "README"
        if not notice.exists():
            write_private(notice, NOTICE.encode())

    @staticmethod
    def _refuse_shared(path: Path) -> None:
        found = path.stat()
        if found.st_mode & 0o077 or found.st_uid != os.getuid():
            raise ConfigError(
                f"{path} is readable by others or owned by another user (mode {found.st_mode & 0o777:o}): "
                f"run `chmod -R go= {path}` as its owner, or set {STATE_SETTING} to another folder."
            )

    def key(self, name: str, curve: ec.EllipticCurve) -> ec.EllipticCurvePrivateKey:
        """The private key `name`, made on first use. Raises ConfigError when its file is open to others."""
        path = self.path / f"{name}.key"
        if not path.exists():
            made = ec.generate_private_key(curve)
            pem = made.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            write_private(path, pem)
        self._refuse_shared(path)
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"{path} is not a private key ({error}): restore it, or start a new instance") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{path} is not an elliptic-curve key: move it away to have a new one made")
        return key

    def secret(self, name: str) -> str:
        """A random text secret, made on first use and kept with mode 0600."""
        path = self.path / name
        if not path.exists():
            write_private(path, secrets.token_urlsafe(32).encode())
        self._refuse_shared(path)
        return path.read_text(encoding="ascii").strip()

    @contextmanager
    def lock(self, wait_s: float = 30.0) -> Iterator[None]:
        """Hold the folder for one writer: the log is append-only by one process at a time."""
        path = self.path / "lock"
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + wait_s
        try:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise EnvironmentProblem(
                            f"another process holds the private instance in {self.path} for over {wait_s:.0f} s: "
                            f"wait for it to end, or set {STATE_SETTING} to another folder"
                        ) from None
                    time.sleep(0.05)
            yield
        finally:
            os.close(handle)
