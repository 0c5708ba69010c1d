"""From a request body to engine requests: prompt ids, sampling parameters and the checks they need."""

from __future__ import annotations

from typing import Any

from sparkinfer.engine.messages import Sampling
from sparkinfer.errors import RequestError
from sparkinfer.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from sparkinfer.server.tokenizer import ServerTokenizer

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; chat may fill the context."""
SEED_BITS = 63
LEAST_TEMPERATURE = 1e-6
"""Below it an answer is greedy: it would be anyway, and logits divided by much less overflow."""


def _within(name: str, value: float | None, low: float, high: float, default: Any) -> Any:
    if value is None:
        return default
    if not low <= value <= high:
        raise RequestError(f"`{name}` is {value}: it must lie between {low} and {high}", name)
    return value


def stop_strings(body: GenerationRequest) -> list[str]:
    """`stop` as a list. Raises RequestError."""
    stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or [])
    if len(stops) > MAX_STOPS or "" in stops:
        raise RequestError(f"`stop` takes up to {MAX_STOPS} strings, none of them empty", "stop")
    return stops


def number_of_choices(body: GenerationRequest) -> int:
    """`n`. Raises RequestError."""
    return int(_within("n", body.n, 1, MAX_CHOICES, 1))


def logprobs_of(body: GenerationRequest) -> int | None:
    """Alternatives per token, None without logprobs. Raises RequestError."""
    if isinstance(body, CompletionRequest):
        value = _within("logprobs", body.logprobs, 0, MAX_LOGPROBS, None)
        return None if value is None else int(value)
    assert isinstance(body, ChatRequest)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    return int(_within("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS, 0)) if body.logprobs else None


def prompt_logprobs_of(body: GenerationRequest) -> int | None:
    """Alternatives per prompt token (`prompt_logprobs`, or `logprobs` with `echo`), None without.

    Raises RequestError.
    """
    if not isinstance(body, CompletionRequest):
        return None
    value = _within("prompt_logprobs", body.prompt_logprobs, 0, MAX_LOGPROBS, None)
    if value is None and body.echo:
        value = logprobs_of(body)
    for name, asked in (("prompt_logprobs", value is not None), ("echo", bool(body.echo))):
        if asked and body.stream:
            raise RequestError(f"`{name}` is not available with `stream`: ask for the whole answer", name)
    if value is not None and number_of_choices(body) > 1:
        raise RequestError("log-probabilities of the prompt are the same for every choice: use `n` 1", "n")
    return None if value is None else int(value)


def token_limit(body: GenerationRequest, prompt_tokens: int, max_model_len: int) -> int:
    """Most output tokens of a request. Raises RequestError with both numbers when the context is too short."""
    room = max_model_len - prompt_tokens
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens and this server's context length is {max_model_len}: at least one "
            "must be left for the answer; shorten the prompt or raise SPARKINFER_MAX_MODEL_LEN",
            "messages" if isinstance(body, ChatRequest) else "prompt",
        )
    name, asked = "max_tokens", body.max_tokens
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        name, asked = "max_completion_tokens", body.max_completion_tokens
    if asked is None:
        return room if isinstance(body, ChatRequest) else min(room, COMPLETION_MAX_TOKENS)
    if asked == 0 and isinstance(body, CompletionRequest) and body.echo:
        # The engine's requests end with a token; the answer leaves it out.
        return 1
    if asked < 1:
        raise RequestError(f"`{name}` is {asked}: it must be at least 1", name)
    if asked > room:
        raise RequestError(
            f"`{name}` is {asked} and the prompt has {prompt_tokens} tokens, together {asked + prompt_tokens}: this "
            f"server's context length is {max_model_len}; ask for at most {room}",
            name,
        )
    return asked


def seed_of(body: GenerationRequest, drawn: int) -> int:
    """`seed`, or the `drawn` one. Raises RequestError."""
    if body.seed is None:
        return drawn
    if not 0 <= body.seed < 1 << SEED_BITS:
        raise RequestError(f"`seed` is {body.seed}: it must lie between 0 and 2**{SEED_BITS} - 1", "seed")
    return body.seed


def sampling_of(body: GenerationRequest, max_tokens: int, seed: int, vocab_size: int) -> Sampling:
    """Sampling parameters of one engine request; `seed` is already this choice's own. Raises RequestError."""
    min_tokens = int(_within("min_tokens", body.min_tokens, 0, max_tokens, 0))
    top_p = _within("top_p", body.top_p, 0, 1, 1.0)
    if top_p == 0:
        raise RequestError("`top_p` is 0: it must be above 0 (temperature 0 is greedy)", "top_p")
    top_k = body.top_k if body.top_k is not None and body.top_k != -1 else 0
    _within("top_k", top_k, 0, 2**31, 0)
    check_ids(body.stop_token_ids or [], vocab_size, "stop_token_ids")
    temperature = float(_within("temperature", body.temperature, 0, 2, 1.0))
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
        top_k=top_k,
        top_p=float(top_p),
        min_p=float(_within("min_p", body.min_p, 0, 1, 0.0)),
        seed=seed,
        logprobs=logprobs_of(body),
        stop_token_ids=list(body.stop_token_ids or []),
        ignore_eos=body.ignore_eos,
        prompt_logprobs=prompt_logprobs_of(body),
    )


def check_ids(ids: list[int], vocab_size: int, param: str) -> None:
    """Raise RequestError for a token id outside the model's vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise RequestError(f"`{param}` holds the token id {wrong}: ids run from 0 to {vocab_size - 1}", param)


async def prompt_ids(body: GenerationRequest, tokenizer: ServerTokenizer, vocab_size: int) -> list[list[int]]:
    """Token ids of every prompt of a request. Raises RequestError."""
    if isinstance(body, ChatRequest):
        messages = chat_messages(body.messages)
        text = tokenizer.render_chat(messages, body.add_generation_prompt, body.chat_template_kwargs or {})
        return [await tokenizer.encode(text, add_special_tokens=False)]
    assert isinstance(body, CompletionRequest)
    prompts = []
    for prompt in body.prompt_list():
        if isinstance(prompt, str):
            prompt = await tokenizer.encode(prompt, add_special_tokens=True)
        else:
            check_ids(prompt, vocab_size, "prompt")
        if not prompt:
            raise RequestError("the prompt has no tokens", "prompt")
        prompts.append(prompt)
    return prompts


def chat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the chat template takes them: text only. Raises RequestError naming the place."""
    if not messages:
        raise RequestError("`messages` is empty", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: dict[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if role == "developer":
        role = "system"
    if role not in ("system", "user", "assistant"):
        raise RequestError(
            f"`{place}.role` is {role!r}: it must be system, developer, user or assistant", f"{place}.role"
        )
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise RequestError(f"`{place}.{name}` is not supported: leave it out", f"{place}.{name}")
    result = {"role": role, "content": _content(message.get("content"), f"{place}.content")}
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str):
        result["reasoning_content"] = reasoning
    return result


def _content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"`{place}` must be text or a list of text parts", place)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"`{place}[{index}]` is of type {kind!r}: only text is supported", f"{place}[{index}]")
        texts.append(part["text"])
    return "".join(texts)
