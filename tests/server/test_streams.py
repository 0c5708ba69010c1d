"""Streams over the echoing model, whose text is known: stop strings, limits, time-outs, many at once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from running_server import Running, start_echo

from sparkinfer.server.tokenizer import ServerTokenizer

TEXT = "alpha beta gamma delta größe 你好 🙂 omega. "
SLOW = '{"step_s": 0.05}'


@pytest.fixture(scope="module")
def narrow(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One request at a time, one more may wait, 0.7 s for each."""
    flags = ("--max-num-seqs", "1", "--max-queue", "1", "--request-timeout-s", "0.7")
    with start_echo(model_dir, tmp_path_factory.mktemp("narrow") / "log", SLOW, flags) as running:
        yield running


def ids_of(tokenizer: ServerTokenizer, text: str) -> list[int]:
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize("stop", ["beta", "ta gam", "größ", "好 ", "🙂", "a. a", "omega. alpha b", TEXT[3:30]])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_across_tokens(echo: Running, tokenizer: ServerTokenizer, stop: str, include: bool) -> None:
    endless = TEXT * 3
    where = endless.find(stop)
    expected = endless[: where + len(stop)] if include else endless[:where]
    body = {
        "prompt": ids_of(tokenizer, TEXT), "max_tokens": 300, "stop": [stop, "unseen"], "ignore_eos": True,
        "include_stop_str_in_output": include, "stream_options": {"include_usage": True},
    }  # fmt: skip
    events = echo.events("/v1/completions", body)
    assert text_of(events) == expected
    last = events[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
    assert all("stop_reason" not in event["choices"][0] for event in events[:-2])
    body.pop("stream_options")
    whole = echo.post("/v1/completions", body).json()
    assert whole["choices"][0]["text"] == expected
    assert whole["choices"][0]["stop_reason"] == stop
    assert whole["usage"] == events[-1]["usage"]
    assert whole["usage"]["completion_tokens"] < 300


def test_every_token_comes_on_its_own(echo: Running, tokenizer: ServerTokenizer) -> None:
    ids = ids_of(tokenizer, "one two three four five")
    body = {
        "prompt": ids, "max_tokens": len(ids), "ignore_eos": True, "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    events = echo.events("/v1/completions", body)
    chunks = [event for event in events if event["choices"]]
    assert [token for event in chunks for token in event["choices"][0]["token_ids"]] == ids
    assert chunks[0]["choices"][0]["prompt_token_ids"] == ids
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == len(ids)
    # Several tokens may share a chunk only when they arrive together: here they are a millisecond apart.
    assert len(chunks) > len(ids) / 2


def test_line_breaks_of_unicode_do_not_cut_an_event(echo: Running, tokenizer: ServerTokenizer) -> None:
    text = "one \u0085 two \u2028 three \u2029 four"
    ids = ids_of(tokenizer, text)
    # httpx, as many clients, ends a line at each of them.
    assert text_of(echo.events("/v1/completions", {"prompt": ids, "max_tokens": len(ids), "ignore_eos": True})) == text


def test_end_of_sequence_token_stops(echo: Running, tokenizer: ServerTokenizer) -> None:
    ids = [*ids_of(tokenizer, "one two"), 2]
    answer = echo.post("/v1/completions", {"prompt": ids, "max_tokens": 50}).json()
    assert answer["choices"][0]["text"] == "one two"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(ids)
    more = echo.post("/v1/completions", {"prompt": ids, "max_tokens": 50, "ignore_eos": True}).json()
    assert more["usage"]["completion_tokens"] == 50
    late = echo.post("/v1/completions", {"prompt": ids, "max_tokens": 50, "min_tokens": len(ids) + 1}).json()
    assert late["usage"]["completion_tokens"] == 2 * len(ids)


def test_what_the_load_generator_sends(echo: Running) -> None:
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "hello there"}], "stream": True,
        "stream_options": {"include_usage": True}, "max_completion_tokens": 32, "min_tokens": 32, "ignore_eos": True,
    }  # fmt: skip
    events = echo.events("/v1/chat/completions", body)
    assert events[-1]["usage"]["completion_tokens"] == 32
    assert [c["finish_reason"] for e in events for c in e["choices"]][-1] == "length"
    assert len({event["id"] for event in events}) == 1


def test_many_streams_at_once(echo: Running, tokenizer: ServerTokenizer) -> None:
    def one(number: int) -> bool:
        text = f"request {number} {TEXT}"
        ids = ids_of(tokenizer, text)
        body = {"prompt": ids, "max_tokens": len(ids), "ignore_eos": True}
        if number % 2:
            return text_of(echo.events("/v1/completions", body)) == text
        return bool(echo.post("/v1/completions", body).json()["choices"][0]["text"] == text)

    with ThreadPoolExecutor(48) as pool:
        assert all(pool.map(one, range(96)))


def test_full_queue_is_429(narrow: Running) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: narrow.post("/v1/completions", body), range(6)))
    codes = sorted(answer.status_code for answer in answers)
    assert codes.count(200) >= 1
    assert codes.count(429) >= 3, codes
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert "SPARKINFER_MAX_QUEUE is 1" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"] == "1"
    # Three choices and two places: that will never fit, so trying again is no advice.
    never = narrow.post("/v1/completions", {**body, "n": 3})
    assert (never.status_code, never.headers.get("retry-after")) == (400, None)
    assert "3 answers and this server takes 2" in never.json()["error"]["message"]
    assert narrow.post("/v1/completions", body).status_code == 200


def test_late_requests_are_504(narrow: Running) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True}
    answer = narrow.post("/v1/completions", body)
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "timeout_error"
    assert "SPARKINFER_REQUEST_TIMEOUT_S" in answer.json()["error"]["message"]
    with narrow.http.stream("POST", narrow.url + "/v1/completions", json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert response.status_code == 200
    assert json.loads(lines[0])["choices"]
    assert json.loads(lines[-1])["error"]["code"] == 504
    deadline = time.monotonic() + 5
    while narrow.metrics()["sparkinfer_running"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert narrow.metrics()["sparkinfer_running"] == narrow.metrics()["sparkinfer_kv_blocks_used"] == 0


def test_disconnect_frees_the_place(narrow: Running) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True, "stream": True}
    name = 'sparkinfer_requests_finished_total{reason="cancelled"}'
    before = narrow.metrics().get(name, 0)
    with narrow.http.stream("POST", narrow.url + "/v1/completions", json=body) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 5
    while narrow.metrics().get(name, 0) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    metrics = narrow.metrics()
    assert metrics[name] == before + 1
    assert metrics["sparkinfer_request_output_tokens_total"] > 0
    assert narrow.http.get(narrow.url + "/v1/capacity").json()["requests_accepted_now"] == 2
