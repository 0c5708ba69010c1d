"""Response bodies of the two generation endpoints, streamed and whole.

A chunk differs from the one before in a few bytes only, so a `Format` keeps the rest serialised.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sparkinfer.server.choice import Choice, TokenLogprob
from sparkinfer.server.protocol import CompletionRequest
from sparkinfer.server.tokenizer import ServerTokenizer

to_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
NOT_FINISHED = b"null"
LINE_BREAKS = [(mark.encode(), b"\\u%04x" % ord(mark)) for mark in "\u0085\u2028\u2029"]
"""JSON may hold them as they are, but clients that cut a stream into lines by Unicode's rules would cut it there."""


class Echo(enum.Enum):
    """What a completion's text begins with: nothing, or the prompt, which may also be all of it."""

    NONE = enum.auto()
    PROMPT = enum.auto()
    PROMPT_ONLY = enum.auto()


@dataclass(slots=True)
class Delta:
    """What has come for one choice since its last chunk."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


def usage(prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, Any]:
    """`usage` of a response; a prompt counts once, whatever `n` is."""
    completion = sum(choice.num_tokens for choice in choices)
    cached: dict[int, int] = {}
    for choice in choices:
        cached[id(choice.prompt)] = max(cached.get(id(choice.prompt), 0), choice.num_cached)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }


class Format(ABC):
    """How one response is written. `created` is Unix time in seconds."""

    whole: str
    chunk: str

    def __init__(self, rid: str, created: int, model: str, tokenizer: ServerTokenizer, *, null_usage: bool) -> None:
        self.rid, self.created, self.model = rid, created, model
        self.tokenizer = tokenizer
        head = {"id": rid, "object": self.chunk, "created": created, "model": model}
        self.head = b"data: " + to_json(head)[:-1] + b',"choices":['
        # OpenAI's form: with include_usage, every chunk but the last has a null usage.
        self.tail = b'],"usage":null}\n\n' if null_usage else b"]}\n\n"

    @abstractmethod
    def delta(self, choice: Choice, delta: Delta, first: bool) -> bytes:
        """The chunk's text member, as `"key":value` JSON text."""

    @abstractmethod
    def message(self, text: str) -> dict[str, Any]:
        """The whole response's text member."""

    @abstractmethod
    def logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
        """`logprobs` of a choice or of a chunk."""

    def event(self, choice: Choice, delta: Delta, *, first: bool, ids: bool, usage: dict[str, Any] | None) -> bytes:
        """One server-sent event. `ids` adds the token ids, `usage` the running counts."""
        parts = [self.head, b'{"index":%d,' % choice.index, self.delta(choice, delta, first)]
        if delta.logprobs:
            offset = choice.text_length - len(delta.text)
            parts += [b',"logprobs":', to_json(self.logprobs(choice, delta.logprobs, offset))]
        else:
            parts.append(b',"logprobs":null')
        finish = choice.finish_reason
        parts += [b',"finish_reason":', NOT_FINISHED if finish is None else to_json(finish)]
        if finish is not None and choice.matcher is not None and choice.matcher.matched is not None:
            parts += [b',"stop_reason":', to_json(choice.matcher.matched)]
        if ids:
            parts += [b',"token_ids":', to_json(delta.tokens)]
            if first:
                parts += [b',"prompt_token_ids":', to_json(choice.prompt)]
        parts.append(b"}")
        parts.append(self.tail if usage is None else b'],"usage":' + to_json(usage) + b"}\n\n")
        chunk = b"".join(parts)
        if not chunk.isascii():
            for mark, escaped in LINE_BREAKS:
                chunk = chunk.replace(mark, escaped)
        return chunk

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The last chunk of a stream with include_usage."""
        return self.head + b'],"usage":' + to_json(usage) + b"}\n\n"

    def answer(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """Text and logprobs of a choice in a whole response."""
        logprobs = self.logprobs(choice, delta.logprobs, 0) if delta.logprobs else None
        return {**self.message(delta.text), "logprobs": logprobs}

    def body(self, choices: Sequence[Choice], deltas: Sequence[Delta], ids: bool, usage: dict[str, Any]) -> bytes:
        """A whole response."""
        entries = []
        for choice, delta in zip(choices, deltas, strict=True):
            entry = {"index": choice.index, **self.answer(choice, delta), "finish_reason": choice.finish_reason}
            if choice.matcher is not None and choice.matcher.matched is not None:
                entry["stop_reason"] = choice.matcher.matched
            if ids:
                entry["token_ids"] = delta.tokens
                entry["prompt_token_ids"] = choice.prompt
            entries.append(entry)
        head = {"id": self.rid, "object": self.whole, "created": self.created, "model": self.model}
        return to_json({**head, "choices": entries, "usage": usage})


class ChatFormat(Format):
    """/v1/chat/completions."""

    whole, chunk = "chat.completion", "chat.completion.chunk"

    def delta(self, choice: Choice, delta: Delta, first: bool) -> bytes:
        start = b'"delta":{"role":"assistant","content":' if first else b'"delta":{"content":'
        return start + to_json(delta.text) + b"}"

    def message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    def logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
        content = []
        for item in logprobs:
            top = [self._entry(token, value) for token, value in item.top]
            content.append({**self._entry(item.token, item.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}


class CompletionFormat(Format):
    """/v1/completions."""

    whole, chunk = "text_completion", "text_completion"
    echo: Echo = Echo.NONE
    show_prompt_logprobs = False
    name_by_id = False
    """Name tokens in `logprobs` as `token_id:N`."""

    def show(self, body: CompletionRequest) -> bool:
        """Take over how the answer shows its prompt; says whether it is to hold the prompt only."""
        self.name_by_id = bool(body.return_tokens_as_token_ids)
        self.show_prompt_logprobs = body.prompt_logprobs is not None
        if body.echo:
            self.echo = Echo.PROMPT_ONLY if body.max_tokens == 0 else Echo.PROMPT
        return self.echo is Echo.PROMPT_ONLY

    def delta(self, choice: Choice, delta: Delta, first: bool) -> bytes:
        return b'"text":' + to_json(delta.text)

    def message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
        return {
            "tokens": [self._name(item.token) for item in logprobs],
            "token_logprobs": [item.logprob for item in logprobs],
            "top_logprobs": [{self._name(t): value for t, value in item.top} for item in logprobs],
            "text_offset": self._offsets([item.token for item in logprobs], text_offset),
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.name_by_id else self.tokenizer.token_text(token)

    def _offsets(self, tokens: Sequence[int], first: int) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(first)
            first += len(self.tokenizer.token_text(token))
        return offsets

    def answer(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        if self.echo is Echo.PROMPT_ONLY:
            delta = Delta()
        text = delta.text
        logprobs = self.logprobs(choice, delta.logprobs, 0) if delta.logprobs else None
        if self.echo is not Echo.NONE:
            prompt = self.tokenizer.decode(choice.prompt)
            text = prompt + text
            if choice.prompt_logprobs is not None and not self.show_prompt_logprobs:
                logprobs = self._echoed(choice, delta, len(prompt))
        answer = {**self.message(text), "logprobs": logprobs}
        if self.show_prompt_logprobs:
            answer["prompt_logprobs"] = self._prompt_logprobs(choice)
        return answer

    def _echoed(self, choice: Choice, delta: Delta, prompt_length: int) -> dict[str, Any]:
        """`logprobs` of prompt and output together; the first token has none (null), as in OpenAI's form."""
        scored = [
            TokenLogprob(token, logprob, top)
            for token, (logprob, _, top) in zip(choice.prompt[1:], choice.prompt_logprobs or [], strict=True)
        ]
        first = len(self.tokenizer.token_text(choice.prompt[0]))
        prompt = self.logprobs(choice, scored, first)
        output = self.logprobs(choice, delta.logprobs, prompt_length)
        head: dict[str, list[Any]] = {
            "tokens": [self._name(choice.prompt[0])],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [0],
        }
        return {key: [*value, *prompt[key], *output[key]] for key, value in head.items()}

    def _prompt_logprobs(self, choice: Choice) -> list[dict[str, Any] | None]:
        """vLLM's form: null, then for each prompt token the likeliest and itself by id."""
        result: list[dict[str, Any] | None] = [None]
        for token, (logprob, rank, top) in zip(choice.prompt[1:], choice.prompt_logprobs or [], strict=True):
            entries = {str(token): self._entry(token, logprob, rank)}
            entries.update({str(t): self._entry(t, value, place) for place, (t, value) in enumerate(top, 1)})
            result.append(entries)
        return result

    def _entry(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self.tokenizer.token_text(token)}
