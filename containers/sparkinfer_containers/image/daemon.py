"""Run the image with podman or docker: what a GPU host does, where the NVIDIA container toolkit shows the devices.

The image is loaded from its layout and started by its identifier, which is the digest of its config (docker's
containerd store: of its manifest) and so names exactly the bytes that were built. ATTEST_RUNTIME chooses the program
with options of its own (`ATTEST_RUNTIME="podman --runtime runc"`), ATTEST_RUN_OPTIONS adds options to `run`.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkinfer.identity import short
from sparkinfer_containers.errors import DigestProblem
from sparkinfer_containers.image.run import SHARED
from sparkinfer_containers.image.runtimes import runtime
from sparkinfer_containers.image.tools import need, run
from sparkinfer_containers.oci.layout import Layout
from sparkinfer_containers.oci.model import REF_NAME

MARKER = "container.json"
"""Beside `digest` in an engine's folder: the image is in a container store, and this is how to start it."""


def load(layout: Layout, digest: str, device: str, folder: Path) -> dict[str, object]:
    """Put an image into the runtime's store; `folder` gets what `command` needs.

    Raises DigestProblem when the store names other bytes.
    """
    program = runtime(device)
    image = layout.image(digest)
    manifest = json.loads(layout.manifest(image.digest))
    name = f"localhost/sparkinfer-measured:{short(digest, 12)}"
    store = "containers-storage" if program[0].endswith("podman") else "docker-daemon"
    run([need("skopeo"), "copy", "--quiet", f"oci:{layout.path}:{image.annotations[REF_NAME]}", f"{store}:{name}"])
    shown = run([*program, "image", "inspect", "--format", "{{.Id}}", name]).strip()
    identifier = shown if shown.startswith("sha256:") else f"sha256:{shown}"
    if identifier not in (manifest["config"]["digest"], digest):
        said = manifest["config"]["digest"]
        raise DigestProblem(f"{program[0]} holds {identifier} for {digest}, whose config is {said}")
    made: dict[str, object] = {"runtime": program, "identifier": identifier, "device": device}
    _write(folder, digest, made)
    return made


class Daemon:
    """A running container, with the calls of `image.run.Container`."""

    def __init__(self, listed: Sequence[str], log: Path, grace_s: float = 40.0) -> None:
        self._grace_s = grace_s
        with log.open("ab") as handle:
            self.process = subprocess.Popen(
                listed, stdout=handle, stderr=handle, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def signal(self, number: int) -> None:
        """Send a signal to the runtime's client, which passes it to the container's init."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def stop(self) -> int:
        """End the container; returns its exit code."""
        self.signal(signal.SIGTERM)
        try:
            return self.process.wait(self._grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def pull(reference: str, digest: str, device: str, folder: Path) -> None:
    """Let the runtime fetch `host/name@digest` itself; `folder` gets what `command` needs."""
    program = runtime(device)
    plain = ["--tls-verify=false"] if program[0].endswith("podman") and reference.startswith("127.0.0.1:") else []
    run([*program, "pull", "--quiet", *plain, reference])
    _write(folder, digest, {"runtime": program, "identifier": reference, "device": device})


def _write(folder: Path, digest: str, made: Mapping[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text(json.dumps(made), encoding="utf-8")
    (folder / "digest").write_text(digest, encoding="ascii")


def command(
    folder: Path,
    digest: str,
    *,
    environment: Mapping[str, str],
    models: Path | None,
    writable: Path | None,
    arguments: Sequence[str],
) -> list[str]:
    """The command that runs a loaded image: read-only root, `/tmp` in memory, the host's network, its GPUs.

    A container of the same name that an interrupted run has left is removed first.
    """
    held = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    program, name = held["runtime"], f"sparkinfer-{short(digest, 12)}"
    subprocess.run([*program, "rm", "--force", name], capture_output=True, check=False, timeout=60)
    made = [*program, "run", "--rm", "--name", name, "--network", "host", "--read-only", "--tmpfs", "/tmp"]
    if held["device"] == "cuda":
        made += ["--device", "nvidia.com/gpu=all"] if program[0].endswith("podman") else ["--gpus", "all"]
    if models is not None:
        made += ["--volume", f"{models.resolve()}:/models:ro"]
    if writable is not None:
        made += ["--volume", f"{writable.resolve()}:{SHARED}", "--user", f"{os.getuid()}:{os.getgid()}"]
    for key, value in {"SPARKINFER_IMAGE_DIGEST": digest, **environment}.items():
        made += ["--env", f"{key}={value}"]
    made += shlex.split(os.environ.get("ATTEST_RUN_OPTIONS", ""))
    return [*made, str(held["identifier"]), *arguments]
