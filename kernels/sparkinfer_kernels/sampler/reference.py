"""Plain torch sampling: Gumbel-max with counter-based noise.

A token is argmax(logits / temperature + noise) over the tokens that pass the filters, with noise = -log(-log(1 - u)),
which samples the softmax exactly (Gumbel 1954; Maddison et al. 2014, arXiv 1411.0030). u depends on the request's seed,
the index of the output token and the vocabulary index only, through integer arithmetic that any device repeats bit for
bit:

    key0, key1 = low and high 32 bits of splitmix64(splitmix64(seed) + output_index)   (mod 2**64)
    h = lowbias32(lowbias32(token + key0) ^ key1)                                      (mod 2**32)
    u = (float32(h) + 0.5) * 2**-32

splitmix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators". lowbias32: Chris Wellons, Hash
Prospector (public domain). -log(1 - u) keeps the full relative precision of u near 0, where the winners are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of n rows. A field is None when no row uses it.

    `temperature` None: every row is greedy. A temperature of 0 is greedy too.
    """

    temperature: torch.Tensor | None = None
    """[n] fp32."""
    keys: torch.Tensor | None = None
    """[n, 2] int32, from `noise_keys`; set when any row is not greedy."""
    top_k: torch.Tensor | None = None
    """[n] int64, 0 = off."""
    max_top_k: int = 0
    """The largest top_k when every row that filters by rank or mass has one, else 0 (a full sort is needed)."""
    top_p: torch.Tensor | None = None
    """[n] fp32, 1 = off."""
    min_p: torch.Tensor | None = None
    """[n] fp32, 0 = off."""
    banned: tuple[torch.Tensor, torch.Tensor] | None = None
    """(rows, token ids), int64: tokens that a row must not take."""


def noise_keys(seeds: Sequence[int], output_indices: Sequence[int]) -> np.ndarray:
    """The two 32-bit keys of each row's noise.

    Args:
        seeds: any integers, taken modulo 2**64.
        output_indices: index of the token being sampled among the request's outputs.

    Returns:
        [n, 2] int32 (the bit patterns of unsigned numbers).
    """
    with np.errstate(over="ignore"):
        x = _splitmix64(np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64))
        x = _splitmix64(x + np.array(output_indices, dtype=np.uint64))
    return np.ascontiguousarray(x).view(np.uint32).reshape(-1, 2).view(np.int32)


def _splitmix64(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _lowbias32(x: torch.Tensor) -> torch.Tensor:
    """One round on int32 bit patterns, in place; shifts are made logical by masking off the copied sign bits."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return x


def gumbel_noise(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel noise of every row and vocabulary index.

    Args:
        keys: [n, 2] int32.
        vocab: number of tokens V.

    Returns:
        [n, V] fp32, finite.
    """
    h = torch.arange(vocab, dtype=torch.int32, device=keys.device) + keys[:, :1]
    h = _lowbias32(_lowbias32(h) ^ keys[:, 1:])
    u = (h.long() & 0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32)
    # u rounds to 1 for the last few of 2**32 values: keep the noise finite there.
    return u.neg_().log1p_().neg_().clamp_(max=88.0).log_().neg_()


def _pivot(scaled: torch.Tensor, batch: SamplingBatch) -> torch.Tensor | None:
    """[n, 1]: the smallest scaled logit that passes all filters; equal ones pass too, so no tie is broken by order."""
    pivot = None
    if batch.top_k is not None or batch.top_p is not None:
        if batch.max_top_k:
            ranked = scaled.topk(min(batch.max_top_k, scaled.shape[1]), dim=-1).values
        else:
            ranked = scaled.sort(dim=-1, descending=True).values
        mass = (ranked - ranked[:, :1]).exp_()
        kept = torch.ones_like(mass, dtype=torch.bool)
        if batch.top_k is not None:
            limit = batch.top_k.masked_fill(batch.top_k == 0, scaled.shape[1])
            kept = torch.arange(ranked.shape[1], device=ranked.device) < limit[:, None]
            mass.masked_fill_(~kept, 0.0)
        if batch.top_p is not None:
            total = mass.cumsum(dim=-1)
            # A row without top_p keeps all: rounding of the running sum must not drop its tail.
            allowed = torch.where(batch.top_p < 1, batch.top_p, torch.inf)[:, None] * total[:, -1:]
            kept &= (total - mass) < allowed
        last = kept.sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)
        pivot = ranked.gather(1, last)
        if batch.max_top_k:
            # Rows without any filter by rank were ranked only up to max_top_k: they keep everything.
            free = batch.top_k == 0 if batch.top_k is not None else torch.zeros_like(pivot[:, 0], dtype=torch.bool)
            pivot.masked_fill_(free[:, None], -torch.inf)
    if batch.min_p is not None:
        floor = scaled.amax(dim=-1, keepdim=True) + batch.min_p.log()[:, None]
        pivot = floor if pivot is None else torch.maximum(pivot, floor)
    return pivot


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Choose one token per row.

    Temperature comes first, then top-k, then top-p over what top-k left (renormalised), and min-p relative to the most
    likely token. Tokens equal to the last kept one are kept as well.

    Args:
        logits: [n, V] fp32; banned entries are overwritten.
        batch: the rows' parameters.

    Returns:
        [n] int64.
    """
    if batch.banned is not None:
        logits[batch.banned] = -torch.inf
    if batch.temperature is None:
        return logits.argmax(dim=-1)
    if batch.keys is None:
        raise ValueError("rows with a temperature need noise keys")
    greedy = batch.temperature == 0
    scaled = logits / batch.temperature.masked_fill(greedy, 1.0)[:, None]
    pivot = _pivot(scaled, batch)
    noise = gumbel_noise(batch.keys, logits.shape[1]).masked_fill_(greedy[:, None], 0.0)
    noise += scaled
    if pivot is not None:
        noise.masked_fill_(scaled < pivot, -torch.inf)
    return noise.argmax(dim=-1)


def logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Natural-log probabilities of the raw distribution.

    Args:
        logits: [n, V] fp32, before any ban, filter or temperature.
        tokens: [n] int64, the chosen tokens.
        top: how many of the most likely tokens to report, may be 0.

    Returns:
        (logprob of the chosen [n], its rank counted from 1 [n], top ids [n, top], top logprobs [n, top]).
    """
    norm = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None])
    rank = (logits > chosen).sum(dim=-1) + 1
    values, ids = logits.topk(min(top, logits.shape[1]), dim=-1)
    return (chosen - norm)[:, 0], rank, ids, values - norm
