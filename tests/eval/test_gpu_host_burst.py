"""Bursts of prompts to a server: what is sent, and what is counted."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sparkinfer_eval.host import burst, servers
from sparkinfer_eval.host.cells import run_folder
from sparkinfer_eval.host.site import Host
from sparkinfer_eval.records import Record

from sparkinfer.errors import EnvironmentProblem

STEP_S = 0.02
ROOT = Path(__file__).resolve().parents[2]


class Server(ThreadingHTTPServer):
    """Answers /v1/completions with one token after a fixed time, however many ask."""

    daemon_threads = True
    request_queue_size = 64
    bodies: list[dict[str, Any]]
    broken = False


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.broken:
            self.send_error(503)
            return
        time.sleep(STEP_S)
        event = {
            "choices": [{"text": "x", "finish_reason": "length"}],
            "usage": {"prompt_tokens": 8, "completion_tokens": 1},
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n")


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server(("127.0.0.1", 0), Handler)
    running.bodies = []
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(ROOT, tmp_path)
    model = tmp_path / "models" / "toy"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"vocab_size": 5000}))
    known = run_folder(host, "t") / "servers" / "vllm-toy-1.json"
    known.parent.mkdir(parents=True)
    known.write_text(json.dumps({"version": "0.30.0", "engine_digest": f"sha256:{'1' * 64}"}))
    return host


def test_a_burst_is_32_distinct_prompts_together_and_one_by_one(host: Host, server: Server) -> None:
    running = servers.Running("vllm", "toy", "exact", server.server_address[1], os.getpid(), "", 1.0)
    together, single = burst.measure_bursts(host, "t", running, [8], 2, 0)
    assert len(server.bodies) == 2 * 3 * burst.BURST
    assert len({tuple(body["prompt"]) for body in server.bodies}) == len(server.bodies)
    assert {len(body["prompt"]) for body in server.bodies} == {8}
    assert {body["max_tokens"] for body in server.bodies} == {1}
    assert len(together["repeats"]) == 2
    assert single["prompts_s"] < 1 / STEP_S  # Each of them waits for the one before.
    assert together["prompts_s"] > single["prompts_s"]
    record = json.loads((run_folder(host, "t") / "bursts" / "vllm-toy.json").read_text(encoding="utf-8"))
    assert (record["engine_version"], record["figures"]) == ("0.30.0", [together, single])


def test_prompts_per_second_counts_from_the_first_request_to_the_last_first_token() -> None:
    def record(start: float, first: float) -> Record:
        return Record("r", "profiling", "x", 8, 1, int(start * 1e9), int(first * 1e9), int(9e9), "length")

    assert burst.prompts_per_second([record(1.0, 2.0), record(1.5, 3.0), record(1.2, 2.5)]) == pytest.approx(1.5)


def test_a_failed_request_is_no_figure(host: Host, server: Server) -> None:
    server.broken = True
    running = servers.Running("vllm", "toy", "exact", server.server_address[1], os.getpid(), "", 1.0)
    with pytest.raises(EnvironmentProblem, match="requests failed"):
        burst.measure_bursts(host, "t", running, [8], 1, 0)
    assert not (run_folder(host, "t") / "bursts").exists()
