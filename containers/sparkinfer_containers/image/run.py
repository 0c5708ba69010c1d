"""Run an image without a container daemon: unpack it, start it under bubblewrap with a read-only root."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkinfer_containers.image.folders import DIGEST_FILE, replaced
from sparkinfer_containers.image.tools import need
from sparkinfer_containers.oci.layers import unpack
from sparkinfer_containers.verify.image import Source, image_parts

SHARED = "/tmp/shared"
"""Where the `writable` folder of the host appears in the container."""


def unpack_image(source: Source, digest: str, target: Path) -> dict[str, Any]:
    """Unpack an image to `target/root` and write its config to `target/config.json`; returns the config.

    Every blob is checked against its digest and every layer entry before anything is written; the folder appears by
    rename. Reuses a complete earlier unpacking of the same digest. Raises UsageProblem, before anything is fetched, for
    a folder that holds something else than an unpacked image.
    """
    marker = target / DIGEST_FILE
    complete = (target / "config.json").is_file() and (target / "root").is_dir()
    if complete and marker.is_file() and marker.read_bytes() == digest.encode():
        ready: dict[str, Any] = json.loads((target / "config.json").read_text(encoding="utf-8"))
        return ready
    with replaced(target) as made:
        config, layers = image_parts(source, digest)
        unpack([(layer.digest, source.blob_file(layer)) for layer in layers], made / "root")
        (made / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        (made / DIGEST_FILE).write_text(digest, encoding="ascii")
    return config


def command(
    unpacked: Path,
    digest: str,
    *,
    environment: Mapping[str, str] | None = None,
    models: Path | None = None,
    writable: Path | None = None,
    arguments: Sequence[str] = (),
    entrypoint: Sequence[str] | None = None,
) -> list[str]:
    """The bubblewrap command that runs an unpacked image as its config says.

    Root read-only, `/tmp` in memory, non-root user, own process space with the image's init as PID 1, the host's
    network (loopback), and no other file of the host but the `models` folder (read-only, at /models) and the folder
    `writable` (at SHARED), for files that the host wants back.
    `SPARKINFER_IMAGE_DIGEST` names the image to the server.
    """
    config = json.loads((unpacked / "config.json").read_text(encoding="utf-8"))["config"]
    user, _, group = config["User"].partition(":")
    made = [need("bwrap"), "--ro-bind", str(unpacked / "root"), "/", "--dev", "/dev", "--proc", "/proc"]
    made += ["--tmpfs", "/tmp", "--unshare-user", "--uid", user, "--gid", group, "--unshare-pid", "--as-pid-1"]
    made += ["--unshare-ipc", "--unshare-uts", "--hostname", "sparkinfer", "--die-with-parent", "--new-session"]
    made += ["--clearenv", "--chdir", config["WorkingDir"]]
    if models is not None:
        made += ["--ro-bind", str(models.resolve()), "/models"]
    if writable is not None:
        made += ["--bind", str(writable.resolve()), SHARED]
    variables = dict(item.split("=", 1) for item in config["Env"])
    variables |= {"SPARKINFER_IMAGE_DIGEST": digest, **(environment or {})}
    for name, value in variables.items():
        made += ["--setenv", name, value]
    return [*made, "--", *(entrypoint if entrypoint is not None else config["Entrypoint"]), *arguments]


class Container:
    """A running image. `with Container(...)` ends it as a container runtime does: SIGTERM to its init, then SIGKILL."""

    def __init__(self, unpacked: Path, digest: str, log: Path, grace_s: float = 20.0, **options: Any) -> None:
        self._grace_s = grace_s
        status_read, status_write = os.pipe()
        listed = command(unpacked, digest, **options)
        listed[1:1] = ["--json-status-fd", str(status_write)]
        try:
            with log.open("ab") as handle:
                self.process = subprocess.Popen(
                    listed,
                    stdout=handle,
                    stderr=handle,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[status_write],
                    start_new_session=True,  # a signal to our group reaches init through us, in its own time
                )
        finally:
            os.close(status_write)
        # Kept open: bubblewrap writes the exit code there too, and would die of a closed pipe.
        self._status = os.fdopen(status_read)
        line = self._status.readline()
        self.init_pid: int | None = json.loads(line)["child-pid"] if line else None

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def signal(self, number: int) -> None:
        """Send a signal to the container's init (bubblewrap itself passes none on)."""
        if self.process.poll() is None and self.init_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init_pid, number)

    def stop(self) -> int:
        """End the container; returns its exit code."""
        self.signal(signal.SIGTERM)
        try:
            return self.process.wait(self._grace_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.kill()
            return self.process.wait()
        finally:
            self._status.close()
