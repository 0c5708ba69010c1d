"""The end of a release on one machine: attested image pushed, fetched back, verified, run, and asked a question.

The registry is Debian's docker-registry on loopback. Every step is timed; the record holds the figures.
"""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from sparkinfer.errors import EnvironmentProblem
from sparkinfer.output import require_folder
from sparkinfer_containers import inputs, loopback
from sparkinfer_containers.errors import DigestProblem, UsageProblem
from sparkinfer_containers.image.daemon import Daemon, pull
from sparkinfer_containers.image.folders import working
from sparkinfer_containers.image.run import Container, command, unpack_image
from sparkinfer_containers.image.runtimes import uses_daemon
from sparkinfer_containers.image.start import start
from sparkinfer_containers.image.tools import need, run
from sparkinfer_containers.oci.layout import Layout
from sparkinfer_containers.oci.registry import Reference, Registry
from sparkinfer_containers.private.state import default_folder
from sparkinfer_containers.trust import trust_root
from sparkinfer_containers.verify.bundle import BundleVerifier, ExpectedSigner
from sparkinfer_containers.verify.image import verify_image
from sparkinfer_containers.verify.outcome import Outcome

READY_S = 300
QUESTION = "Name a colour."


@dataclass
class Timings:
    """Seconds by step, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a block and print it."""
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 3)
        print(f"{name}: {self.seconds[name]:.1f} s", flush=True)


def push(layout: Layout, reference: Reference) -> str:
    """Push the layout's image and its attestations; returns the digest."""
    image = layout.image()
    with Registry(reference) as registry:
        registry.push_image(layout, image, reference.tag)
        for item in layout.referrers(image.digest):
            registry.push_referrer(layout, item)
    return image.digest


def verify(reference: Reference, digest: str, root: Path) -> Outcome:
    """Verify an image in a registry as `sparkinfer-verify` does. Raises the problem that was found."""
    trust = trust_root(root)
    outcome = Outcome(f"{reference.host}/{reference.name}@{digest}")
    verifier = BundleVerifier(trust, ExpectedSigner(trust, None, None))
    with Registry(reference, anonymous=True) as registry:
        verify_image(registry, digest, trust, verifier, outcome)
    return outcome


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(container: Container | Daemon, port: int, log: Path) -> None:
    """Return when the server answers /health. Raises EnvironmentProblem with the end of its log when it does not."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and container.process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise EnvironmentProblem(f"the container's server did not get ready:\n{log.read_text(errors='replace')[-2000:]}")


def ask(unpacked: Path, model: Path, log: Path, timings: Timings) -> dict[str, Any]:
    """Run the unpacked image on a model folder and ask for a chat completion; returns the server's /v1/info."""
    digest, port = (unpacked / "digest").read_text(encoding="ascii"), free_port()
    model = model.resolve()  # the folder may be a link, which leads nowhere in the container
    environment = {
        "SPARKINFER_MODEL": f"/models/{model.name}",
        "SPARKINFER_HOST": "127.0.0.1",
        "SPARKINFER_PORT": str(port),
    }
    base = f"http://127.0.0.1:{port}/v1"
    with start(unpacked, log, environment=environment, models=model.parent) as container:
        with timings.step("start the server"):
            wait_until_ready(container, port, log)
        info: dict[str, Any] = httpx.get(f"{base}/info", trust_env=False).json()
        if info["engine_digest"] != digest:
            raise EnvironmentProblem(f"the server says it is {info['engine_digest']}, not {digest}")
        body = {"model": info["model"], "messages": [{"role": "user", "content": QUESTION}], "max_completion_tokens": 8}
        with timings.step("answer a chat request"):
            answer = httpx.post(f"{base}/chat/completions", json=body, timeout=120, trust_env=False)
        if answer.status_code != 200 or not answer.json()["usage"]["completion_tokens"]:
            raise EnvironmentProblem(f"the container's server answered {answer.status_code}: {answer.text[:500]}")
    return info


def examine(unpacked: Path, timings: Timings) -> None:
    """Run `sparkinfer doctor` in the unpacked image: do its packages import? Raises EnvironmentProblem."""
    digest = (unpacked / "digest").read_text(encoding="ascii")
    with timings.step("sparkinfer doctor in the image"):
        print(run(command(unpacked, digest, entrypoint=["/usr/local/bin/sparkinfer", "doctor"])), end="")


def ship(
    image: Path,
    model: Path | None,
    work: Path,
    trusted_root: Path | None = None,
    evaluated: str | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Push, verify, pull, run and ask. Returns the record; raises the first problem.

    `image` is a folder that `build` made and `attest` signed; `work` is made anew (only an earlier call's is replaced)
    and keeps the registry's storage.
    `evaluated` names the run whose evaluation has to be among the attestations. Without a model the image, whose device
    this host may lack, is only examined.
    """
    # Before the work: what is asked for only at its end.
    record, layout, timings = inputs.image_record(image, "reference", "name"), Layout(image / "layout"), Timings()
    layout.image()
    tag = Reference.parse(record["reference"]).tag
    if not tag or not isinstance(record.get("unpacked_bytes"), int):
        raise UsageProblem(
            f"{image / 'image.json'} lacks a tag or unpacked_bytes: a folder that `build` made is expected"
        )
    root = trusted_root or default_folder() / "trusted_root.json"
    trust_root(root)
    if not uses_daemon(device):
        need("bwrap")
    require_folder(work.parent, "--work: the folder")
    working(work)
    with loopback.registry(work / "registry") as host:
        reference = Reference.parse(f"{host}/{record['name']}:{tag}")
        with timings.step("push"):
            digest = push(layout, reference)
        with timings.step("verify"):
            outcome = verify(reference, digest, root)
        print(outcome.to_text(), flush=True)
        if evaluated is not None and evaluated not in outcome.evaluations:
            found = outcome.evaluations or "none"
            raise DigestProblem(f"no evaluation of run {evaluated} is attached to {digest}: {found}")
        with timings.step("pull and unpack"), Registry(reference, anonymous=True) as registry:
            if uses_daemon(device):
                pull(f"{reference.host}/{reference.name}@{digest}", digest, device, work / "unpacked")
            else:
                unpack_image(registry, digest, work / "unpacked")
    if model is None:
        examine(work / "unpacked", timings)
        info: dict[str, Any] = {"model_digest": None}
    else:
        info = ask(work / "unpacked", model, work / "server.log", timings)
    shutil.rmtree(work / "unpacked")
    return {
        "schema": "sparkinfer/shipped/v1",
        "digest": digest,
        "reference": record["reference"],
        "level": outcome.level,
        "proved": outcome.proved,
        "evaluations": outcome.evaluations,
        "not_proved": outcome.not_proved,
        "model_digest": info["model_digest"],
        "unpacked_bytes": record["unpacked_bytes"],
        "seconds": timings.seconds,
    }
