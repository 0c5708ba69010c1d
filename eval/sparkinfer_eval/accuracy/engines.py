"""What can be scored, and how it is named on the command line."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sparkinfer.errors import CheckpointError, ConfigError
from sparkinfer.identity import model_digest
from sparkinfer.models.hub import resolve_model
from sparkinfer_eval.server_probe import require_url

from .held_out import Task
from .scores import Scores, read_scores

SETTINGS = ("prefill_dtype", "kv_cache_dtype", "state_dtype", "head_dtype", "prefill_chunk", "kv_cache_mb")
"""Settings of the engine in this process that change what it computes, or where one device holds several engines."""
OPTIONS = {
    "sparkinfer": ("dtype", "device", "load_format", "form", *SETTINGS),
    "transformers": ("dtype", "device", "form"),
    "vllm": ("dtype", "form"),
    "release": ("tag", "dtype", "form"),
}
SIXTEEN_BIT = "16bit"
"""The `form` that a quantised checkpoint's weights stand for, for engines that do not read its format."""
SPEC_HELP = (
    "http://HOST:PORT of an OpenAI-compatible server; MODEL or sparkinfer:MODEL[,dtype=T][,device=D][,load_format=F]: "
    "this engine in this process (also ," + "=S ,".join(SETTINGS) + "=S: settings of docs/settings.md); "
    "transformers:MODEL[,dtype=T][,device=D]; vllm:MODEL[,dtype=T]: vLLM, started here; "
    "release:MODEL[,tag=REVISION][,dtype=T]: this engine as it was at the last release or another git revision; "
    "MODEL is a folder or a hub id, OWNER/NAME@COMMIT; "
    "each with ,form=16bit: a quantised checkpoint's 16-bit form, written for the purpose; "
    "scores:FILE: what --record kept"
)


@dataclass(frozen=True, slots=True)
class Spec:
    """An engine as named on the command line. `target` is an address, a model folder or a file."""

    kind: str
    target: str
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path | None:
        """The model folder, where the name has one."""
        return Path(self.target) if self.kind in OPTIONS else None


class Scorer(Protocol):
    """An engine that is ready."""

    @property
    def context(self) -> int | None:
        """Longest sequence in tokens, None where any will do."""
        ...

    def score(self, task: Task) -> Scores:
        """Score all windows and answer all prompts."""
        ...


def parse_spec(text: str) -> Spec:
    """Read an engine's name; a model of the hub is fetched.

    Raises:
        ConfigError: it is not understood, or names no model.
        EnvironmentProblem: its model cannot be fetched.
    """
    if text.startswith(("http://", "https://")):
        require_url(text)
        return Spec("server", text.rstrip("/").removesuffix("/v1"))
    kind, separator, rest = text.partition(":")
    if not separator:
        kind, rest = "sparkinfer", text
    if kind == "scores":
        return Spec(kind, rest)
    if kind not in OPTIONS:
        raise ConfigError(f"engine {text!r}: {kind!r} is not known; give {SPEC_HELP}")
    target, *pairs = rest.split(",")
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name not in OPTIONS[kind]:
            raise ConfigError(f"engine {text!r}: option {pair!r} is not one of {', '.join(OPTIONS[kind])} with =VALUE")
        if name == "form" and value != SIXTEEN_BIT:
            raise ConfigError(f"engine {text!r}: form {value!r} is not known: the only one is {SIXTEEN_BIT}")
        options[name] = value
    try:
        folder = resolve_model(target)
        there = (folder / "config.json").is_file()
    except (CheckpointError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"engine {text[:80]!r}: not a model folder ({reason})") from error
    if not there:
        raise ConfigError(f"engine {text!r}: {target} is not a model folder (no config.json)")
    return Spec(kind, str(folder), options)


@contextmanager
def opened(spec: Spec, context: int, model: str | None, method: str) -> Iterator[Scorer]:
    """The engine, ready; ended afterwards where it was started here.

    Args:
        spec: which.
        context: longest sequence that will be asked for; servers that run already have their own.
        model: name of the model to ask a server for; None takes the first it lists.
        method: how servers are asked, `auto`, `prompt` or `next`.

    Raises:
        SparkinferError: it cannot be had.
    """
    if spec.kind == "scores":
        yield Recorded(Path(spec.target))
    elif spec.kind == "server":
        yield _server(spec.target, model, method)
    else:
        with _in_form(spec) as folder:
            options = {name: value for name, value in spec.options.items() if name != "form"}
            with _local(spec.kind, folder, context, method, options) as engine:
                yield engine


@contextmanager
def _in_form(spec: Spec) -> Iterator[Path]:
    """The model folder, or its 16-bit form for as long as it is needed."""
    folder = Path(spec.target)
    if spec.options.get("form") != SIXTEEN_BIT:
        yield folder
        return
    from sparkinfer.quantization.dequantise import dequantise_checkpoint

    with tempfile.TemporaryDirectory(prefix="accuracy-") as scratch:
        target = Path(scratch) / f"{folder.name}-{SIXTEEN_BIT}"
        dequantise_checkpoint(folder, target)
        yield target


@contextmanager
def _local(kind: str, folder: Path, context: int, method: str, options: dict[str, str]) -> Iterator[Scorer]:
    if kind == "sparkinfer":
        from .local import LocalEngine

        settings = {name: options.pop(name) for name in SETTINGS if name in options}
        yield LocalEngine(folder, context, settings=settings, **options)
    elif kind == "transformers":
        from .transformers_model import TransformersModel

        yield TransformersModel(folder, **options)
    elif kind == "release":
        from . import started

        tag = started.chosen_tag(options.pop("tag", None))
        with started.release(folder, context, tag, **options) as (url, name):
            yield _server(url, name, method, release=tag)
    else:
        from . import started

        with started.vllm(folder, context, **options) as (url, name):
            yield _server(url, name, method, dtype=options.get("dtype", "bfloat16"), model_digest=model_digest(folder))


def _server(url: str, model: str | None, method: str, **facts: str) -> Scorer:
    """A server; `facts` are what is known of it besides what it says."""
    from .server import ServerEngine

    engine = ServerEngine(url, model, method)
    engine.about |= facts
    return engine


class Recorded:
    """Scores that were kept."""

    def __init__(self, path: Path) -> None:
        self.task, self._scores = read_scores(path)
        self.path = path

    @property
    def context(self) -> int:
        """The longest recorded sequence."""
        longest = max(map(len, self.task.windows.values()), default=0)
        answers = [len(ids) + self.task.answer_tokens for ids in self.task.prompts.values()]
        return max(longest, *answers) if answers else longest

    def score(self, task: Task) -> Scores:
        """What was recorded. Raises ConfigError when it was recorded for another task."""
        if task != self.task:
            raise ConfigError(
                f"{self.path} was recorded for other token ids (another tokenizer, context, --answer-tokens or "
                "--limit): record it again with the same settings"
            )
        return self._scores


def describe(kind: str, **facts: Any) -> dict[str, Any]:
    """What a report says about an engine; unknown facts are left out."""
    return {"kind": kind, **{name: value for name, value in facts.items() if value is not None}}
