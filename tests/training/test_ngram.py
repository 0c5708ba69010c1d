"""The Kneser-Ney yardstick: a distribution, and the textbook's numbers on a case small enough to do by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from sparkinfer_models.ngram import KneserNey

from sparkinfer.errors import ConfigError


def test_probabilities_sum_to_one_for_seen_and_unseen_contexts() -> None:
    ids = np.random.default_rng(0).zipf(1.3, 5000) % 16
    model = KneserNey(ids, 16)
    for context in ([1, 2, 1, 1], [15, 15, 15, 15], [0, 9, 3, 7], list(ids[100:104])):
        total = sum(float(model.probabilities(np.array([*context, word]))[0]) for word in range(16))
        assert total == pytest.approx(1.0, abs=1e-9)


def test_bigram_agrees_with_a_plain_implementation() -> None:
    ids = np.random.default_rng(1).zipf(1.5, 400) % 8
    model = KneserNey(ids, 8, order=2)
    pairs = list(itertools.pairwise(ids.tolist()))
    counts = {pair: pairs.count(pair) for pair in set(pairs)}
    distinct = {word: len({a for a, b in counts if b == word}) for word in range(8)}

    def discounts(values: list[int]) -> list[float]:
        n = [max(1, sum(v == k for v in values)) for k in (1, 2, 3, 4)]
        y = n[0] / (n[0] + 2 * n[1])
        raw = [k - (k + 1) * y * n[k] / n[k - 1] for k in (1, 2, 3)]
        return [0.0] + [min(max(d, 0.05), k - 0.05) for k, d in enumerate(raw, 1)]

    high = discounts(list(counts.values()))
    low = discounts([v for v in distinct.values() if v])
    total = sum(distinct.values())
    for a, b in ((1, 1), (2, 5), (7, 0), (3, 3)):
        unigram = max(distinct[b] - low[min(distinct[b], 3)], 0) / total
        unigram += sum(low[min(v, 3)] for v in distinct.values()) / total / 8
        followers = {w: c for (first, w), c in counts.items() if first == a}
        expected = unigram
        if followers:
            seen = sum(followers.values())
            count = followers.get(b, 0)
            expected = max(count - high[min(count, 3)], 0) / seen
            expected += sum(high[min(c, 3)] for c in followers.values()) / seen * unigram
        assert float(model.probabilities(np.array([a, b]))[0]) == pytest.approx(expected, rel=1e-9)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        KneserNey(np.arange(100), 50_000)
    with pytest.raises(ConfigError, match="too few"):
        KneserNey(np.arange(4), 16)
