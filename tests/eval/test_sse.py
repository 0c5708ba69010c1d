"""Events of a stream, however its bytes are cut and whatever characters its text holds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from sparkinfer_eval.sse import events

CHUNKS = [{"text": "plain"}, {"text": "next line \u0085, line \u2028, paragraph \u2029, größe 🙂"}, {"text": ""}]
STREAM = "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}\r\n\r\n" for chunk in CHUNKS) + ": a comment\n\n"


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_events_do_not_depend_on_the_cut(size: int) -> None:
    raw = (STREAM + "data: [DONE]\n\n" + 'data: {"text": "after the end"}\n\n').encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(raw), size):
            yield raw[start : start + size]

    async def collect() -> list[str]:
        return [data async for data in events(httpx.Response(200, content=pieces()))]

    assert [json.loads(data) for data in asyncio.run(collect())] == CHUNKS
