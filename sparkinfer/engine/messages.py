"""Messages between the server process and the engine process (msgpack by msgspec over a local socket)."""

from __future__ import annotations

import msgspec

from sparkinfer.scheduling.types import EngineStats as EngineStats


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """Wire form of `sparkinfer.scheduling.types.SamplingParams`."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    prompt_logprobs: int | None = None


class AddRequest(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """Start a request. `prompt` holds token ids; the server has checked it against the context length."""

    id: str
    prompt: list[int]
    sampling: Sampling
    priority: int = 0
    cache_salt: str = ""
    use_cache: bool = True
    prompt_hashes: bytes = b""
    """Hashes of the prompt's full KV blocks: as long as the prompt, they are computed in the server's process."""


class AbortRequests(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Forget requests; unknown ids are ignored (they may just have finished)."""

    ids: list[str]


class ResetCache(msgspec.Struct, tag="reset", array_like=True, frozen=True):
    """Empty the prefix cache; requests that run enter nothing of what they have computed."""

    token: str


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """End the engine process once running requests are done or `grace_s` seconds have passed."""

    grace_s: float


ToEngine = AddRequest | AbortRequests | ResetCache | Shutdown


PromptToken = tuple[float, int, list[tuple[int, float]]]
"""A prompt token's logprob and rank, and the (token id, logprob) pairs of the best alternatives."""


class TokenEvent(msgspec.Struct, array_like=True, frozen=True):
    """One new token (or the end without one: `token` None).

    `top` holds (token id, logprob) pairs. `num_cached` is the number of prompt tokens taken from the prefix cache.
    `prompt_logprobs`, with the first token where asked for, has every prompt token but the first.
    """

    id: str
    token: int | None
    finish_reason: str | None = None
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None
    num_cached: int = 0
    error: str | None = None
    prompt_logprobs: list[PromptToken] | None = None


class StepOutput(msgspec.Struct, tag="step", array_like=True, frozen=True):
    """All token events of one engine step, with the state of the engine after it."""

    events: list[TokenEvent]
    stats: EngineStats


class EngineReady(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The engine accepts requests. `info` is shown by /v1/info under `engine` (limits, memory plan, device)."""

    info: dict[str, object]
    stats: EngineStats
    """Before the first step: what is free."""


class EngineFailed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The engine could not start or died; `exit_code` as in `sparkinfer.errors`."""

    message: str
    exit_code: int


class CacheReset(msgspec.Struct, tag="cache_reset", array_like=True, frozen=True):
    """Answer to ResetCache with the same `token`."""

    token: str
    dropped_blocks: int
    dropped_snapshots: int


FromEngine = StepOutput | EngineReady | EngineFailed | CacheReset
