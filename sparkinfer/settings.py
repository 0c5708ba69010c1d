"""Every setting of the engine and the server, in one table.

A setting is given as a flag of `sparkinfer serve` (`--max-queue 64`) or as an environment variable
(`SPARKINFER_MAX_QUEUE=64`); the flag wins. `--help`, `/v1/info` and docs/settings.md are made from this table:
`python -m sparkinfer.settings` prints the page. Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sparkinfer.errors import ConfigError
from sparkinfer.scheduling.types import CHUNK_ALIGN, KV_BLOCK_TOKENS
from sparkinfer.settings_check import PREFIX, check, env_name

ENVIRONMENT_ONLY = {
    "SPARKINFER_IMAGE_DIGEST": "digest of the container image that runs, set by its launcher; shown as `engine_digest`",
    "SPARKINFER_NVFP4_ORDER": "`mma` or `wgmma`: how NVFP4 weights are packed on a GPU, for every kernel; unset, "
    "experts on Hopper for `wgmma` and all others for `mma`",
}
"""Variables with our prefix that are no settings of a server: what runs, and what is fixed when the kernels load."""


def _setting(
    default: Any, text: str, *, where: str, low: float | None = None, auto: str = "", choices: str = "",
    secret: bool = False,
) -> Any:  # fmt: skip
    """A field of `Settings`: its default, what it does and why the default, and where it takes effect."""
    metadata = {"text": text, "where": where, "low": low, "auto": auto, "choices": tuple(choices.split())}
    metadata["secret"] = secret
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Resolved settings. `None` means that the engine chooses (the page says how)."""

    mixed_chunk: int | None = _setting(
        None,
        "Prompt tokens that one forward pass carries beside the decoding requests. 0 turns mixing off: a prompt then "
        "has prefill passes of its own. Larger gives earlier first tokens and longer steps.",
        where="scheduler",
        low=0,
        auto="1024; 4096 on a MoE model, whose experts want more rows to be worth reading",
    )
    mixed_max_prompts: int = _setting(
        8,
        "Prompts that one mixed step carries, oldest first. Eight of 128 tokens fill the budget of a dense model; more "
        "would lengthen steps that decoding requests wait for, and a GPU's captured passes have room for this many.",
        where="scheduler",
        low=1,
    )
    backlog_chunk: int | None = _setting(
        None,
        "Prompt tokens that one forward pass carries beside the decoding requests while more than half as many wait "
        "(counted over the next `MIXED_MAX_PROMPTS` prompts). Under a load that keeps prompts waiting, passes of "
        "several prompts are cheaper per token and shorten the queue. 0: always `MIXED_CHUNK`.",
        where="scheduler, memory plan",
        low=0,
        auto="on a CPU 4096, at most `PREFILL_CHUNK`, where `MIXED_CHUNK` is below half of it; otherwise 0: on a GPU, "
        "prompts of 1024 tokens already fill a pass, and each size of a pass is captured at start",
    )
    own_pass_tokens: int = _setting(
        2048,
        "A prompt with more tokens left than this is not mixed: it has prefill passes of its own, which are faster "
        "for it.",
        where="scheduler",
        low=1,
    )
    prefill_chunk: int = _setting(
        8192,
        "Prompt tokens of a prefill pass that carries no decoding requests. Larger passes read the weights less often; "
        "they also take more memory for activations, and requests that decode wait for a whole one.",
        where="scheduler, memory plan",
        low=CHUNK_ALIGN,
    )
    pack_prefill: bool = _setting(
        True,
        "Several prompts share one prefill pass, since a short one alone reads all weights for few tokens. Off: one "
        "prompt per prefill pass; a mixed step still carries `MIXED_MAX_PROMPTS`.",
        where="scheduler",
    )
    pack_moe: bool = _setting(
        True,
        "Several prompts share one prefill pass on a MoE model too, whose experts get more rows each that way. Off: "
        "one prompt per prefill pass there; a mixed step still carries `MIXED_MAX_PROMPTS`.",
        where="scheduler",
    )
    pack_max_prompts: int = _setting(
        64,
        "Prompts that one prefill pass carries. 64 of 128 tokens fill `PREFILL_CHUNK`; a GPU's captured passes have "
        "room for this many, `MAX_NUM_SEQS` where that is less.",
        where="scheduler, GPU passes",
        low=1,
    )
    prefill_passes_per_decode: int = _setting(
        1,
        "Prefill passes in a row while requests decode. With 1 the gap between two tokens of an answer is at most one "
        "pass of `PREFILL_CHUNK`; more give earlier first tokens and longer gaps.",
        where="scheduler",
        low=1,
    )
    watermark: float = _setting(
        0.01,
        "Share of the KV blocks that admission leaves free while other requests run, for the next tokens of these. "
        "Without it a request would be let in only to make a running one give way a few steps later; a hundredth is "
        "some blocks for each request of a full engine, and hardly missed.",
        where="scheduler",
        low=0,
    )
    spec_load_limit: int = _setting(
        8,
        "With a drafter, loads of at most this many requests verify drafts and take no mixed steps: beyond, a pass has "
        "rows enough without drafts. No effect without a drafter, and the server of this version loads none.",
        where="scheduler",
        low=0,
    )
    draft_tokens: int = _setting(
        7,
        "With a drafter, drafts that a step verifies for a request: what a block of 8 of the drafter yields. No effect "
        "without one.",
        where="scheduler",
        low=1,
    )
    max_num_seqs: int = _setting(
        32,
        "Requests that run at once. Each holds a recurrent-state slot, allocated at start, so the default is the "
        "largest load the evaluation drives.",
        where="scheduler, memory plan",
        low=1,
    )
    max_model_len: int | None = _setting(
        None,
        "Longest sequence, prompt and answer together, in tokens.",
        where="scheduler, memory plan",
        low=KV_BLOCK_TOKENS,
        auto="the model's `max_position_embeddings`, or what the KV cache holds where that is less",
    )
    kv_cache_mb: int | None = _setting(
        None,
        "Size of the KV cache in MiB.",
        where="memory plan",
        low=1,
        auto="CPU: up to a quarter of the free memory; GPU: nine tenths of the free memory, less weights and "
        "workspace; in both, no more than `MAX_NUM_SEQS` requests of `MAX_MODEL_LEN` and as much again for the "
        "prefix cache",
    )
    prefix_cache: bool = _setting(
        True,
        "Keep KV blocks and recurrent-state checkpoints of past prompts for reuse. On, since a hit saves the prompt's "
        "computation, and what the cache holds gives way to running requests.",
        where="scheduler",
    )
    prefix_cache_salt: str = _setting(
        "",
        "Text that precedes the `cache_salt` of every request in the hashes of cached prefixes, so that they cannot "
        "be computed by who does not know it. `/v1/info` only says whether it is set. Empty: no salt but the "
        "requests' own.",
        where="server",
        secret=True,
    )
    snapshot_pool_mb: int | None = _setting(
        None,
        "Host memory for recurrent-state checkpoints of the prefix cache, in MiB, allocated once at start.",
        where="memory plan, prefix cache",
        low=1,
        auto="4096, but at most a quarter of the host's free memory and 16 snapshots for each of `MAX_NUM_SEQS`",
    )
    prefix_cache_host_kv_mb: int = _setting(
        0,
        "Host memory for KV blocks that leave the device, in MiB. 0: evicted blocks are dropped, since this memory is "
        "taken for good at start and pays only where prompts come back after the device has run out of blocks.",
        where="memory plan, prefix cache",
        low=0,
    )
    checkpoint_interval: int = _setting(
        4096,
        "Distance in tokens of the extra checkpoints inside a long prompt; 0: none. Each costs one snapshot, of a "
        "large model as much memory as the KV of some thousand tokens: closer ones would crowd out other prompts. A "
        "pass saves at most 256, half of what is left for one prompt.",
        where="prefix cache",
        low=0,
    )
    decode_checkpoint_interval: int = _setting(
        256,
        "Distance in tokens of the checkpoints taken while generating, for the next turn of a chat; 0: none. Each "
        "replaces the one before: a copy of the state every 256 tokens, and a next turn computes at most as many anew.",
        where="prefix cache",
        low=0,
    )
    branch_min_tokens: int = _setting(
        64,
        "Least distance in tokens of a checkpoint inside a prompt to its neighbours: a hit saves at least this much, "
        "one chunk of the prefill kernels.",
        where="prefix cache",
        low=0,
    )
    attention_cost_tokens: int = _setting(
        32768,
        "Context in tokens at which a token costs twice as much to compute as the first one, for the choice of what to "
        "evict. Smaller keeps the ends of long prompts rather than short ones.",
        where="prefix cache",
        low=1,
    )
    aging_steps: int = _setting(
        1000,
        "Steps of waiting that are worth one level of `priority`: within a burst the urgent go first, and after some "
        "thousand steps the others have caught up. 0: strict priority, which can starve low ones.",
        where="scheduler",
        low=0,
    )
    prefill_dtype: str = _setting(
        "auto",
        "Arithmetic of passes of more than 64 tokens on a GPU. `auto` multiplies in bfloat16, quantised weights "
        "expanded; `fp8` multiplies FP8 weights as they are stored and keeps a second, FP8 copy of NVFP4 ones, "
        "activations scaled by row or block: faster, and less exact.",
        where="GPU kernels",
        choices="auto fp8",
    )
    kv_cache_dtype: str = _setting(
        "auto",
        "Keys and values on a GPU: `auto` is the model's dtype, `fp8` halves their memory and traffic.",
        where="GPU kernels, memory plan",
        choices="auto fp8",
    )
    head_dtype: str = _setting(
        "auto",
        "The output matrix on a GPU: `auto` as it is stored, `fp8` keeps a 16-bit one in FP8 with a scale a row, "
        "which halves what each step reads for its logits.",
        where="GPU kernels",
        choices="auto fp8",
    )
    state_dtype: str = _setting(
        "float32",
        "Recurrent states on a GPU. `bfloat16` halves their memory and traffic; the model's authors keep float32.",
        where="GPU kernels, memory plan",
        choices="float32 bfloat16",
    )
    deterministic: bool = _setting(
        False,
        "Run every prompt in passes of its own, and on a GPU every decode step at one padded size, so that an answer "
        "does not depend on the requests beside it. Slower. Turns mixed steps and packing off.",
        where="scheduler, GPU kernels",
    )
    steps_in_flight: int | None = _setting(
        None,
        "Steps that may be under way at once. With 2 the host plans and launches the next step while one runs, and a "
        "request that ends unforeseen (a stop token) has one row computed in vain. On a CPU a launch computes the "
        "step at once, so 2 overlaps nothing there: it is for tests.",
        where="scheduler, engine process",
        low=1,
        auto="2 on a GPU, which runs beside the host; 1 on a CPU, where the step itself occupies the cores and the "
        "host's share of it is below 3 %",
    )
    threads: int | None = _setting(
        None,
        "Threads of torch's CPU kernels in the engine process.",
        where="engine process",
        low=1,
        auto="the CPUs this process may use, less one for the server process",
    )
    max_queue: int = _setting(
        1024,
        "Requests that may wait beyond the ones that can run (`MAX_NUM_SEQS`); the next one is answered with 429.",
        where="server",
        low=0,
    )
    request_timeout_s: float = _setting(
        600.0,
        "Seconds from a request's arrival to its last token; past it the request is cancelled and answered with 504 "
        "(an error event, when its stream has begun). 0: no limit.",
        where="server",
        low=0,
    )
    shutdown_grace_s: float = _setting(
        30.0,
        "Seconds that running requests get to finish after SIGTERM or SIGINT; a second signal ends them at once.",
        where="server",
        low=0,
    )
    served_model_name: str | None = _setting(
        None,
        "Name of the model in the API. Requests may also use the MODEL argument as it was typed.",
        where="server",
        auto="the model folder's name",
    )
    step_trace: str | None = _setting(
        None,
        "File that gets one JSON line for each step: what the pass held and how long it took (docs/simulator.md). A "
        "file that exists is continued.",
        where="engine process",
        auto="none is written",
    )
    log_level: str = _setting(
        "info",
        "How much the server and the engine write to standard error.",
        where="server, engine process",
        choices="debug info warning error",
    )

    def as_dict(self) -> dict[str, Any]:
        """Environment variable name to value, in table order; of a secret only "set" or the empty text."""
        values = ((f, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {env_name(f.name): "set" if f.metadata["secret"] and value else value for f, value in values}


def flag_name(field_name: str) -> str:
    """`max_queue` -> `--max-queue`."""
    return "--" + field_name.replace("_", "-")


def _base_type(field: dataclasses.Field[Any]) -> str:
    """`int`, `float`, `bool` or `str` (annotations are text here)."""
    return str(field.type).split(" |")[0]


def printable(text: str) -> str:
    """The text with escapes for bytes of the command line or the environment that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def require_utf8(text: str, source: str) -> None:
    """Raise ConfigError, naming `source`, for text from the command line or the environment that is not UTF-8."""
    if (shown := printable(text)) != text:
        raise ConfigError(f"{source}: '{shown}' is not UTF-8 text: write it in UTF-8")


def parse(field: dataclasses.Field[Any], text: str, source: str) -> Any:
    """The value of a setting written as text. Raises ConfigError naming `source` (a flag or a variable)."""
    require_utf8(text, source)
    text, kind, meta = text.strip(), _base_type(field), field.metadata
    if field.default is None and text.lower() in ("", "auto"):
        return None
    if kind == "bool":
        words = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
        if text.lower() not in words:
            raise ConfigError(f"{source}: {text!r} is neither on nor off; use 1 or 0")
        return words[text.lower()]
    if kind == "str":
        if meta["choices"] and text not in meta["choices"]:
            raise ConfigError(f"{source}: {text!r} is not one of {', '.join(meta['choices'])}")
        return text
    try:
        value = int(text) if kind == "int" else float(text)
    except ValueError:
        raise ConfigError(f"{source}: {text!r} is not a {'whole number' if kind == 'int' else 'number'}") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ConfigError(f"{source}: {text!r} is not a finite number")
    if meta["low"] is not None and value < meta["low"]:
        raise ConfigError(f"{source}: {value} is below the least value, {meta['low']}")
    return value


def unknown_variables(environ: Iterable[str]) -> list[str]:
    """One message for each SPARKINFER_* variable that is no setting, with the closest known name."""
    known = [env_name(f.name) for f in dataclasses.fields(Settings)] + list(ENVIRONMENT_ONLY)
    messages = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else "`sparkinfer serve --help` lists the settings"
            messages.append(f"unknown setting {printable(name)} in the environment: {hint}")
    return messages


def resolve(environ: Mapping[str, str], flags: Mapping[str, str | None] | None = None) -> Settings:
    """Settings from flags (field name to text; None: not given), else the environment, else the defaults.

    Raises ConfigError for an unknown SPARKINFER_* variable, a value that does not parse, or a contradiction.
    """
    flags = flags or {}
    unknown = unknown_variables(environ)
    if unknown:
        raise ConfigError("\n".join(unknown))
    for name in ENVIRONMENT_ONLY:
        require_utf8(environ.get(name, ""), name)
    values = {}
    for field in dataclasses.fields(Settings):
        given = flags.get(field.name)
        if given is not None:
            values[field.name] = parse(field, given, flag_name(field.name))
        elif (text := environ.get(env_name(field.name))) is not None:
            values[field.name] = parse(field, text, env_name(field.name))
    settings = Settings(**values)
    check(settings)
    return settings


def default_text(field: dataclasses.Field[Any]) -> str:
    """The default as documentation shows it."""
    if field.default is None:
        return f"auto ({field.metadata['auto']})"
    if isinstance(field.default, bool):
        return "1" if field.default else "0"
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def page() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Generated by `python -m sparkinfer.settings > docs/settings.md`; a test keeps it current.",
        "",
        "Each setting is an environment variable and a flag of `sparkinfer serve`; the flag wins. A variable that",
        f"starts with `{PREFIX}` and is not listed here stops the start, with the closest known name. `/v1/info` shows",
        "the values in force.",
        "",
        "| variable and flag | default | takes effect in | what it does |",
        "|---|---|---|---|",
    ]
    for field in dataclasses.fields(Settings):
        meta = field.metadata
        choices = f" One of {', '.join(meta['choices'])}." if meta["choices"] else ""
        names = f"`{env_name(field.name)}`<br>`{flag_name(field.name)}`"
        lines.append(f"| {names} | {default_text(field)} | {meta['where']} | {meta['text']}{choices} |")
    lines += ["", "Variables that are not settings:", ""]
    lines += [f"- `{name}`: {text}." for name, text in ENVIRONMENT_ONLY.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
