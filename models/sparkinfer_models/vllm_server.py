"""A vLLM server: how it is started, asked and ended; one at a time or several at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkinfer.errors import EnvironmentProblem

STOP_S = 20.0
NAME = "target"
EAGER = ("--enforce-eager", "-O0", "--gdn-prefill-backend", "triton")
"""Start without torch.compile, CUDA graphs, FlashInfer's compiler and its autotuning: for figures that are no times."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Number of tokens, and how often 0, 1, ... drafts of a step were accepted, where the server says so."""

    tokens: int
    histogram: list[int] | None


class Server:
    """A running server. `url` has no trailing slash."""

    def __init__(self, url: str, model: str = NAME, timeout_s: float = 300.0) -> None:
        self.url, self.model, self._timeout_s = url, model, timeout_s

    def get(self, path: str) -> str:
        """Raises EnvironmentProblem when the server does not answer with 200."""
        return self._read(urllib.request.Request(self.url + path))

    def ready(self) -> bool:
        """Whether it says that it is up."""
        try:
            self.get("/health")
        except EnvironmentProblem:
            return False
        return True

    def complete(self, prompt: list[int], tokens: int, temperature: float, seed: int) -> Answer:
        """One answer of exactly `tokens` tokens. Raises EnvironmentProblem when it is anything else."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": temperature}
        data = json.dumps({**body, "seed": seed, "ignore_eos": True}).encode()
        headers = {"Content-Type": "application/json"}
        answer = json.loads(self._read(urllib.request.Request(self.url + "/v1/completions", data, headers)))
        count = answer["usage"]["completion_tokens"]
        if count != tokens:
            raise EnvironmentProblem(f"the server answered with {count} tokens, {tokens} were asked for")
        speculation = (answer.get("metrics") or {}).get("speculative_decoding") or {}
        return Answer(count, speculation.get("acceptance_histogram"))

    def _read(self, request: urllib.request.Request) -> str:
        # A proxy of the environment is not asked for a server of this host.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self._timeout_s) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:300]
            raise EnvironmentProblem(f"{request.full_url} answered {error.code}: {text}") from error
        except OSError as error:
            raise EnvironmentProblem(f"{request.full_url} does not answer: {error}") from error


def free_port() -> int:
    """A port of this host that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_command(
    python: str,
    model: Path,
    port: int,
    *,
    max_model_len: int,
    served: str = NAME,
    dtype: str = "bfloat16",
    speculative: Mapping[str, object] | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """vLLM's command line. With a drafter every answer tells of its own acceptance."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.absolute())]
    command += ["--served-model-name", served, "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    command += ["--max-model-len", str(max_model_len)]
    if speculative:
        command += ["--speculative-config", json.dumps(dict(speculative))]
        command += ["--per-request-spec-decode-metrics", "summary"]
    return [*command, *extra]


def launch(
    command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None, path: str | None = None
) -> subprocess.Popen[bytes]:
    """Start it in a session of its own, so that it outlives its starter; output goes to `log`.

    Args:
        command: what `server_command` returned.
        log: written anew. Its folder is the working folder: `python -m` looks for modules there first, and this
            project's own folders must not be found.
        variables: for its environment, besides those that keep it from asking the network.
        path: the server's PYTHONPATH, in place of this process's.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **(variables or {})}
    if path is not None:
        environment["PYTHONPATH"] = path
    with log.open("wb") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=log.absolute().parent,
            env=environment,
        )


def causes(log: Path) -> str:
    """Why a server did not come up: the cause of a dead engine stands before the server's own traceback."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([*[line for line in lines if "Error" in line][-8:], *lines[-10:]])


def end_group(leader: int) -> None:
    """End a server that `launch` started, and what it started: gently, then not. It may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline:
            # Raises once the group is empty; a child of this process has to be collected for that.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(leader, os.WNOHANG)
            os.killpg(leader, 0)
            time.sleep(0.1)
        os.killpg(leader, signal.SIGKILL)
