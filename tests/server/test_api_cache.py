"""The prefix cache as users and operators see it over HTTP."""

from __future__ import annotations

import itertools
from pathlib import Path

from running_server import start, wait_idle

TRAINED = Path(__file__).parents[2] / "models" / "spark-tiny-dense"


def test_a_prefix_cache_under_pressure_shows_in_the_metrics(model_dir: Path, tmp_path: Path) -> None:
    """Hits, bytes, evictions, and KV blocks that go to the host and come back, over HTTP."""
    flags = ["--port", "0", "--dtype", "float32", "--max-num-seqs", "2", "--max-model-len", "320", "--kv-cache-mb", "1",
             "--snapshot-pool-mb", "1", "--prefix-cache-host-kv-mb", "1"]  # fmt: skip
    with start(["-m", "sparkinfer.cli", "serve", str(model_dir), *flags], tmp_path / "log") as server:
        start_of = server.metrics()
        assert start_of["sparkinfer_host_blocks_total"] > 0

        def ask(first: int, length: int = 300) -> int:
            prompt = [3 + (first + place) % 1000 for place in range(length)]
            answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, "ignore_eos": True})
            assert answer.status_code == 200, answer.text
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert ask(0) == 0
        cold = wait_idle(server)
        assert cold["sparkinfer_prefix_hits_tokens_total"] == 0
        assert cold["sparkinfer_prefix_bytes"] > 0
        cached = ask(0)
        warm = wait_idle(server)
        assert warm["sparkinfer_prefix_hits_tokens_total"] == cached > 200
        assert warm["sparkinfer_prefix_queries_tokens_total"] == 600
        for number in range(1, 40):
            ask(number * 23)
            ask(0)
            metrics = wait_idle(server)
            if metrics["sparkinfer_moves_to_device_total"] and metrics["sparkinfer_prefix_evictions_total"]:
                break
        assert metrics["sparkinfer_prefix_evictions_total"] > 0
        assert metrics["sparkinfer_moves_to_host_total"] >= metrics["sparkinfer_host_blocks_used"] > 0
        assert metrics["sparkinfer_moves_to_device_total"] > 0


def test_a_chat_of_three_turns_hits_its_own_answers(tmp_path: Path) -> None:
    """What the cache holds of a turn reaches beyond the turn's prompt, into the answer before it.

    The model is a trained one: text of a random one comes back from the tokenizer as other tokens.
    """
    messages = [{"role": "user", "content": "Write a story about a little girl who finds a cat."}]
    counts = []
    flags = ["--port", "0", "--max-num-seqs", "1", "--max-model-len", "768", "--prefill-chunk", "256"]
    with start(["-m", "sparkinfer.cli", "serve", str(TRAINED), *flags], tmp_path / "log") as server:
        for _ in range(3):
            body = {"messages": messages, "max_tokens": 40, "temperature": 0}
            answer = server.post("/v1/chat/completions", body).json()
            usage = answer["usage"]
            counts.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "Please go on."}]
    for (asked, _), (_, cached) in itertools.pairwise(counts):
        assert cached > asked, counts
