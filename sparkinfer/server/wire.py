"""Response bodies of the two generation endpoints, streamed and whole.

A chunk differs from the one before in a few bytes only, so a `Format` keeps the rest serialised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sparkinfer.server.choice import Choice, TokenLogprob
from sparkinfer.server.tokenizer import ServerTokenizer

to_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
NOT_FINISHED = b"null"


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
        if ids:
            parts += [b',"token_ids":', to_json(delta.tokens)]
            if first:
                parts += [b',"prompt_token_ids":', to_json(choice.prompt)]
        parts.append(b"}")
        parts.append(self.tail if usage is None else b'],"usage":' + to_json(usage) + b"}\n\n")
        return b"".join(parts)

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The last chunk of a stream with include_usage."""
        return self.head + b'],"usage":' + to_json(usage) + b"}\n\n"

    def body(self, choices: Sequence[Choice], deltas: Sequence[Delta], ids: bool, usage: dict[str, Any]) -> bytes:
        """A whole response."""
        entries = []
        for choice, delta in zip(choices, deltas, strict=True):
            entry: dict[str, Any] = {"index": choice.index, **self.message(delta.text)}
            entry["logprobs"] = self.logprobs(choice, delta.logprobs, 0) if delta.logprobs else None
            entry["finish_reason"] = choice.finish_reason
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

    def delta(self, choice: Choice, delta: Delta, first: bool) -> bytes:
        return b'"text":' + to_json(delta.text)

    def message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
        tokens = [self.tokenizer.token_text(item.token) for item in logprobs]
        offsets = []
        for text in tokens:
            offsets.append(text_offset)
            text_offset += len(text)
        top = [{self.tokenizer.token_text(t): value for t, value in item.top} for item in logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [item.logprob for item in logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
        }
