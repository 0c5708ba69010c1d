"""Paged attention against softmax(q k^T) v written out in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sparkinfer_kernels.attention import reference as attention
from sparkinfer_kernels.linear.reference import bfloat16_instructions

BLOCK = 16
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def naive(q, k, v, start, scale):
    """q [L, Hq, D] at positions start.. against k, v [start + L, Hkv, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("lhd,shd->hls", q.double(), k) * scale
    hidden = torch.arange(k.shape[0]) > (start + torch.arange(q.shape[0]))[:, None]
    return torch.einsum("hls,shd->lhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class Paged:
    """Sequences in a paged cache whose unused places hold large values that must not be seen."""

    def __init__(self, contexts, hkv, d, seed):
        self.g = torch.Generator().manual_seed(seed)
        needed = [-(-context // BLOCK) for context in contexts]
        order = torch.randperm(sum(needed) + 3, generator=self.g).tolist()
        self.k_cache = torch.full((len(order), BLOCK, hkv, d), 50.0)
        self.v_cache = torch.full((len(order), BLOCK, hkv, d), 1e4)
        self.tables = [np.array([order.pop() for _ in range(count)], dtype=np.int64) for count in needed]
        self.k = [torch.randn(context, hkv, d, generator=self.g) for context in contexts]
        self.v = [torch.randn(context, hkv, d, generator=self.g) for context in contexts]
        for table, k, v in zip(self.tables, self.k, self.v, strict=True):
            at = torch.arange(k.shape[0])
            flat = torch.from_numpy(table)[at // BLOCK] * BLOCK + at % BLOCK
            attention.write_kv(k, v, self.k_cache, self.v_cache, flat)

    def table(self):
        """The sequences' blocks in a table whose unused places name no block, and their lines in it, last one first."""
        table = np.full((len(self.tables), max(map(len, self.tables))), 1 << 40)
        for line, blocks in zip(table[::-1], self.tables, strict=True):
            line[: len(blocks)] = blocks
        return table, np.arange(len(self.tables))[::-1]


@pytest.mark.parametrize(("hq", "hkv", "d"), [(4, 2, 16), (3, 1, 32), (2, 2, 8)])
@settings(max_examples=15, **QUIET)
@given(
    contexts=st.lists(st.one_of(st.integers(1, 90), st.integers(600, 900)), min_size=1, max_size=8),
    seed=st.integers(0, 99),
)
def test_decode(assert_close, hq, hkv, d, contexts, seed):
    paged = Paged(contexts, hkv, d, seed)
    q = torch.randn(len(contexts), hq, d, generator=paged.g)
    groups = attention.decode_groups(*paged.table(), np.array(contexts), BLOCK, q.dtype, q.device)
    got = attention.attention_decode(q, paged.k_cache, paged.v_cache, groups, d**-0.5)
    for row, context in enumerate(contexts):
        expected = naive(q[row : row + 1], paged.k[row], paged.v[row], context - 1, d**-0.5)
        assert_close(f"row {row} of {contexts}", got[row : row + 1], expected)


@pytest.mark.parametrize(("hq", "hkv", "d"), [(4, 2, 16), (3, 1, 32)])
@settings(max_examples=15, **QUIET)
@given(
    shares=st.lists(st.tuples(st.one_of(st.just(0), st.integers(1, 80)), st.integers(1, 70)), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_prefill(assert_close, hq, hkv, d, shares, seed):
    paged = Paged([start + length for start, length in shares], hkv, d, seed)
    q = torch.randn(sum(length for _, length in shares), hq, d, generator=paged.g)
    spans, first = [], 0
    for (start, length), table in zip(shares, paged.tables, strict=True):
        spans.append(attention.PrefillSpan(first, length, start, torch.from_numpy(table) if start else None))
        first += length
    k = torch.cat([part[start:] for (start, _), part in zip(shares, paged.k, strict=True)])
    v = torch.cat([part[start:] for (start, _), part in zip(shares, paged.v, strict=True)])
    got = attention.attention_prefill(q, k, v, paged.k_cache, paged.v_cache, spans, d**-0.5)
    for span, k_all, v_all in zip(spans, paged.k, paged.v, strict=True):
        part = slice(span.first, span.first + span.length)
        assert_close(f"span {span.start}+{span.length}", got[part], naive(q[part], k_all, v_all, span.start, d**-0.5))


def test_groups_hold_every_row_once_and_respect_the_limit():
    contexts = np.array([1, 5000, 17, 3900, 16, 2100, 30])
    table = np.zeros((len(contexts), 400), dtype=np.int64)
    groups = attention.decode_groups(
        table, np.arange(len(contexts)), contexts, BLOCK, torch.float32, torch.device("cpu")
    )
    rows = sorted(row for group in groups for row in group.rows.tolist())
    assert rows == list(range(len(contexts)))
    for group in groups:
        assert group.count == 1 or len(group.blocks) * BLOCK <= attention.GROUP_TOKENS


@pytest.mark.parametrize(("length", "start"), [(128, 0), (129, 0), (200, 37), (300, 0), (191, 512)])
@pytest.mark.parametrize(("hq", "hkv"), [(4, 2), (3, 1), (2, 2)])
def test_bfloat16_prompts_go_by_tiles_near_fp64(length, start, hq, hkv):
    g = torch.Generator().manual_seed(length + start)
    d = 32
    q = torch.randn(length, hkv, hq // hkv, d, generator=g).bfloat16()
    k, v = (torch.randn(start + length, hkv, d, generator=g).bfloat16() for _ in range(2))
    expected = naive(q.reshape(length, hq, d), k, v, start, d**-0.5)
    tiles = torch.empty(1, *q.shape, dtype=q.dtype)
    attention._causal_by_tiles(q[None], k[None], v[None], d**-0.5, tiles)
    tiles = tiles.reshape(length, hq, d).double()
    at_once = attention._causal_at_once(q, k, v, d**-0.5).reshape(length, hq, d).double()
    # Scores are rounded to 8 bits as well as weights and result, which doubles the error of the fused kernel: the mean
    # error tells the method, the largest one is chance.
    assert (tiles - expected).abs().mean() <= 2.2 * (at_once - expected).abs().mean()
    assert (tiles - expected).abs().max() <= 2**-6 * expected.abs().max()
    q_pass, k_pass = q.reshape(length, hq, d), k[start:]
    spans = [
        attention.PrefillSpan(0, length, start, None if start == 0 else torch.arange(-(-(start + length) // BLOCK)))
    ]
    cache = torch.zeros(2, -(-(start + length) // BLOCK), BLOCK, hkv, d, dtype=torch.bfloat16)
    attention.write_kv(k, v, cache[0], cache[1], torch.arange(start + length))
    got = attention.attention_prefill(q_pass, k_pass, v[start:], cache[0], cache[1], spans, d**-0.5)
    assert torch.equal(got.double(), tiles if bfloat16_instructions() else at_once)


@pytest.mark.parametrize(("hq", "hkv"), [(4, 2), (3, 1), (2, 2)])
def test_bfloat16_prompts_of_one_length_go_together_as_they_would_alone(hq, hkv):
    g = torch.Generator().manual_seed(hq)
    lengths, d = [40, 170, 170, 170, 16, 16, 130, 130], 32
    q = torch.randn(sum(lengths), hq, d, generator=g).bfloat16()
    k, v = (torch.randn(sum(lengths), hkv, d, generator=g).bfloat16() for _ in range(2))
    firsts = np.cumsum([0, *lengths[:-1]]).tolist()
    spans = [attention.PrefillSpan(first, length, 0, None) for first, length in zip(firsts, lengths, strict=True)]
    cache = torch.zeros(1, BLOCK, hkv, d, dtype=torch.bfloat16)
    got = attention.attention_prefill(q, k, v, cache, cache, spans, d**-0.5)
    for first, length in zip(firsts, lengths, strict=True):
        part = slice(first, first + length)
        alone = [attention.PrefillSpan(0, length, 0, None)]
        expected = attention.attention_prefill(q[part], k[part], v[part], cache, cache, alone, d**-0.5)
        assert torch.equal(got[part], expected)
    rows = torch.full((3 + sum(lengths), hq, d), 7.0, dtype=torch.bfloat16)
    attention.attention_prefill(q, k, v, cache, cache, spans, d**-0.5, out=rows[3:])
    assert torch.equal(rows[3:], got)
    assert (rows[:3] == 7).all()


@pytest.mark.parametrize(("hq", "hkv"), [(4, 2), (3, 1), (2, 2)])
def test_bfloat16_decode_is_near_fp32(hq, hkv):
    contexts, d = [1, 16, 40, 700, 701], 32  # By rows.
    paged = Paged(contexts, hkv, d, hq)
    q = torch.randn(len(contexts), hq, d, generator=paged.g).bfloat16()
    k_cache, v_cache = paged.k_cache.bfloat16(), paged.v_cache.bfloat16()
    groups = attention.decode_groups(*paged.table(), np.array(contexts), BLOCK, q.dtype, q.device)
    got = attention.attention_decode(q, k_cache, v_cache, groups, d**-0.5).double()
    exact = attention.decode_groups(*paged.table(), np.array(contexts), BLOCK, torch.float32, q.device)
    expected = attention.attention_decode(q.float(), k_cache.float(), v_cache.float(), exact, d**-0.5)
    error = (got - expected).abs().amax(dim=(1, 2))
    assert (error <= 2**-6 * expected.abs().amax(dim=(1, 2))).all(), error
