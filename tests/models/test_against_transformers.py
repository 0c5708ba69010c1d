"""Logits and greedy tokens equal those of transformers, at every position, for odd shapes and lengths."""

from __future__ import annotations

import pytest
import torch

NAMES = ["dense", "dense-odd", "dense-linear-only", "dense-attention-first", "moe", "moe-odd"]
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 130]


def reference_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def reference_decode(model, tokens):
    """transformers' logits when it, too, takes one token at a time: same arithmetic, so a closer comparison."""
    if "full_attention" not in model.config.layer_types:
        return reference_logits(model, tokens)  # its cache needs an attention layer
    past, logits = None, []
    with torch.no_grad():
        for token in tokens:
            out = model(torch.tensor([[token]]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            logits.append(out.logits[0])
    return torch.cat(logits)


@pytest.mark.parametrize("name", NAMES)
def test_prefill_logits_at_every_position(checkpoint, make_driver, prompt, name):
    folder, model = checkpoint(name)
    driver = make_driver(folder, max_num_seqs=len(LENGTHS))
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    got = driver.logits([driver.row(driver.add(tokens)) for tokens in prompts])
    expected = torch.cat([reference_logits(model, tokens) for tokens in prompts])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_decode_logits_at_every_position(checkpoint, make_driver, prompt, name):
    """A sequence fed token by token from its first one, beside one that joins late."""
    folder, model = checkpoint(name)
    driver = make_driver(folder)
    long, late = prompt(70, 1), prompt(70, 2)
    first, second = driver.add(long), driver.add(late)
    got = [driver.logits([driver.row(first, 1)])]
    late_got = []
    for position in range(1, len(long)):
        rows = [driver.row(first, 1, is_decode=True)]
        if position == 20:
            rows.append(driver.row(second, 30, samples=False))
        elif position > 20 and second.num_computed < len(late):
            rows.append(driver.row(second, 1, is_decode=True))
        logits = driver.logits(rows)
        got.append(logits[:1])
        late_got.append(logits[1:])
    torch.testing.assert_close(torch.cat(got), reference_decode(model, long), rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(torch.cat(late_got), reference_decode(model, late), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["dense", "dense-odd", "moe"])
def test_greedy_tokens_equal_generate(checkpoint, make_driver, prompt, name):
    folder, model = checkpoint(name)
    driver = make_driver(folder)
    requests = [driver.add(prompt(length, seed)) for seed, length in enumerate([1, 33, 64, 100])]
    driver.run([driver.row(request) for request in requests])
    for _ in range(63):
        driver.run([driver.row(request) for request in requests])
    for request in requests:
        tokens = torch.tensor([request.prompt])
        expected = model.generate(tokens, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert request.output == expected[0, len(request.prompt) :].tolist()


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_batch_composition_and_chunk_size_change_no_token(checkpoint, make_driver, prompt, name):
    folder, _ = checkpoint(name)
    prompts = [prompt(length, 50 + length) for length in [90, 1, 64, 37, 129]]

    def alone():
        outputs = []
        for tokens in prompts:
            driver = make_driver(folder)
            request = driver.add(tokens)
            for _ in range(24):
                driver.run([driver.row(request)])
            outputs.append(request.output)
        return outputs

    def together(chunk: int):
        driver = make_driver(folder)
        requests = [driver.add(tokens) for tokens in prompts]
        while any(len(request.output) < 24 for request in requests):
            rows, budget = [], chunk
            for request in requests:
                left = request.num_tokens - request.num_computed
                if request.output:
                    rows.append(driver.row(request))
                elif budget:
                    rows.append(driver.row(request, min(left, budget)))
                    budget -= rows[-1].length
            driver.run(rows)
        return [request.output[:24] for request in requests]

    expected = alone()
    for chunk in (7, 16, 50, 64, 200, 1000):
        assert together(chunk) == expected, f"prefill chunk {chunk}"


def test_bf16_follows_transformers(checkpoint, make_driver, prompt):
    """In bf16 rounding differs; the logits stay within a few of its steps, judged against fp32 on the same weights."""
    folder, model = checkpoint("dense", torch.bfloat16)
    tokens = prompt(100, 3)
    driver = make_driver(folder, dtype="auto")
    assert driver.runner.dtype is torch.bfloat16
    got = driver.logits([driver.row(driver.add(tokens))])
    theirs = reference_logits(model, tokens).float()
    exact_driver = make_driver(folder, dtype="float32")
    exact = exact_driver.logits([exact_driver.row(exact_driver.add(tokens))])
    ours_off, theirs_off = (got - exact).pow(2).mean().sqrt(), (theirs - exact).pow(2).mean().sqrt()
    assert ours_off < 1.5 * theirs_off + 1e-3
