"""The GPU's sampler chooses the reference's tokens from the same logits; interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from interpreter_fixes import fix_interpreter
from sparkinfer_kernels.sampler import gpu as sampler
from sparkinfer_kernels.sampler import reference

fix_interpreter()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TEMPERATURE = [0, 1, 0.5, 2, 1, 1, 1, 0.7, 1.3]
TOP_K = [5, 0, 20, 1, 3000, 50, 0, 0, 70]
TOP_P = [0.9, 0.9, 1, 0.5, 0.8, 0.95, 1, 0.01, 0.999]
MIN_P = [0, 0, 0, 0, 0, 0.1, 0.2, 0, 0.05]
M = len(TEMPERATURE)


def tensors(filters, **banned):
    ints = lambda values, dtype=torch.int32: torch.tensor(values, dtype=dtype, device=DEVICE)  # noqa: E731
    floats = lambda values: torch.tensor(values, dtype=torch.float32, device=DEVICE)  # noqa: E731
    keys = torch.from_numpy(reference.noise_keys(range(M), range(5, 5 + M))).to(DEVICE)
    if not filters:
        return sampler.SamplingTensors(
            floats(TEMPERATURE), keys, ints([0] * M), floats([1] * M), floats([0] * M), **banned
        )
    return sampler.SamplingTensors(floats(TEMPERATURE), keys, ints(TOP_K), floats(TOP_P), floats(MIN_P), **banned)


def plain(logits, given):
    batch = reference.SamplingBatch(given.temperature, given.keys, given.top_k.long(), 0, given.top_p, given.min_p)
    return batch, reference.sample(logits.float().clone(), batch)


def make_logits(kind, vocab):
    logits = torch.randn(M, vocab, device=DEVICE)
    if kind == "sharp, many ties":
        return (logits * 3).bfloat16()
    if kind == "flat":
        logits *= 0.3
        logits[0], logits[1] = 0.5, torch.randint(0, 3, (vocab,), device=DEVICE).float()
    if kind == "minus infinity":
        logits[:, vocab // 3 :] = -torch.inf
    return logits


@pytest.mark.parametrize(
    ("kind", "vocab"),
    [("gaussian", 2048), ("sharp, many ties", 5000), ("flat", 2048), ("minus infinity", 100)],
)
def test_tokens_are_the_references(kind, vocab):
    logits = make_logits(kind, vocab)
    before = logits.clone()
    work = sampler.make_workspace(M, vocab, DEVICE)
    out = torch.full((M,), -1, dtype=torch.int64, device=DEVICE)
    simple, filtered = tensors(False), tensors(True)
    assert torch.equal(sampler.sample(logits, simple, "sample", work, out), plain(logits, simple)[1])
    batch, expected = plain(logits, filtered)
    assert torch.equal(sampler.sample(logits, filtered, "filter", work, out), expected)
    assert torch.equal(logits, before)
    # not only the tokens: as many tokens pass as in the reference
    scaled = logits.float() / filtered.temperature.masked_fill(filtered.temperature == 0, 1.0)[:, None]
    pivot = reference._pivot(scaled, batch)
    mine, theirs = (scaled >= work.pivot[:, None]).sum(1), (scaled >= pivot).sum(1)
    live = (filtered.temperature > 0).cpu()
    assert mine.cpu()[live].tolist() == theirs.cpu()[live].tolist()


def test_greedy_with_bans_and_ties():
    logits = torch.zeros(M, 3000, device=DEVICE)
    logits[:, [10, 2500]] = 1.0
    work = sampler.make_workspace(M, 3000, DEVICE)
    out = torch.empty(M, dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([0, -1, 2, 2, -1], dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([10, 0, 10, 2500, 0], dtype=torch.int32, device=DEVICE)
    given = tensors(False, banned_rows=rows, banned_tokens=tokens)
    before = logits.clone()
    sampler.sample(logits, given, "greedy", work, out)
    assert out.tolist() == [2500, 10, 0] + [10] * (M - 3)
    assert torch.equal(logits, before)


def test_fewer_rows_than_the_workspace_and_strides():
    logits = torch.randn(3, 4000, device=DEVICE)[:, :2100]
    work = sampler.make_workspace(20, 2100, DEVICE)
    given = tensors(True)
    part = sampler.SamplingTensors(
        given.temperature[1:4], given.keys[1:4], given.top_k[1:4], given.top_p[1:4], given.min_p[1:4]
    )
    out = torch.empty(3, dtype=torch.int64, device=DEVICE)
    assert torch.equal(sampler.sample(logits, part, "filter", work, out), plain(logits, part)[1])


@pytest.mark.parametrize("top", [0, 5, 20])
def test_logprobs(top):
    logits = torch.randn(M, 2500, device=DEVICE)
    tokens = logits.argsort(descending=True)[:, 3].contiguous()
    work = sampler.make_workspace(M, 2500, DEVICE)
    chosen, rank, ids, values = sampler.logprobs(logits, tokens, top, work)
    expected = reference.logprobs(logits, tokens, top)
    assert (chosen - expected[0]).abs().max() < 1e-5
    assert rank.tolist() == [4] * M == expected[1].tolist()
    assert torch.equal(ids.long(), expected[2])
    if top:
        assert (values - expected[3]).abs().max() < 1e-5


def test_bad_input():
    work = sampler.make_workspace(2, 100, DEVICE)
    logits = torch.zeros(3, 100, device=DEVICE)
    with pytest.raises(ValueError, match="workspace of 2 rows"):
        sampler.sample(logits, tensors(False), "greedy", work, torch.empty(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="0 to 32"):
        sampler.logprobs(logits[:2], torch.zeros(2, dtype=torch.int32), 33, work)
