"""What the handlers share."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkinfer.engine.client import EngineClient
from sparkinfer.server.errors import HttpError
from sparkinfer.server.metrics import Metrics
from sparkinfer.server.tokenizer import ServerTokenizer
from sparkinfer.settings import Settings


@dataclass
class ServerState:
    """One server: its engine, its tokenizer once loaded, and its settings."""

    client: EngineClient
    settings: Settings
    folder: Path
    model_name: str
    aliases: frozenset[str]
    seeds: random.Random
    """Source of the seeds of requests that bring none."""
    metrics: Metrics
    tokenizer: ServerTokenizer | None = None
    draining: bool = False
    digests: asyncio.Task[tuple[str, dict[str, str]]] | None = field(default=None, repr=False)

    @property
    def is_ready(self) -> bool:
        """Whether generation requests are served."""
        return self.why_not_ready() is None

    def why_not_ready(self) -> str | None:
        """None, or what /health answers with its 503."""
        if self.client.died.done():
            return self.client.died.result().message
        if self.draining:
            return "the server is shutting down"
        if not self.client.ready.done() or self.tokenizer is None:
            return "the model is loading"
        return None

    def loaded(self) -> ServerTokenizer:
        """The tokenizer of a ready server. Raises HttpError 503."""
        reason = self.why_not_ready()
        if reason is not None or self.tokenizer is None:
            raise HttpError(503, reason or "the model is loading")
        return self.tokenizer

    @property
    def engine_info(self) -> dict[str, Any]:
        """What the engine said when it was ready."""
        return self.client.ready.result().info if self.client.ready.done() else {}

    def limit(self, name: str) -> int:
        """One of the engine's limits (`max_model_len`, `max_num_seqs`, `vocab_size`)."""
        limits = self.engine_info["limits"]
        return int(limits[name])

    def check_model(self, name: str | None) -> None:
        """Raise HttpError 404 for a model that is not served."""
        if name is not None and name != self.model_name and name not in self.aliases:
            raise HttpError(
                404, f"no model {name!r} here: this server has {self.model_name!r}", "model", "model_not_found"
            )

    def check_queue(self, new: int) -> None:
        """Raise HttpError 429 when `new` more requests do not fit now, 400 when they never would."""
        running = self.limit("max_num_seqs")
        if new > running + self.settings.max_queue:
            raise HttpError(
                400,
                f"the request asks for {new} answers and this server takes {running + self.settings.max_queue} at once "
                f"(SPARKINFER_MAX_NUM_SEQS {running} run, SPARKINFER_MAX_QUEUE {self.settings.max_queue} wait): send "
                "fewer prompts or a smaller `n` in one request",
            )
        waiting = self.client.num_unfinished + new - running
        if waiting > self.settings.max_queue:
            raise HttpError(
                429,
                f"the queue is full: {self.client.num_unfinished} requests are running or waiting and "
                f"SPARKINFER_MAX_QUEUE is {self.settings.max_queue}; try again later",
                code="queue_full",
            )
