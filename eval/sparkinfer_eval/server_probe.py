"""What the evaluation asks a server besides generating: its prefix-cache counters and a cache reset."""

from __future__ import annotations

import re

import httpx

from sparkinfer.errors import ConfigError, EnvironmentProblem

# Prompt tokens taken from the prefix cache: vLLM's counter and ours.
HIT_COUNTERS = ("vllm:prefix_cache_hits_total", "sparkinfer_prefix_hits_tokens_total")
RESET_PATH = "/v1/cache/reset"


def require_url(url: str) -> None:
    """Raise ConfigError for what is no address of a server."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url!r} is no URL ({error}): give http://HOST:PORT") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{url!r} is no URL of a server: give http://HOST:PORT")


def _client(url: str, timeout_s: float) -> httpx.Client:
    return httpx.Client(base_url=url.rstrip("/"), timeout=timeout_s, trust_env=False)


def sum_counters(text: str, names: tuple[str, ...]) -> float | None:
    """Sum of the samples with these names in a Prometheus text; None when there is none."""
    values = []
    for line in text.splitlines():
        match = re.match(r"([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)", line)
        if match and match[1] in names:
            values.append(float(match[2]))
    return sum(values) if values else None


def prefix_hits(url: str, timeout_s: float = 10.0) -> float | None:
    """Prompt tokens served by the prefix cache so far; None when the server has no such counter.

    Raises EnvironmentProblem when the server does not answer.
    """
    try:
        with _client(url, timeout_s) as client:
            answer = client.get("/metrics")
    except httpx.HTTPError as error:
        raise EnvironmentProblem(f"{url}/metrics does not answer ({error}): is the server up?") from error
    return sum_counters(answer.text, HIT_COUNTERS) if answer.status_code == 200 else None


def reset_prefix_cache(url: str, timeout_s: float = 10.0) -> bool:
    """Clear the prefix cache where the server has an endpoint for it; says whether it did.

    vLLM has one only in its development mode, which is not the product one measures: there every prompt is sent once
    to a server, so that nothing can be hit, and the hit counter shows it. Raises EnvironmentProblem on an error answer.
    """
    try:
        with _client(url, timeout_s) as client:
            answer = client.post(RESET_PATH)
    except httpx.HTTPError as error:
        raise EnvironmentProblem(f"{url}{RESET_PATH} does not answer ({error}): is the server up?") from error
    if answer.status_code in (404, 405):
        return False
    if answer.status_code != 200:
        raise EnvironmentProblem(f"{url}{RESET_PATH} answered {answer.status_code}: {answer.text[:200]}")
    return True
