"""Waiting for a server, asking what it is, and warming it up with requests of real shape."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from sparkinfer.errors import ConfigError, EnvironmentProblem
from sparkinfer_eval.plan.engines import Engine, WarmUp


def vocabulary_size(model: Path) -> int:
    """`vocab_size` of a model folder's config.json. Raises ConfigError when the folder is not a model."""
    path = model / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{model} is not a model folder (no config.json): give a folder in transformers layout"
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}): fetch or generate the model again") from error
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise ConfigError(f"{path} names no vocab_size: is this a language model?")
    return size


def wait_ready(url: str, engine: Engine, still_running: Callable[[], None]) -> float:
    """Poll the readiness URL until it answers 200; returns the seconds waited.

    `still_running` raises when the server or the workflow is gone. Raises EnvironmentProblem after the timeout.
    """
    begun = time.monotonic()
    with httpx.Client(base_url=url, timeout=5.0, trust_env=False) as client:
        while True:
            still_running()
            try:
                if client.get(engine.ready_path).status_code == 200:
                    return time.monotonic() - begun
            except httpx.TransportError:
                pass  # not listening yet: the loop has its own timeout
            if time.monotonic() - begun > engine.ready_timeout_s:
                raise EnvironmentProblem(
                    f"{engine.name} did not answer {engine.ready_path} within {engine.ready_timeout_s:.0f} s: "
                    "raise ready.timeout_s in its file under config/engines/ if the machine is slow"
                )
            time.sleep(engine.ready_interval_s)


def ask_version(url: str, engine: Engine) -> tuple[str, str | None, dict[str, Any]]:
    """(version, digest or None, whole answer) of a running server. Raises EnvironmentProblem when it does not say."""
    path = engine.version["path"]
    try:
        answer = httpx.get(url + path, timeout=30.0, trust_env=False)
        answer.raise_for_status()
        info = answer.json()
        version = str(info[engine.version["field"]])
        digest = str(info[engine.version["digest_field"]]) if "digest_field" in engine.version else None
    except (httpx.HTTPError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise EnvironmentProblem(
            f"{engine.name} did not tell its version at {path} ({type(error).__name__}: {error}): "
            f"check `version` in config/engines/{engine.name}.yaml"
        ) from error
    return version, digest, info


def warm_up(
    url: str,
    served_name: str,
    vocabulary: int,
    waves: Iterable[WarmUp],
    max_model_len: int,
    still_running: Callable[[], None],
    timeout_s: float = 600.0,
) -> int:
    """Send the warm-up requests, wave after wave; returns how many. Prompts are random token ids with a fixed seed.

    A wave that does not fit into the context is shortened to it. Raises EnvironmentProblem when a request fails.
    """
    draw = random.Random("warm-up")
    sent = 0
    limits = httpx.Limits(max_connections=64)
    with httpx.Client(base_url=url, timeout=timeout_s, trust_env=False, limits=limits) as client:

        def one(body: dict[str, Any]) -> None:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            answer = client.post(path, json=body)
            if answer.status_code != 200:
                raise EnvironmentProblem(
                    f"a warm-up request failed with HTTP {answer.status_code}: {answer.text[:500]}"
                )
            json.loads(answer.text)

        try:
            for wave in waves:
                size = min(wave.prompt_tokens, max_model_len - wave.output_tokens - 1)
                for _ in range(wave.rounds):
                    still_running()
                    bodies: list[dict[str, Any]] = []
                    for _ in range(wave.concurrency):
                        prompt = [draw.randrange(min(256, vocabulary // 2), vocabulary) for _ in range(max(1, size))]
                        bodies.append({"prompt": prompt, "max_tokens": wave.output_tokens})
                    for body in bodies:
                        body |= {"model": served_name, "ignore_eos": True, "temperature": 0}
                    with ThreadPoolExecutor(len(bodies)) as pool:
                        list(pool.map(one, bodies))
                    sent += len(bodies)
            chat = {
                "messages": [{"role": "user", "content": "warm-up"}],
                "max_completion_tokens": 8,
                "ignore_eos": True,
            }
            one(chat | {"model": served_name, "temperature": 0})
        except httpx.HTTPError as error:
            still_running()
            raise EnvironmentProblem(f"a warm-up request failed ({type(error).__name__}: {error})") from error
    return sent + 1
