"""Start an image that was made ready in a folder: unpacked for bubblewrap, or in the store of podman or docker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkinfer_containers.errors import DigestProblem
from sparkinfer_containers.image import daemon
from sparkinfer_containers.image.folders import DIGEST_FILE
from sparkinfer_containers.image.run import Container
from sparkinfer_containers.statements import bare_sha256


def require_image(folder: Path) -> str:
    """The digest of the image that was made ready in `folder`. Raises DigestProblem when it holds none."""
    try:
        digest = (folder / DIGEST_FILE).read_text(encoding="ascii").strip()
        bare_sha256(digest)
        if (folder / daemon.MARKER).is_file():
            held = json.loads((folder / daemon.MARKER).read_text(encoding="utf-8"))
            if not all(held[name] for name in ("runtime", "identifier", "device")):
                raise ValueError("what its runtime holds is not told")
        else:
            settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))["config"]
            wanted = all(settings[name] for name in ("Entrypoint", "User", "WorkingDir"))
            if not (folder / "root").is_dir() or not wanted or not isinstance(settings["Env"], list):
                raise ValueError("its root or its settings are missing")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DigestProblem(f"{folder} holds no image ({error}): `unpack` or `pull` one first") from error
    return digest


def start(
    folder: Path,
    log: Path,
    *,
    environment: Mapping[str, str],
    models: Path | None = None,
    writable: Path | None = None,
    arguments: Sequence[str] = (),
) -> Container | daemon.Daemon:
    """The running container, a context manager that ends it. Raises DigestProblem when the folder holds no image."""
    digest = require_image(folder)
    if (folder / daemon.MARKER).is_file():
        listed = daemon.command(
            folder, digest, environment=environment, models=models, writable=writable, arguments=arguments
        )
        return daemon.Daemon(listed, log)
    return Container(
        folder, digest, log, environment=environment, models=models, writable=writable, arguments=arguments
    )
