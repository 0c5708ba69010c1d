"""The server's own salt of the prefix cache precedes that of each request."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparkinfer.engine.client import EngineClient
from sparkinfer.engine.messages import AddRequest, EngineReady, EngineStats
from sparkinfer.scheduling.prefix_index import extend_hashes
from sparkinfer.scheduling.types import Request, SamplingParams
from sparkinfer.server.generation import prepare
from sparkinfer.server.metrics import Metrics
from sparkinfer.server.protocol import CompletionRequest
from sparkinfer.server.state import ServerState
from sparkinfer.server.tokenizer import ServerTokenizer
from sparkinfer.settings import Settings


@pytest.mark.parametrize(
    ("own", "asked", "salt"), [("", None, ""), ("", "tenant", "tenant"), ("pepper", None, "pepper"),
                               ("pepper", "tenant", "peppertenant")],
)  # fmt: skip
def test_the_engine_gets_both_salts(tokenizer: ServerTokenizer, own: str, asked: str | None, salt: str) -> None:
    prompt = list(range(5, 45))

    async def made(use_cache: bool) -> AddRequest:
        ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        limits = {"vocab_size": 1024, "max_model_len": 100, "max_num_seqs": 4}
        ready.set_result(EngineReady({"limits": limits}, EngineStats()))
        numbers = itertools.count()
        client = SimpleNamespace(
            ready=ready, died=asyncio.get_running_loop().create_future(), num_unfinished=0,
            next_id=lambda: str(next(numbers)),
        )  # fmt: skip
        state = ServerState(
            client=cast("EngineClient", client), settings=Settings(prefix_cache_salt=own), folder=Path(),
            model_name="m", aliases=frozenset(), seeds=random.Random(0), metrics=Metrics(EngineStats),
            tokenizer=tokenizer,
        )  # fmt: skip
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "cache_salt": asked, "use_cache": use_cache}
        (request,) = (await prepare(state, json.dumps(body).encode(), CompletionRequest, 0.0)).requests
        return request

    request = asyncio.run(made(True))
    assert request.cache_salt == salt
    # The hashes of its two full blocks come along, so that the engine's process need not compute them.
    expected: list[bytes] = []
    extend_hashes(expected, Request("r", prompt, SamplingParams(1), cache_salt=salt), 2)
    assert request.prompt_hashes == b"".join(expected)
    assert not asyncio.run(made(False)).prompt_hashes
