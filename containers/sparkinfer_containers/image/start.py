"""Start an image that was made ready in a folder: unpacked for bubblewrap, or in the store of podman or docker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkinfer_containers.errors import DigestProblem
from sparkinfer_containers.image import daemon
from sparkinfer_containers.image.run import Container


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
    marker = folder / "digest"
    if not marker.is_file():
        raise DigestProblem(f"{folder} holds no image: `unpack` or `pull` one first")
    digest = marker.read_text(encoding="ascii")
    if (folder / daemon.MARKER).is_file():
        listed = daemon.command(
            folder, digest, environment=environment, models=models, writable=writable, arguments=arguments
        )
        return daemon.Daemon(listed, log)
    return Container(
        folder, digest, log, environment=environment, models=models, writable=writable, arguments=arguments
    )
