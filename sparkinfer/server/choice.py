"""One answer in the making: token events in, text, logprobs and the finish reason out."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkinfer.engine.messages import PromptToken, TokenEvent
from sparkinfer.scheduling.types import FinishReason
from sparkinfer.server.detokenize import Detokenizer, StopMatcher


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Logprob of one output token and of its alternatives, as the engine reported them."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Piece:
    """What one event adds to an answer."""

    text: str
    token: int | None
    logprob: TokenLogprob | None
    finished: bool


@dataclass(slots=True, eq=False)
class Choice:
    """State of one answer (`index` in the response's `choices`), fed by the events of one engine request."""

    index: int
    prompt: list[int]
    detokenizer: Detokenizer
    stops: list[str] = field(default_factory=list)
    include_stop: bool = False
    min_tokens: int = 0
    matcher: StopMatcher | None = None
    num_tokens: int = 0
    """Output tokens so far, a stop token included."""
    num_cached: int = 0
    finish_reason: str | None = None
    last_token_s: float = 0.0
    text_length: int = 0
    """Characters released so far."""
    prompt_logprobs: list[PromptToken] | None = None
    """Of every prompt token but the first, where they were asked for."""

    def __post_init__(self) -> None:
        if self.stops:
            self.matcher = StopMatcher(self.stops, self.include_stop)

    def push(self, event: TokenEvent) -> Piece:
        """Take one event. After `finish_reason` is set, call it no more."""
        text, logprob, matcher = "", None, self.matcher
        if event.token is not None:
            self.num_tokens += 1
            self.num_cached = event.num_cached
            if event.prompt_logprobs is not None:
                self.prompt_logprobs = event.prompt_logprobs
            if event.logprob is not None:
                logprob = TokenLogprob(event.token, event.logprob, event.top or [])
            # A stop token ends the text and is not part of it, unless asked for.
            if event.finish_reason != FinishReason.STOP or self.include_stop:
                text = self.detokenizer.push(event.token)
                if matcher is not None and self.num_tokens > self.min_tokens:
                    text = matcher.push(text)
        if matcher is not None and matcher.matched is not None:
            self.finish_reason = FinishReason.STOP.value
        elif event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            text += self._flush(matcher)
        self.text_length += len(text)
        return Piece(text, event.token, logprob, self.finish_reason is not None)

    def _flush(self, matcher: StopMatcher | None) -> str:
        text = self.detokenizer.flush()
        if matcher is None:
            return text
        text = matcher.push(text)
        if matcher.matched is not None:
            self.finish_reason = FinishReason.STOP.value
            return text
        return text + matcher.flush()
