"""Request bodies of the OpenAI-compatible endpoints: fields, defaults, and what is refused.

Every field is one of: supported (a member of the structs below), accepted without effect (`NO_EFFECT`), or not
supported (`NOT_SUPPORTED`: only its neutral value passes). Anything else is an unknown field, refused with the closest
known name.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, TypeVar

import msgspec

from sparkinfer.errors import RequestError

NO_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Accepted in both generation endpoints and ignored: they change no token."""

NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "best_of": (None, 1),
    "echo": (None, False),
    "prompt_logprobs": (None,),
    "suffix": (None, ""),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
}
"""Field to its neutral values; any other value is refused by name, at the endpoints that do not have the field."""


Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""JSON numbers have any size; what goes to the engine has 64 bits."""


MOST_PRIORITY = 100
Priority = Annotated[int, msgspec.Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)]
"""Waiting overcomes any difference within these bounds (`SPARKINFER_AGING_STEPS` steps a level); none beyond them."""


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options` of a streaming request."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both generation endpoints share."""

    model: str | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    n: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority = 0
    cache_salt: str | None = None
    use_cache: bool = True
    return_token_ids: bool | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Any
    """A string, a list of strings, a list of token ids, or a list of such lists (`prompt_list` checks)."""
    logprobs: Int | None = None
    echo: bool | None = None
    prompt_logprobs: Int | None = None
    return_tokens_as_token_ids: bool | None = None
    """`logprobs` names tokens as `token_id:N`: texts of tokens are not unique."""

    def prompt_list(self) -> list[str | list[int]]:
        """One entry per prompt. Raises RequestError for anything but the four forms."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if _all_ids(prompt):
                return [prompt]
            if all(isinstance(item, str) or (isinstance(item, list) and item and _all_ids(item)) for item in prompt):
                return prompt
        raise RequestError(
            "`prompt` must be a string, a list of strings, a list of token ids or a list of such lists, and not empty",
            "prompt",
        )


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False


T = TypeVar("T", bound=msgspec.Struct)


def parse_body(raw: bytes, kind: type[T]) -> T:
    """Decode and check a request body. Raises RequestError naming the field."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    if issubclass(kind, GenerationRequest):
        body = _drop_without_effect(body, kind)
    _refuse_unknown(body, kind, "")
    options = body.get("stream_options")
    if isinstance(options, dict) and issubclass(kind, GenerationRequest):
        _refuse_unknown(options, StreamOptions, "stream_options.")
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        place = re.search(r"\$\.([A-Za-z_][\w.\[\]]*)", message) or re.search(r"required field `(\w+)`", message)
        raise RequestError(message, place.group(1) if place else None) from error


def _drop_without_effect(body: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    kept = {}
    for name, value in body.items():
        if name in NO_EFFECT:
            continue
        if name in NOT_SUPPORTED and name not in kind.__struct_fields__:
            if value not in NOT_SUPPORTED[name]:
                raise RequestError(f"`{name}` is not supported: leave it out", name)
            continue
        kept[name] = value
    return kept


def _refuse_unknown(body: dict[str, Any], kind: type[msgspec.Struct], prefix: str) -> None:
    known = kind.__struct_fields__
    for name in body:
        if name not in known:
            close = difflib.get_close_matches(name, [*known, *NO_EFFECT] if not prefix else known, n=1)
            hint = f": did you mean `{prefix}{close[0]}`?" if close else "; docs/api.md lists the fields"
            raise RequestError(f"unknown field `{prefix}{name}`{hint}", prefix + name)


def _all_ids(items: list[Any]) -> bool:
    return all(type(i) is int for i in items)
