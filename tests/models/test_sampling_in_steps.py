"""Sampling parameters on their way through the runner."""

from __future__ import annotations

import pytest
import torch


def test_seeded_tokens_do_not_depend_on_neighbours_or_chunks(checkpoint, make_driver, prompt):
    folder, _ = checkpoint("dense")
    wishes = [
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_k": 10},
        {"temperature": 0.0},
        {"temperature": 1.3, "seed": 3, "top_p": 0.8, "min_p": 0.01},
    ]
    prompts = [prompt(20 + 7 * index, index) for index in range(4)]
    alone = []
    for tokens, wish in zip(prompts, wishes, strict=True):
        driver = make_driver(folder)
        request = driver.add(tokens, **wish)
        for _ in range(12):
            driver.run([driver.row(request)])
        alone.append(request.output)
    driver = make_driver(folder)
    requests = [driver.add(tokens, **wish) for tokens, wish in zip(prompts, wishes, strict=True)]
    driver.run([driver.row(request, 10, samples=False) for request in requests])
    for _ in range(12):
        driver.run([driver.row(request) for request in requests])
    assert [request.output for request in requests] == alone
    assert len({tuple(output) for output in alone}) == 4


def test_logprobs_beside_rows_without_them(checkpoint, make_driver, prompt):
    folder, model = checkpoint("dense")
    driver = make_driver(folder)
    tokens = prompt(30, 5)
    wishes = [{"logprobs": 3}, {}, {"logprobs": 0}, {"logprobs": 2, "temperature": 1.5, "top_k": 4, "seed": 6}]
    requests = [driver.add(tokens, **wish) for wish in wishes]
    result = driver.run([driver.row(request) for request in requests])
    with torch.no_grad():
        table = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
    first, none, empty, sampled = result.logprobs
    assert none is None
    assert first.rank == 1
    assert first.top_ids == table.topk(3).indices.tolist()
    assert first.top_logprobs == pytest.approx(table.topk(3).values.tolist(), abs=1e-3)
    assert first.logprob == pytest.approx(first.top_logprobs[0])
    assert (empty.top_ids, empty.top_logprobs) == ([], [])
    assert len(sampled.top_ids) == 2
    assert sampled.logprob == pytest.approx(table[result.tokens[3]].item(), abs=1e-3)


def test_min_tokens_keeps_ends_away(checkpoint, make_driver, prompt):
    folder, _ = checkpoint("dense")
    driver = make_driver(folder)
    free = driver.add(prompt(12, 1))
    driver.run([driver.row(free)])
    end = free.output[0]
    held = driver.add(prompt(12, 1), min_tokens=1, stop_token_ids=frozenset({end}), logprobs=1)
    by_eos = driver.add(prompt(12, 1), min_tokens=1)
    by_eos.eos_token_ids = frozenset({end})
    done = driver.add(prompt(12, 1), stop_token_ids=frozenset({end}))
    result = driver.run([driver.row(request) for request in (held, by_eos, done)])
    assert held.output[0] != end
    assert by_eos.output[0] == held.output[0]
    assert done.output[0] == end
    assert result.logprobs[0].top_ids == [end], "log-probabilities are of the raw distribution"
    assert result.logprobs[0].rank == 2
