"""`sparkinfer chat`: a plain terminal chat over the HTTP API."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from sparkinfer.errors import ConfigError, EnvironmentProblem, RequestError
from sparkinfer.settings import require_utf8

PR_SET_PDEATHSIG = 1


def _end_with_us() -> Callable[[], object]:
    """What a new child calls to be told to end when we die, of a closed terminal say."""
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextmanager
def _url_of(target: str) -> Iterator[str]:
    """The server's URL; a folder is served for as long as the chat lasts."""
    if target.startswith(("http://", "https://")):
        yield target.rstrip("/").removesuffix("/v1")
        return
    command = [sys.executable, "-m", "sparkinfer.cli", "serve", target, "--port", "0", "--log-level", "warning"]
    # A group of its own: Ctrl-C stops an answer, not the server.
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, process_group=0, preexec_fn=_end_with_us()
    )
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith("ready on "):
                yield line.removeprefix("ready on ").strip()
                return
        failure = EnvironmentProblem(f"the server for {target} did not start (exit code {server.wait()}); see above")
        failure.exit_code = server.returncode
        raise failure
    finally:
        server.terminate()
        server.wait()


def stream_answer(client: httpx.Client, url: str, body: dict[str, Any]) -> Iterator[str]:
    """Pieces of the answer's text. Raises RequestError with the server's own words."""
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RequestError(f"{response.status_code}: {_message(response.read())}")
        for line in response.iter_lines():
            payload = line.removeprefix("data: ")
            if not payload or payload == "[DONE]":
                continue
            chunk = json.loads(payload)
            if "error" in chunk:
                raise RequestError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                yield choice["delta"].get("content") or ""


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw.decode(errors="replace")[:500]


def chat(target: str, system: str | None, temperature: float, max_tokens: int) -> int:
    """Read lines, print answers, until end of file or /quit. Raises EnvironmentProblem when there is no server."""
    require_utf8(system or "", "--system")
    with _url_of(target) as url, httpx.Client(timeout=httpx.Timeout(600.0, connect=5.0)) as client:
        opening = [{"role": "system", "content": system}] if system else []
        messages = list(opening)
        print(f"chatting with {url}; /new starts over, /quit or Ctrl-D ends")
        while True:
            try:
                line = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return 0
            except UnicodeDecodeError as error:
                raise ConfigError(f"standard input is not UTF-8 text ({error}): write it in UTF-8") from error
            require_utf8(line, "standard input")
            if line == "/quit":
                return 0
            if line == "/new":
                messages = list(opening)
                continue
            if line:
                _turn(client, url, messages, line, {"temperature": temperature, "max_tokens": max_tokens})


def _turn(client: httpx.Client, url: str, messages: list[dict[str, str]], line: str, options: dict[str, Any]) -> None:
    """One question and its answer; a failed one leaves the conversation as it was."""
    messages.append({"role": "user", "content": line})
    answer = ""
    try:
        for text in stream_answer(client, url, {"messages": messages, "stream": True, **options}):
            answer += text
            print(text, end="", flush=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        messages.pop()
        raise EnvironmentProblem(f"no answer from {url}: {error}") from error
    except RequestError as error:
        messages.pop()
        print(f"[{error}]")
        return
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print()
    messages.append({"role": "assistant", "content": answer})
