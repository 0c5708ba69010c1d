"""An interpolated modified Kneser-Ney 5-gram over tokens, the yardstick for the trained models.

After Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling" (1999): three discounts per
order, estimated from the counts of counts; lower orders count the distinct words before an n-gram.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparkinfer.errors import ConfigError

ORDER = 5


@dataclass(frozen=True)
class _Level:
    """One order: sorted packed n-grams with counts, sorted contexts with what their interpolation needs."""

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    backoff: np.ndarray
    discounts: np.ndarray


def _discounts(counts: np.ndarray) -> np.ndarray:
    """D1, D2, D3+ of modified Kneser-Ney, indexed by min(count, 3)."""
    n = [max(1, int((counts == k).sum())) for k in range(1, 5)]
    y = n[0] / (n[0] + 2 * n[1])
    d = [k - (k + 1) * y * n[k] / n[k - 1] for k in (1, 2, 3)]
    return np.array([0.0, *(min(max(value, 0.05), k - 0.05) for k, value in enumerate(d, 1))])


class KneserNey:
    """Trained on a stream of ids below `vocab_size`; n-grams are packed into 64-bit keys."""

    def __init__(self, ids: np.ndarray, vocab_size: int, order: int = ORDER) -> None:
        self.bits = max(1, (vocab_size - 1).bit_length())
        if self.bits * order > 63:
            raise ConfigError(f"{order} tokens of {self.bits} bits do not fit a 64-bit key")
        if len(ids) < order + 1:
            raise ConfigError(f"{len(ids)} tokens are too few for a {order}-gram model")
        self.vocab_size, self.order = vocab_size, order
        grams, counts = np.unique(self._pack(ids, order), return_counts=True)
        self.levels: list[_Level] = []
        for n in range(order, 0, -1):
            self.levels.append(self._level(grams, counts))
            if n > 1:
                # Distinct words before each shorter gram: dropping the oldest token leaves one entry per such word.
                grams, counts = np.unique(grams & ((1 << (self.bits * (n - 1))) - 1), return_counts=True)
        self.levels.reverse()

    def _pack(self, ids: np.ndarray, order: int) -> np.ndarray:
        wide = ids.astype(np.int64)
        keys = np.zeros(len(ids) - order + 1, np.int64)
        for offset in range(order):
            keys = (keys << self.bits) | wide[offset : offset + len(keys)]
        return keys

    def _level(self, grams: np.ndarray, counts: np.ndarray) -> _Level:
        discounts = _discounts(counts)
        contexts, starts = np.unique(grams >> self.bits, return_index=True)
        totals = np.add.reduceat(counts, starts)
        removed = np.add.reduceat(discounts[np.minimum(counts, 3)], starts)
        return _Level(grams, counts, contexts, totals, removed / totals, discounts)

    def probabilities(self, ids: np.ndarray) -> np.ndarray:
        """P(ids[i] | ids[i-4..i-1]) for every i >= 4, float64."""
        keys = self._pack(ids, self.order)
        result = np.full(len(keys), 1.0 / self.vocab_size)
        for n, level in enumerate(self.levels, 1):
            grams = keys & ((1 << (self.bits * n)) - 1)
            where = np.minimum(np.searchsorted(level.contexts, grams >> self.bits), len(level.contexts) - 1)
            known = level.contexts[where] == grams >> self.bits
            at = np.minimum(np.searchsorted(level.grams, grams), len(level.grams) - 1)
            counts = np.where(level.grams[at] == grams, level.counts[at], 0)
            kept = np.maximum(counts - level.discounts[np.minimum(counts, 3)], 0) / level.totals[where]
            result = np.where(known, kept + level.backoff[where] * result, result)
        return result

    def loss(self, ids: np.ndarray) -> float:
        """Mean negative log probability in nats per token (the first four tokens are context only)."""
        return float(-np.log(self.probabilities(ids)).mean())
