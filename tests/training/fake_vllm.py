"""Stands in for vLLM's API server: the endpoints that `vllm_acceptance` uses, with counters that add up.

It also has as much of the rest as `eval/accuracy.py` asks for, with answers that mean nothing. Each answer of n tokens
counts as (n - 1) / 4 verifications of 7 drafts with three accepted. `FAKE_VLLM` set to `dead`
makes it end at once with an error, `plain` leaves the counters out, `short` answers with one token too few, `mute` says
nothing of an answer's own acceptance, `busy` counts a verification that belongs to no answer, `late` shows an answer's
counts a moment after it.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Timer
from typing import Any

NAME = sys.argv[sys.argv.index("--served-model-name") + 1]
MODE = os.environ.get("FAKE_VLLM", "")
LOCK = Lock()
LATE_S = 0.15
steps = 0


def count(verifications: int) -> None:
    """Add to the counters."""
    global steps
    with LOCK:
        steps += verifications


class Handler(BaseHTTPRequestHandler):
    """One request."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.reply(metrics())
        elif self.path == "/v1/models":
            self.reply(json.dumps({"data": [{"id": NAME, "max_model_len": 1152}]}))
        elif self.path == "/v1/info":
            self.send_error(404)
        else:
            self.reply(json.dumps({"version": "0.30.0"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert isinstance(body["prompt"], list)
        if "prompt_logprobs" in body or "logprobs" in body:
            self.reply(json.dumps({"choices": [scored(body)]}))
            return
        assert body["ignore_eos"]
        verifications = (body["max_tokens"] - 1) // 4
        if MODE == "late":
            Timer(LATE_S, count, [verifications]).start()
        else:
            count(verifications + (MODE == "busy"))
        answer: dict[str, object] = {"usage": {"completion_tokens": body["max_tokens"] - (MODE == "short")}}
        if MODE != "mute":
            answer["metrics"] = {"speculative_decoding": {"acceptance_histogram": [0, 0, 0, verifications, 0, 0, 0, 0]}}
        self.reply(json.dumps(answer))

    def reply(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None: ...


def scored(body: dict[str, Any]) -> dict[str, object]:
    """Every token has the same log-probability."""
    length = body["max_tokens"]
    rows = [None, *({str(token): {"logprob": -1.0}} for token in body["prompt"][1:])]
    top = [{"token_id:7": -0.5} for _ in range(length)]
    return {"prompt_logprobs": rows, "logprobs": {"tokens": ["token_id:7"] * length, "top_logprobs": top}}


def metrics() -> str:
    """vLLM's form."""
    if MODE == "plain":
        return "vllm:num_requests_running 0\n"
    labels = 'engine="0",model_name="target"'
    lines = ["# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts."]
    for name, each in (("drafts", 1), ("draft_tokens", 7), ("accepted_tokens", 3)):
        lines.append(f"vllm:spec_decode_num_{name}_total{{{labels}}} {float(steps * each)}")
        lines.append(f"vllm:spec_decode_num_{name}_created{{{labels}}} 1.7e+09")
    for place in range(7):
        value = steps if place < 3 else 0
        lines.append(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{place}"}} {float(value)}'
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    arguments = sys.argv[1:]
    assert arguments[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    if "--speculative-config" in arguments:
        speculative = json.loads(arguments[arguments.index("--speculative-config") + 1])
        assert speculative["method"] == "dflash"
        assert arguments[arguments.index("--per-request-spec-decode-metrics") + 1] == "summary"
    if MODE == "dead":
        sys.exit("ValueError: no such drafter")
    port = int(arguments[arguments.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
