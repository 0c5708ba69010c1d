"""Engines as data (`config/engines/*.yaml`): how to start a server, wait for it, stop it and tell which one it is."""

from __future__ import annotations

import os
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError
from sparkinfer_eval.plan.schema import read_yaml, validate

PLACEHOLDERS = (
    "python", "model", "served_name", "port", "device", "dtype", "max_model_len", "seed", "cache", "source",
    "step_trace", "threads", "unpacked",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WarmUp:
    """One wave of requests: `rounds` times `concurrency` requests of this shape (tokens)."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    rounds: int = 1


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine's file, validated. Times are seconds; paths are URL paths below the server's address."""

    name: str
    title: str
    environment: str
    source: dict[str, Any]
    start: dict[str, Any]
    ready_path: str
    ready_timeout_s: float
    ready_interval_s: float
    stop_signal: str
    stop_grace_s: float
    version: dict[str, str]
    warm_up: tuple[WarmUp, ...]
    forbidden_flags: tuple[str, ...] = ()
    forbidden_env: tuple[str, ...] = ()
    raw: dict[str, Any] = field(default_factory=dict, repr=False)


def load_engine(path: Path, schema: Path) -> Engine:
    """Read and check one engine file.

    Raises ConfigError: schema faults, a name unlike the file's, an unknown placeholder, a forbidden flag or variable.
    """
    data = read_yaml(path)
    validate(data, schema, str(path))
    if data["name"] != path.stem:
        raise ConfigError(f"{path}: name is {data['name']!r} but the file is called {path.name}: make them equal")
    engine = Engine(
        name=data["name"],
        title=data["title"],
        environment=data["environment"],
        source=data["source"],
        start=data["start"],
        ready_path=data["ready"]["path"],
        ready_timeout_s=float(data["ready"]["timeout_s"]),
        ready_interval_s=float(data["ready"].get("interval_s", 0.5)),
        stop_signal=data["stop"]["signal"],
        stop_grace_s=float(data["stop"]["grace_s"]),
        version=data["version"],
        warm_up=tuple(WarmUp(**wave) for wave in data["warm_up"]),
        forbidden_flags=tuple(data.get("forbidden_flags", ())),
        forbidden_env=tuple(data.get("forbidden_env", ())),
        raw=data,
    )
    for device in ("cpu", "cuda"):
        command(engine, device, dict.fromkeys(PLACEHOLDERS, "0"), environ={}, source=str(path))
    return engine


def _fill(text: str, values: dict[str, str], source: str) -> str:
    """Replace {placeholders}. Raises ConfigError for an unknown one."""
    for _, name, _, _ in string.Formatter().parse(text):
        if name is not None and name not in values:
            raise ConfigError(f"{source}: unknown placeholder {{{name}}} in {text!r}: known are {', '.join(values)}")
    return text.format_map(values)


def _refuse_handicaps(engine: Engine, argv: list[str], env: dict[str, str], source: str) -> None:
    """Raise ConfigError when the command or environment holds what the engine's file forbids."""
    for flag in engine.forbidden_flags:
        if any(item == flag or item.startswith(flag + "=") for item in argv):
            raise ConfigError(f"{source}: {flag} is forbidden for {engine.name}, since it would handicap it: remove it")
    for entry in engine.forbidden_env:
        name, separator, value = entry.partition("=")
        if name in env and (not separator or env[name] == value):
            raise ConfigError(
                f"{source}: environment variable {name}={env[name]} is forbidden for {engine.name}, "
                f"since it would handicap it: unset {name}"
            )


def command(
    engine: Engine,
    device: str,
    values: dict[str, str],
    environ: dict[str, str] | None = None,
    source: str | None = None,
) -> tuple[list[str], dict[str, str]]:
    """The server's argument list and whole environment for one device; `environ` is the caller's (default os.environ).

    Raises ConfigError for an unknown placeholder or a handicap, one inherited from the caller's environment included.
    """
    source = source or f"engine {engine.name}"
    addition = engine.start.get("devices", {}).get(device, {})
    argv = [_fill(item, values, source) for item in [*engine.start["argv"], *addition.get("argv", [])]]
    own = {**engine.start.get("env", {}), **addition.get("env", {})}
    env = dict(os.environ if environ is None else environ)
    env.update({name: _fill(text, values, source) for name, text in own.items()})
    _refuse_handicaps(engine, argv, env, source)
    return argv, env
