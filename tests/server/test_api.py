"""The API over a real engine with a tiny random model, mostly through the official client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import SIZE, Running, wait_idle

import sparkinfer
from sparkinfer.identity import engine_digest, file_sha256, model_digest
from sparkinfer.server.tokenizer import ServerTokenizer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something, größe 你好."}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)


def test_chat_whole_and_streamed_agree(client: openai.OpenAI, tokenizer: ServerTokenizer) -> None:
    fields = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**fields, extra_body={"ignore_eos": True})
    stream = client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason == "length"
    prompt = tokenizer.render_chat(MESSAGES, True, {})
    count = len(tokenizer.backend.encode(prompt, add_special_tokens=False).ids)
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (count, 12, count + 12)
    assert chunks[-1].choices == []
    assert all(c.usage is None for c in chunks[:-1])


def test_completion_forms_agree(client: openai.OpenAI, tokenizer: ServerTokenizer) -> None:
    ids = tokenizer.backend.encode(PROMPT).ids
    fields = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    texts = client.completions.create(prompt=[PROMPT, "Other"], **fields)
    by_ids = client.completions.create(prompt=[ids, ids], **fields)
    one = client.completions.create(prompt=ids, **fields)
    assert [c.index for c in texts.choices] == [0, 1]
    assert texts.choices[0].text == by_ids.choices[0].text == by_ids.choices[1].text == one.choices[0].text
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == 2 * len(ids)
    stream = client.completions.create(prompt=ids, stream=True, **fields)
    assert "".join(chunk.choices[0].text for chunk in stream) == one.choices[0].text


def test_default_length_is_openais(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def sampled(server: Running, seed: int, **more: Any) -> str:
    body = {"prompt": PROMPT, "max_tokens": 20, "seed": seed, "temperature": 0.9, "top_p": 0.95, "top_k": 50, **more}
    response = server.post("/v1/completions", {**body, "ignore_eos": True})
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_seeds_repeat_whatever_the_neighbours(server: Running) -> None:
    alone = {seed: sampled(server, seed) for seed in range(6)}
    assert len(set(alone.values())) > 1
    with ThreadPoolExecutor(12) as pool:
        crowd = [pool.submit(sampled, server, seed, prompt=PROMPT) for seed in (0, 1, 2, 3, 4, 5)]
        noise = [pool.submit(sampled, server, seed, prompt="x" * seed) for seed in (40, 77, 300, 11)]
        assert [future.result() for future in crowd] == list(alone.values())
        assert all(future.result() for future in noise)


def test_the_least_temperatures_are_greedy(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    ids = [
        server.post("/v1/completions", {**body, "temperature": value}).json()["choices"][0]["token_ids"]
        for value in (0, 1e-44, 1e-40, 1e-38, 1e-6)
    ]
    assert len(ids[0]) == 6
    assert all(other == ids[0] for other in ids)


def test_choices_differ_and_the_first_has_the_seed(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "seed": 5, "temperature": 1.2, "n": 3, "ignore_eos": True}
    answer = server.post("/v1/completions", body).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    single = server.post("/v1/completions", {**body, "n": 1}).json()
    assert single["choices"][0]["text"] == texts[0]
    assert answer["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 60
    streamed = {index: "" for index in range(3)}
    for event in server.events("/v1/completions", body):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == texts


def test_chat_logprobs(client: openai.OpenAI, server: Running) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    answer = client.chat.completions.create(**fields, logprobs=True, top_logprobs=3)
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert answer.usage is not None
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    joined = b""
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        best = entry.top_logprobs[0]
        assert (best.token, best.logprob) == (entry.token, entry.logprob)  # greedy takes the likeliest
        assert entry.logprob <= 0
        assert [t.logprob for t in entry.top_logprobs] == sorted((t.logprob for t in entry.top_logprobs), reverse=True)
        joined += bytes(entry.bytes or [])
    text = choice.message.content or ""
    assert joined.decode(errors="replace").startswith(text)
    events = server.events("/v1/chat/completions", {**fields, "logprobs": True, "top_logprobs": 3})
    streamed = [e for event in events for c in event["choices"] for e in (c["logprobs"] or {"content": []})["content"]]
    assert [e["logprob"] for e in streamed] == [e.logprob for e in choice.logprobs.content]
    plain = client.chat.completions.create(**fields)
    assert plain.choices[0].logprobs is None
    assert plain.choices[0].message.content == text


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or []) == len(logprobs.text_offset)
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs or [], logprobs.top_logprobs, strict=True):
        assert max(top.values()) == value == top[token]
    assert logprobs.text_offset[0] == 0


def test_prompt_logprobs_and_echo(server: Running, tokenizer: ServerTokenizer) -> None:
    ids = tokenizer.backend.encode(PROMPT * 30, add_special_tokens=False).ids
    body = {"prompt": ids, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    # What was computed before must not be missing: positions from the prefix cache have no log-probabilities.
    server.post("/v1/completions", body)
    scored = server.post("/v1/completions", {**body, "prompt_logprobs": 3}).json()["choices"][0]
    assert scored["logprobs"] is None
    assert scored["prompt_logprobs"][0] is None
    assert len(scored["prompt_logprobs"]) == len(ids)
    for token, entry in zip(ids[1:], scored["prompt_logprobs"][1:], strict=True):
        own = entry[str(token)]
        assert len(entry) == (3 if own["rank"] <= 3 else 4)
        assert all(own["logprob"] >= e["logprob"] for e in entry.values() if e["rank"] > own["rank"])
    echoed = {**body, "echo": True, "logprobs": 3, "return_tokens_as_token_ids": True}
    both = server.post("/v1/completions", echoed).json()
    assert both["choices"][0]["text"] == PROMPT * 30 + scored["text"]
    logprobs = both["choices"][0]["logprobs"]
    assert logprobs["tokens"][: len(ids)] == [f"token_id:{token}" for token in ids]
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(ids) + 2
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    own = [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], scored["prompt_logprobs"][1:], strict=True)]
    assert logprobs["token_logprobs"][1 : len(ids)] == own
    assert len(logprobs["top_logprobs"][1]) == 3
    assert "token_id:" in next(iter(logprobs["top_logprobs"][1]))
    only = server.post("/v1/completions", {**echoed, "max_tokens": 0}).json()
    assert only["choices"][0]["text"] == PROMPT * 30
    assert only["choices"][0]["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][: len(ids)]
    assert only["usage"]["completion_tokens"] == 0
    assert server.post("/v1/completions", {**body, "echo": True}).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("prompt_logprobs", {"prompt_logprobs": 3, "stream": True}),
        ("echo", {"echo": True, "stream": True}),
        ("n", {"prompt_logprobs": 1, "n": 2}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("max_tokens", {"max_tokens": 0}),
    ],
)
def test_prompt_logprobs_refused(server: Running, field: str, body: dict[str, Any]) -> None:
    answer = server.post("/v1/completions", {"prompt": PROMPT, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_stop_string_of_a_real_answer(server: Running) -> None:
    full = server.post("/v1/chat/completions", {**CHAT, "max_tokens": 30}).json()["choices"][0]["message"]["content"]
    stop = full[10:14]
    where = full.find(stop)
    for include in (False, True):
        body = {**CHAT, "max_tokens": 30, "stop": [stop, "never there"], "include_stop_str_in_output": include}
        answer = server.post("/v1/chat/completions", body).json()
        expected = full[: where + len(stop)] if include else full[:where]
        assert answer["choices"][0]["message"]["content"] == expected
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] < 30
        parts = [c["delta"]["content"] for e in server.events("/v1/chat/completions", body) for c in e["choices"]]
        assert "".join(parts) == expected
    wait_idle(server)


def test_stop_token_ids_and_min_tokens(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    tokens = server.post("/v1/completions", body).json()["choices"][0]["token_ids"]
    assert len(tokens) == 20
    stop = tokens[5]
    first = tokens.index(stop)
    answer = server.post("/v1/completions", {**body, "stop_token_ids": [stop]}).json()
    assert answer["choices"][0]["token_ids"] == tokens[: first + 1]
    assert answer["choices"][0]["finish_reason"] == "stop"
    later = server.post("/v1/completions", {**body, "stop_token_ids": [stop], "min_tokens": first + 2}).json()
    assert later["usage"]["completion_tokens"] >= first + 2


def test_prefix_cache_counts_and_reset(server: Running) -> None:
    words = " ".join(f"word{number}" for number in range(60))
    body = {"prompt": words, "max_tokens": 4, "temperature": 0, "cache_salt": "only this test"}

    def ask(**more: Any) -> tuple[str, int]:
        answer = server.post("/v1/completions", {**body, **more}).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    cold, cached = ask()
    assert cached == 0
    warm, cached = ask()
    assert warm == cold
    assert cached > 0
    assert ask(use_cache=False) == (cold, 0)
    assert ask(cache_salt="another") == (cold, 0)
    wait_idle(server)
    dropped = server.post("/v1/cache/reset", {}).json()
    assert dropped["dropped_blocks"] > 0
    assert dropped["dropped_snapshots"] > 0
    assert wait_idle(server)["sparkinfer_kv_blocks_used"] == 0
    assert ask() == (cold, 0)


def test_disconnect_cancels_the_request(server: Running) -> None:
    server.post("/v1/cache/reset", {})
    body = {**CHAT, "max_tokens": 1900, "stream": True, "use_cache": False}
    before = server.metrics()['sparkinfer_requests_finished_total{reason="length"}']
    with server.http.stream("POST", server.url + "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    assert wait_idle(server)["sparkinfer_kv_blocks_used"] == 0
    with pytest.raises(httpx.ReadTimeout):
        server.post("/v1/chat/completions", {**body, "stream": False}, timeout=0.2)
    metrics = wait_idle(server)
    assert metrics["sparkinfer_kv_blocks_used"] == 0
    assert metrics['sparkinfer_requests_finished_total{reason="length"}'] == before
    assert metrics['sparkinfer_requests_finished_total{reason="cancelled"}'] >= 2


def test_prompt_beyond_the_context(client: openai.OpenAI) -> None:
    length = SIZE.max_positions
    with pytest.raises(openai.BadRequestError, match=rf"{length + 5} tokens.*{length}") as caught:
        client.completions.create(model="tiny", prompt=[7] * (length + 5), max_tokens=1)
    assert caught.value.body["param"] == "prompt"  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match=r"`max_tokens` is 100 .* at most 8"):
        client.completions.create(model="tiny", prompt=[7] * (length - 8), max_tokens=100)
    answer = client.completions.create(
        model="tiny", prompt=[7] * (length - 3), max_tokens=3, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == length


def test_unknown_model_and_path(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.completions.create(model="gpt-4", prompt="x")
    assert server.post("/v1/nothing", {}).json()["error"]["type"] == "not_found_error"
    refused = httpx.get(server.url + "/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["type"] == "invalid_request_error"


def test_information(server: Running, model_dir: Any) -> None:
    info = httpx.get(server.url + "/v1/info").json()
    assert info["version"] == sparkinfer.__version__
    assert info["engine_digest"] == engine_digest()
    assert info["model_digest"] == model_digest(model_dir)
    assert info["model_files"]["config.json"] == file_sha256(model_dir / "config.json")
    assert info["limits"]["max_model_len"] == SIZE.max_positions
    assert info["limits"]["max_num_seqs"] == info["settings"]["SPARKINFER_MAX_NUM_SEQS"] == 8
    assert info["engine"]["memory"]["kv_bytes"] == 16 << 20
    models = httpx.get(server.url + "/v1/models").json()["data"]
    assert [entry["id"] for entry in models] == ["tiny"]
    assert httpx.get(server.url + "/v1/models/tiny").json() == models[0]
    assert httpx.get(server.url + "/v1/models/other/one").json()["error"]["code"] == "model_not_found"
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    capacity = httpx.get(server.url + "/v1/capacity").json()
    assert capacity["requests_accepted_now"] == 8 + 1024
    assert 0 < capacity["kv_tokens_free"] <= capacity["kv_tokens_total"]


def test_tokenize_and_back(server: Running, tokenizer: ServerTokenizer) -> None:
    text = "größe 你好 🙂 " * 400
    answer = server.post("/v1/tokenize", {"prompt": text}).json()
    assert answer["tokens"] == tokenizer.backend.encode(text).ids
    assert answer["count"] == len(answer["tokens"])
    assert server.post("/v1/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}
    chat = server.post("/v1/tokenize", {"messages": MESSAGES}).json()
    assert tokenizer.decode(chat["tokens"]) == tokenizer.render_chat(MESSAGES, True, {})
    assert server.post("/v1/tokenize", {}).status_code == 400


def test_metrics_parse_and_add_up(server: Running) -> None:
    before = server.metrics()
    server.post("/v1/chat/completions", CHAT)
    text = httpx.get(server.url + "/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    after = wait_idle(server)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("sparkinfer_request_output_tokens_total") == 12
    assert grown('sparkinfer_requests_finished_total{reason="length"}') == 1
    assert grown("sparkinfer_time_to_first_token_seconds_count") == 1
    assert grown("sparkinfer_inter_token_seconds_count") == 11
    assert grown("sparkinfer_request_seconds_count") == 1
    assert families["sparkinfer_inter_token_seconds"].type == "histogram"
    assert families["sparkinfer_kv_blocks_total"].type == "gauge"
    assert families["sparkinfer_preemptions"].type == "counter"
    buckets = [s for s in families["sparkinfer_inter_token_seconds"].samples if s.name.endswith("_bucket")]
    assert [s.value for s in buckets] == sorted(s.value for s in buckets)
    assert buckets[-1].labels["le"] == "+Inf"


BAD: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("chat", {"messages": []}, "empty", "messages"),
    ("chat", {"messages": "hello"}, "array", "messages"),
    ("chat", {}, "messages", "messages"),
    ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "robot", "messages[0].role"),
    ("chat", {"messages": [{"role": "user", "content": 5}]}, "text", "messages[0].content"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "image_url",
        "messages[0].content[0]",
    ),
    ("chat", {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools", "tools"),
    ("chat", {"messages": MESSAGES, "response_format": {"type": "json_object"}}, "response_format", "response_format"),
    ("chat", {"messages": MESSAGES, "presence_penalty": 0.5}, "presence_penalty", "presence_penalty"),
    ("chat", {"messages": MESSAGES, "logit_bias": {"5": 1}}, "logit_bias", "logit_bias"),
    ("chat", {"messages": MESSAGES, "top_logprobs": 2}, "logprobs", "top_logprobs"),
    ("chat", {"messages": MESSAGES, "max_tokns": 2}, "did you mean `max_tokens`", "max_tokns"),
    ("chat", {"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream", "stream_options"),
    (
        "chat",
        {"messages": MESSAGES, "stream": True, "stream_options": {"include_usge": True}},
        "stream_options.include_usage",
        "stream_options.include_usge",
    ),
    ("chat", {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}, "tokenize", "chat_template_kwargs"),
    (
        "chat",
        {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}},
        "cannot set messages",
        "chat_template_kwargs",
    ),
    ("chat", {"messages": MESSAGES, "chat_template_kwargs": {"self": 1}}, "cannot set self", "chat_template_kwargs"),
    ("text", {}, "prompt", "prompt"),
    ("text", {"prompt": ""}, "no tokens", "prompt"),
    ("text", {"prompt": []}, "not empty", "prompt"),
    ("text", {"prompt": [1, "a"]}, "list", "prompt"),
    ("text", {"prompt": [5000]}, "5000", "prompt"),
    ("text", {"prompt": [-1]}, "-1", "prompt"),
    ("text", {"prompt": "x", "max_tokens": 0}, "at least 1", "max_tokens"),
    ("text", {"prompt": "x", "max_tokens": "many"}, "int", "max_tokens"),
    ("text", {"prompt": "x", "temperature": -1}, "between", "temperature"),
    ("text", {"prompt": "x", "temperature": 3}, "between", "temperature"),
    ("text", {"prompt": "x", "top_p": 0}, "above 0", "top_p"),
    ("text", {"prompt": "x", "top_p": 1.5}, "between", "top_p"),
    ("text", {"prompt": "x", "top_k": -5}, "between", "top_k"),
    ("text", {"prompt": "x", "min_p": 2}, "between", "min_p"),
    ("text", {"prompt": "x", "n": 0}, "between", "n"),
    ("text", {"prompt": "x", "min_tokens": 17}, "between", "min_tokens"),
    ("text", {"prompt": "x", "logprobs": 21}, "between", "logprobs"),
    ("text", {"prompt": "x", "stop": ""}, "empty", "stop"),
    ("text", {"prompt": "x", "stop": ["a"] * 17}, "16", "stop"),
    ("text", {"prompt": "x", "stop_token_ids": [1024]}, "1024", "stop_token_ids"),
    ("text", {"prompt": "x", "seed": 1 << 70}, "", "seed"),
    ("text", {"prompt": "x", "best_of": 4}, "best_of", "best_of"),
    ("text", {"prompt": "x", "n": 10**400}, "int", "n"),
    ("text", {"prompt": "x", "priority": 1 << 64}, "int", "priority"),
    ("text", {"prompt": "x", "priority": -(1 << 70)}, "int", "priority"),
    ("text", {"prompt": "x", "priority": -(1 << 63)}, ">= -100", "priority"),
    ("text", {"prompt": "x", "priority": -101}, ">= -100", "priority"),
    ("chat", {"messages": MESSAGES, "priority": 101}, "<= 100", "priority"),
    ("text", {"prompt": ["x"] * 100_000, "n": 128}, "12800000 answers", None),
    ("chat", {"messages": MESSAGES, "echo": True}, "echo", "echo"),
    ("text", {"prompt": "x", "suffix": "y"}, "suffix", "suffix"),
    ("text", {"prompt": "x", "ignore_eos": "yes"}, "bool", "ignore_eos"),
]


@pytest.mark.parametrize(("kind", "body", "words", "param"), BAD, ids=[f"{b[0]}-{b[3]}-{i}" for i, b in enumerate(BAD)])
def test_bad_bodies(server: Running, kind: str, body: dict[str, Any], words: str, param: str | None) -> None:
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize("priority", [-100, 100])
def test_the_utmost_priorities_are_taken(server: Running, priority: int) -> None:
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "priority": priority}).status_code == 200


DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"prompt": "x", "temperature": NaN}', DEEP])
def test_malformed_json(server: Running, raw: bytes) -> None:
    response = httpx.post(server.url + "/v1/completions", content=raw, timeout=60)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


def test_fields_without_effect_pass(server: Running) -> None:
    extra = {
        "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True,
        "tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "presence_penalty": 0,
        "frequency_penalty": 0.0, "logit_bias": {}, "modalities": ["text"], "stop": None, "seed": None, "top_k": -1,
    }  # fmt: skip
    plain = server.post("/v1/chat/completions", CHAT).json()
    answer = server.post("/v1/chat/completions", {**CHAT, **extra})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain["choices"]


def test_text_parts_are_joined(server: Running) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "it"}]
    split = server.post("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": parts}]}).json()
    whole = server.post("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "Say it"}]}).json()
    assert split["choices"] == whole["choices"]
