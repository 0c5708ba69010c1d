"""What a token costs outside the model: CPU time of server and engine process per streamed token.

`python tests/server/cost_per_token.py MODEL [--streams 32] [--tokens 256] [--step-ms 10]` serves the echoing model
(real processes, loop, scheduler, protocol and HTTP; no tensors) and reads the streams with a client that only counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from running_server import Running, start_echo


async def one_stream(url: str, body: bytes) -> int:
    """Number of events of one stream, read as bytes."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    count = 0
    while piece := await reader.read(1 << 16):
        count += piece.count(b"data: ")
    writer.close()
    return count


def seconds(pid: int) -> float:
    """CPU seconds, user and system, of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def measure(running: Running, streams: int, tokens: int) -> dict[str, float]:
    """Run all streams at once; microseconds of CPU per token and tokens per second."""
    words = " ".join(f"word{index}" for index in range(100))
    body = {
        "messages": [{"role": "user", "content": words}], "stream": True, "stream_options": {"include_usage": True},
        "max_completion_tokens": tokens, "min_tokens": tokens, "ignore_eos": True,
    }  # fmt: skip
    raw = json.dumps(body).encode()

    async def load() -> list[int]:
        return await asyncio.gather(*(one_stream(running.url, raw) for _ in range(streams)))

    engine = running.engine().pid
    before, began = (seconds(running.process.pid), seconds(engine)), time.perf_counter()
    events = asyncio.run(load())
    wall = time.perf_counter() - began
    total = streams * tokens
    return {
        "tokens": total,
        "events": sum(events),
        "tokens_per_s": total / wall,
        "server_us_per_token": (seconds(running.process.pid) - before[0]) / total * 1e6,
        "engine_us_per_token": (seconds(engine) - before[1]) / total * 1e6,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=10.0)
    options = parser.parse_args()
    script = json.dumps({"step_s": options.step_ms / 1000})
    with tempfile.TemporaryDirectory() as folder, start_echo(options.model, Path(folder) / "log", script) as running:
        measure(running, options.streams, 16)
        for _ in range(3):
            result = measure(running, options.streams, options.tokens)
            print("  ".join(f"{name} {value:.1f}" for name, value in result.items()), flush=True)


if __name__ == "__main__":
    main()
