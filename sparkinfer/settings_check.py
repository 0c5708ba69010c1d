"""Names of settings, and contradictions between them: refused before a model is loaded, in the settings' own words."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sparkinfer.errors import ConfigError
from sparkinfer.scheduling.types import CHUNK_ALIGN, KV_BLOCK_TOKENS

if TYPE_CHECKING:
    from sparkinfer.settings import Settings

PREFIX = "SPARKINFER_"
MAX_THREADS = 1024


def env_name(field_name: str) -> str:
    """`max_queue` -> `SPARKINFER_MAX_QUEUE`."""
    return PREFIX + field_name.upper()


def default_threads() -> int:
    """All CPUs this process may use but one, which the server process needs.

    A team that has to share a CPU waits at every operation's barrier for a thread that is not running.
    """
    return max(1, len(os.sched_getaffinity(0)) - 1)


def check(settings: Settings) -> None:
    """Raise ConfigError for values that contradict each other; needs no model."""
    chunk = settings.mixed_chunk
    if chunk is not None and 0 < chunk < CHUNK_ALIGN:
        raise ConfigError(
            f"SPARKINFER_MIXED_CHUNK={chunk} is below {CHUNK_ALIGN} tokens, at whose multiples prompts are cut: "
            f"use 0 (off) or at least {CHUNK_ALIGN}"
        )
    if chunk is not None and chunk > settings.prefill_chunk:
        raise ConfigError(
            f"SPARKINFER_MIXED_CHUNK={chunk} is above SPARKINFER_PREFILL_CHUNK={settings.prefill_chunk}, the prompt "
            f"tokens of the largest pass: raise that one or use at most {settings.prefill_chunk}"
        )
    backlog = settings.backlog_chunk
    if backlog:
        if settings.deterministic:
            raise ConfigError(
                "SPARKINFER_DETERMINISTIC=1 runs every prompt in passes of its own, "
                f"SPARKINFER_BACKLOG_CHUNK={backlog} asks for prompts beside the decoding requests: leave one of the "
                "two out"
            )
        if chunk == 0:
            raise ConfigError(
                f"SPARKINFER_BACKLOG_CHUNK={backlog} needs mixed steps, which SPARKINFER_MIXED_CHUNK=0 turns off: set "
                "one of the two back"
            )
        if backlog > settings.prefill_chunk:
            raise ConfigError(
                f"SPARKINFER_BACKLOG_CHUNK={backlog} is above SPARKINFER_PREFILL_CHUNK={settings.prefill_chunk}, the "
                f"prompt tokens of the largest pass: raise that one or use at most {settings.prefill_chunk}"
            )
        if chunk is not None and backlog <= chunk:
            raise ConfigError(
                f"SPARKINFER_BACKLOG_CHUNK={backlog} is not above SPARKINFER_MIXED_CHUNK={chunk}, which a mixed step "
                f"may carry anyway: use 0 (off) or more than {chunk}"
            )
    if settings.threads is not None and settings.threads > MAX_THREADS:
        raise ConfigError(
            f"SPARKINFER_THREADS={settings.threads} is beyond {MAX_THREADS}, more than any host's CPUs: leave it "
            f"out for {default_threads()} here"
        )
    if settings.prefix_cache_host_kv_mb and not settings.prefix_cache:
        raise ConfigError(
            f"SPARKINFER_PREFIX_CACHE_HOST_KV_MB={settings.prefix_cache_host_kv_mb} needs the prefix cache, "
            "which SPARKINFER_PREFIX_CACHE=0 turns off: set one of the two back"
        )
    if settings.snapshot_pool_mb is not None and not settings.prefix_cache:
        raise ConfigError(
            f"SPARKINFER_SNAPSHOT_POOL_MB={settings.snapshot_pool_mb} is for the prefix cache, which "
            "SPARKINFER_PREFIX_CACHE=0 turns off: leave one of the two out"
        )
    _check_policies(settings)


def _check_policies(settings: Settings) -> None:
    """What the scheduler would refuse, in the words of the settings, before any model is loaded."""
    if settings.deterministic and settings.mixed_chunk:
        raise ConfigError(
            f"SPARKINFER_DETERMINISTIC=1 turns mixed steps off, SPARKINFER_MIXED_CHUNK={settings.mixed_chunk} asks for "
            "them: leave one of the two out"
        )
    default = type(settings)().mixed_max_prompts
    if settings.mixed_max_prompts > max(default, settings.max_num_seqs):
        raise ConfigError(
            f"SPARKINFER_MIXED_MAX_PROMPTS={settings.mixed_max_prompts} is beyond the {settings.max_num_seqs} requests "
            f"of SPARKINFER_MAX_NUM_SEQS: lower it to at most {settings.max_num_seqs}, or leave it out"
        )
    for name in ("checkpoint_interval", "decode_checkpoint_interval"):
        if (value := getattr(settings, name)) % KV_BLOCK_TOKENS:
            nearest = max(1, round(value / KV_BLOCK_TOKENS)) * KV_BLOCK_TOKENS
            raise ConfigError(
                f"{env_name(name)}={value} is no multiple of a KV block, {KV_BLOCK_TOKENS} tokens, where states can be "
                f"saved: use {nearest}, or 0 for none"
            )
    if settings.steps_in_flight is not None and settings.steps_in_flight > 2:
        raise ConfigError(
            f"SPARKINFER_STEPS_IN_FLIGHT={settings.steps_in_flight}: at most 2 steps can be under way, one that runs "
            "and one that waits for it; use 1 or 2"
        )
    if settings.watermark >= 0.5:
        raise ConfigError(
            f"SPARKINFER_WATERMARK={settings.watermark:g} would leave half of the KV cache or more unused: use less "
            "than 0.5"
        )
