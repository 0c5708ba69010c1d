"""What can be scored, and how it is named on the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sparkinfer.errors import ConfigError

from .held_out import Task
from .scores import Scores, read_scores

LOCAL_OPTIONS = {"sparkinfer": ("dtype", "device", "load_format"), "transformers": ("dtype", "device")}
SPEC_HELP = (
    "http://HOST:PORT of an OpenAI-compatible server; MODEL or sparkinfer:MODEL[,dtype=T][,device=D][,load_format=F]: "
    "this engine in this process; transformers:MODEL[,dtype=T][,device=D]; vllm:MODEL[,dtype=T]: vLLM, started here; "
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
        return Path(self.target) if self.kind in ("sparkinfer", "transformers", "vllm") else None


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
    """Read an engine's name. Raises ConfigError for one that is not understood."""
    if text.startswith(("http://", "https://")):
        return Spec("server", text.rstrip("/").removesuffix("/v1"))
    kind, separator, rest = text.partition(":")
    if not separator:
        kind, rest = "sparkinfer", text
    if kind == "scores":
        return Spec(kind, rest)
    known = {**LOCAL_OPTIONS, "vllm": ("dtype",)}
    if kind not in known:
        raise ConfigError(f"engine {text!r}: {kind!r} is not known; give {SPEC_HELP}")
    target, *pairs = rest.split(",")
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name not in known[kind]:
            raise ConfigError(f"engine {text!r}: option {pair!r} is not one of {', '.join(known[kind])} with =VALUE")
        options[name] = value
    if not (Path(target) / "config.json").is_file():
        raise ConfigError(f"engine {text!r}: {target} is not a model folder (no config.json)")
    return Spec(kind, target, options)


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
    if spec.kind == "sparkinfer":
        from .local import LocalEngine

        yield LocalEngine(Path(spec.target), context, **spec.options)
    elif spec.kind == "transformers":
        from .transformers_model import TransformersModel

        yield TransformersModel(Path(spec.target), **spec.options)
    elif spec.kind == "scores":
        yield Recorded(Path(spec.target))
    elif spec.kind == "vllm":
        from .vllm_server import started

        with started(Path(spec.target), context, **spec.options) as (url, name):
            yield _server(url, name, method)
    else:
        yield _server(spec.target, model, method)


def _server(url: str, model: str | None, method: str) -> Scorer:
    from .server import ServerEngine

    return ServerEngine(url, model, method)


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
