"""Sampling: the hash bit for bit, the distribution, the filters, and independence of the neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from sparkinfer_kernels.sampler import reference as sampler
from sparkinfer_kernels.sampler.reference import SamplingBatch, noise_keys

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def splitmix64(x):
    x = (x + 0x9E3779B97F4A7C15) & M64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & M64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & M64
    return x ^ (x >> 31)


def lowbias32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D & M32
    x = (x ^ (x >> 15)) * 0x846CA68B & M32
    return x ^ (x >> 16)


def batch(rows, temperature=1.0, seed=0, index=0, **fields):
    """Rows that differ only in their output index."""
    keys = torch.from_numpy(noise_keys([seed] * rows, range(index, index + rows)))
    return SamplingBatch(temperature=torch.full((rows,), temperature), keys=keys, **fields)


def test_splitmix64_known_value():
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # first output of the published generator with seed 0


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5, -3])
def test_noise_is_the_documented_integer_hash(seed):
    for index in (0, 1, 77):
        key = splitmix64((splitmix64(seed & M64) + index) & M64)
        noise = sampler.gumbel_noise(torch.from_numpy(noise_keys([seed], [index])), 1000)[0]
        for token in (0, 1, 500, 999):
            h = lowbias32(lowbias32((token + (key & M32)) & M32) ^ (key >> 32))
            u = float(torch.tensor(float(h), dtype=torch.float32) + 0.5) * 2.0**-32
            assert noise[token].item() == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-5, abs=1e-5)


def test_noise_is_standard_gumbel():
    noise = sampler.gumbel_noise(torch.from_numpy(noise_keys(range(64), [3] * 64)), 4096)
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    rows = torch.corrcoef(noise)
    assert (rows - torch.eye(64)).abs().max() < 0.09


def test_samples_follow_the_softmax():
    draws = 40000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    temperature = 0.8
    tokens = sampler.sample(logits.expand(draws, -1).clone(), batch(draws, temperature, seed=9))
    counts = torch.bincount(tokens, minlength=5).double()
    expected = (logits / temperature).softmax(0).double() * draws
    chi2 = ((counts - expected) ** 2 / expected).sum().item()
    assert chi2 < 20.0, f"chi square {chi2} with 4 degrees of freedom: {counts.tolist()}"


def support(logits, **fields):
    draws = 4000
    columns = {name: torch.full((draws,), value) for name, value in fields.items() if name != "max_top_k"}
    extra = {"max_top_k": fields["max_top_k"]} if "max_top_k" in fields else {}
    tokens = sampler.sample(logits.expand(draws, -1).clone(), batch(draws, seed=4, **columns, **extra))
    return set(tokens.tolist())


def test_filters_keep_what_they_say():
    logits = torch.tensor([0.4, 0.1, 0.3, 0.2]).log()
    assert support(logits) == {0, 1, 2, 3}
    assert support(logits, top_k=2, max_top_k=2) == {0, 2}
    assert support(logits, top_k=2) == {0, 2}
    assert support(logits, top_p=0.69) == {0, 2}
    assert support(logits, top_p=0.71) == {0, 2, 3}
    assert support(logits, top_p=1e-6) == {0}
    assert support(logits, min_p=0.7) == {0, 2}
    # top-p works on what top-k left, renormalised: 0.4 / 0.7 = 0.571.
    assert support(logits, top_k=2, max_top_k=2, top_p=0.56) == {0}
    assert support(logits, top_k=2, max_top_k=2, top_p=0.58) == {0, 2}
    assert support(logits, top_k=3, max_top_k=3, min_p=0.7) == {0, 2}
    assert support(torch.zeros(4), top_k=2, max_top_k=2) == {0, 1, 2, 3}, "equal logits pass together"


def test_a_row_does_not_depend_on_its_neighbours():
    torch.manual_seed(0)
    rows, vocab = 12, 300
    logits = torch.randn(rows, vocab) * 3
    logits = (logits * 8).round() / 8  # many ties, as bf16 has
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.5] * 3)
    top_k = torch.tensor([0, 5, 40, 0, 0, 3, 0, 0, 20, 0, 1, 0])
    top_p = torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0, 0.3, 1.0, 1.0, 1.0, 0.95, 1.0, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0])
    keys = torch.from_numpy(noise_keys(range(rows), [7] * rows))
    together = sampler.sample(logits.clone(), SamplingBatch(temperature, keys, top_k, 0, top_p, min_p))
    for row in range(rows):
        one = slice(row, row + 1)
        k = int(top_k[row])
        alone = SamplingBatch(
            temperature=temperature[one] if temperature[row] else None,
            keys=keys[one],
            top_k=top_k[one] if k else None,
            max_top_k=k,
            top_p=top_p[one] if top_p[row] < 1 else None,
            min_p=min_p[one] if min_p[row] else None,
        )
        assert sampler.sample(logits[one].clone(), alone)[0] == together[row], f"row {row}"


def test_greedy_rows_take_the_largest_and_bans_hold():
    logits = torch.randn(3, 50)
    assert torch.equal(sampler.sample(logits.clone(), SamplingBatch()), logits.argmax(-1))
    mixed = batch(3, temperature=0.0)
    assert torch.equal(sampler.sample(logits.clone(), mixed), logits.argmax(-1))
    best = logits.argmax(-1)
    banned = SamplingBatch(banned=(torch.tensor([1]), best[1:2]))
    got = sampler.sample(logits.clone(), banned)
    assert got[0] == best[0]
    assert got[1] == logits[1].topk(2).indices[1]


def test_logprobs_of_the_raw_distribution(assert_close):
    logits = torch.randn(4, 30) * 2
    tokens = torch.tensor([0, 5, 7, 29])
    chosen, rank, ids, values = sampler.logprobs(logits, tokens, 3)
    table = logits.double().log_softmax(-1)
    assert_close("chosen", chosen, table[torch.arange(4), tokens])
    expected_rank = [int((table[row] > table[row, token]).sum()) + 1 for row, token in enumerate(tokens)]
    assert rank.tolist() == expected_rank
    assert torch.equal(ids, table.topk(3).indices)
    assert_close("top", values, table.topk(3).values)
