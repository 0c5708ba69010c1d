"""The server's side of the engine process, with engines that do little."""

from __future__ import annotations

import asyncio
import sys

import pytest

from sparkinfer.engine.client import EngineClient, EngineDied
from sparkinfer.engine.ipc import EngineOptions
from sparkinfer.settings import Settings

DEAF = """
import msgspec, sys
from sparkinfer.engine.ipc import EngineEnd, Launch
from sparkinfer.engine.messages import EngineReady, EngineStats, Shutdown
end = EngineEnd(msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch))
end.send(EngineReady({}, EngineStats()))
while not (LEAVES and isinstance(end.receive(), Shutdown)):
    end.wait()
end.close()
"""
"""An engine that answers nothing, and obeys the request to end if LEAVES."""


@pytest.mark.parametrize("leaves", [True, False])
def test_a_reset_that_the_engine_never_read_is_answered_when_it_stops(leaves: bool) -> None:
    async def scene() -> None:
        code = DEAF.replace("LEAVES", str(leaves))
        client = EngineClient(EngineOptions("none", Settings()), (sys.executable, "-c", code))
        client.start()
        await asyncio.wait_for(client.ready, 20)
        reset = asyncio.ensure_future(client.reset_cache())
        await asyncio.sleep(0)
        await client.stop(10.0 if leaves else -1.9)
        with pytest.raises(EngineDied, match="has stopped"):
            await asyncio.wait_for(reset, 2)

    asyncio.run(scene())
