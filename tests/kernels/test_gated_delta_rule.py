"""The chunked and the recurrent form against the recurrence, token by token, in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sparkinfer_kernels.gated_delta_rule.reference import (
    BFLOAT16_FROM,
    BFLOAT16_PARTS_FROM,
    CHUNK,
    chunk_gated_delta_rule,
    chunk_layout,
    decay_and_beta,
    normalise_qk,
    num_chunks,
    recurrent_gated_delta_rule,
)

HK, HV, DK, DV = 2, 4, 16, 24


def inputs(total, seed, repeat_keys=False):
    g = torch.Generator().manual_seed(seed)
    qk = torch.randn(total, 2 * HK, DK, generator=g)
    if repeat_keys:
        qk[:, HK:] = qk[:1, HK:]
    v = torch.randn(total, HV, DV, generator=g)
    decay = -torch.rand(total, HV, generator=g) * torch.tensor([0.001, 0.1, 1.0, 6.0])
    beta = torch.rand(total, HV, generator=g)
    scale = torch.full((2 * HK, 1), DK**-0.5)
    scale[:HK] *= DK**-0.5
    return normalise_qk(qk, scale), v, decay, beta


def naive(qk, v, g, beta, state):
    """S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; o = S^T q, one token after another, fp64. Returns all states."""
    q, k = (x.double().repeat_interleave(HV // HK, dim=1) for x in qk.split(HK, dim=1))
    s, out, states = state.double().clone(), [], []
    for t in range(v.shape[0]):
        s = s * g[t].double().exp()[:, None, None]
        delta = beta[t].double()[:, None] * (v[t].double() - torch.einsum("hkv,hk->hv", s, k[t]))
        s = s + torch.einsum("hk,hv->hkv", k[t], delta)
        out.append(torch.einsum("hkv,hk->hv", s, q[t]))
        states.append(s)
    return torch.stack(out), states


def test_normalise_qk(assert_close):
    qk = torch.randn(5, 2 * HK, DK) * 3
    scale = torch.rand(2 * HK, 1)
    expected = qk / (qk.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() * scale * DK**0.5
    assert_close("qk", normalise_qk(qk, scale), expected)


def test_decay_and_beta(assert_close):
    b, a, log_a, bias = torch.randn(4, HV), torch.randn(4, HV) * 5, torch.randn(HV), torch.randn(HV)
    g, beta = decay_and_beta(b, a, -log_a.exp(), bias)
    assert_close("g", g, -log_a.exp() * (1 + (a + bias).exp()).log())
    assert_close("beta", beta, 1 / (1 + (-b).exp()))


shares = st.lists(
    st.tuples(
        st.one_of(st.just(0), st.integers(0, 300)),
        st.one_of(st.integers(1, 200), st.sampled_from([1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])),
        st.lists(st.floats(0, 1), max_size=3),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shares=shares, seed=st.integers(0, 1000), repeat_keys=st.booleans())
def test_chunked_equals_recurrence(assert_close, shares, seed, repeat_keys):
    packed = []
    for start, length, marks in shares:
        cuts = sorted({start + max(1, round(mark * length)) for mark in marks})
        packed.append((start, length, cuts))
    packed.sort(key=lambda share: -num_chunks(*share[:2]))
    starts, lengths, cuts = zip(*packed, strict=True)
    total = sum(lengths)
    qk, v, g, beta = inputs(total, seed, repeat_keys)
    state = torch.randn(len(packed), HV, DK, DV, generator=torch.Generator().manual_seed(seed + 1))
    before = state.clone()
    layout = chunk_layout(starts, lengths, cuts, torch.device("cpu"))
    saved = [torch.empty(HV, DK, DV) for positions in cuts for _ in positions]
    out = chunk_gated_delta_rule(qk, v, g, beta, state, layout, saved)
    first, save = 0, iter(saved)
    for row, (start, length, positions) in enumerate(packed):
        part = slice(first, first + length)
        expected, states = naive(qk[part], v[part], g[part], beta[part], before[row])
        assert_close(f"output {row}", out[part], expected, 2e-5)
        assert_close(f"state {row}", state[row], states[-1], 2e-5)
        for position in positions:
            assert_close(f"state of {row} at {position}", next(save), states[position - start - 1], 2e-5)
        first += length


@pytest.mark.parametrize("repeat_keys", [False, True])
@pytest.mark.parametrize(
    ("starts", "lengths", "cuts"), [([0, 7, 0], [300, 200, 37], [[128, 290], [], [16]]), ([7], [300], [[128, 290]])]
)
def test_bfloat16_values_are_near_the_recurrence(starts, lengths, cuts, repeat_keys):
    # Three sequences read their states in bfloat16 too, one in fp32.
    assert (len(starts) * HV >= BFLOAT16_FROM) == (len(starts) == 3)
    chunks = sum(map(num_chunks, starts, lengths))
    assert chunks >= 2 * len(starts)
    assert chunks * HV >= BFLOAT16_PARTS_FROM
    qk, v, g, beta = inputs(sum(lengths), 3, repeat_keys)
    v = v.bfloat16()
    state = torch.randn(len(starts), HV, DK, DV, generator=torch.Generator().manual_seed(4))
    before = state.clone()
    saved = [torch.empty(HV, DK, DV) for _ in itertools.chain(*cuts)]
    layout = chunk_layout(starts, lengths, cuts, torch.device("cpu"))
    in_fp32 = chunk_gated_delta_rule(qk, v.float(), g, beta, before.clone(), layout, saved)
    out = chunk_gated_delta_rule(qk, v, g, beta, state, layout, saved)
    assert not torch.equal(out, in_fp32)
    first, save = 0, iter(saved)
    for row, (start, length, positions) in enumerate(zip(starts, lengths, cuts, strict=True)):
        part = slice(first, first + length)
        expected, states = naive(qk[part], v[part], g[part], beta[part], before[row])
        pairs = [(out[part], expected), (state[row], states[-1])]
        pairs += [(next(save), states[position - start - 1]) for position in positions]
        for got, exact in pairs:
            assert (got - exact).abs().max() <= 2**-6 * exact.abs().max()
            assert (got - exact).pow(2).mean().sqrt() <= 2**-7 * exact.pow(2).mean().sqrt()
        first += length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_can_be_written_behind_other_rows(dtype):
    lengths = [130, 70, 33, 5]  # Eight states: in bfloat16 the scan gives bfloat16.
    qk, v, g, beta = inputs(sum(lengths), 5)
    before = torch.randn(len(lengths), HV, DK, DV, generator=torch.Generator().manual_seed(6))
    layout = chunk_layout([0] * len(lengths), lengths, [[]] * len(lengths), torch.device("cpu"))
    expected = chunk_gated_delta_rule(qk, v.to(dtype), g, beta, before.clone(), layout)
    rows = torch.full((3 + sum(lengths), HV, DV), 7.0)
    out = chunk_gated_delta_rule(qk, v.to(dtype), g, beta, before.clone(), layout, (), rows[3:])
    assert out.data_ptr() == rows[3:].data_ptr()
    assert torch.equal(rows[3:], expected)
    assert (rows[:3] == 7).all()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(slots=st.sets(st.integers(0, 9), min_size=1), seed=st.integers(0, 1000))
def test_recurrent_equals_recurrence(assert_close, slots, seed):
    ordered = sorted(slots)
    runs = []
    for row, slot in enumerate(ordered):
        if runs and runs[-1][1] + runs[-1][2] == slot:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((row, slot, 1))
    pool = torch.randn(10, HV, DK, DV, generator=torch.Generator().manual_seed(seed))
    before = pool.clone()
    qk, v, g, beta = inputs(len(ordered), seed)
    out = recurrent_gated_delta_rule(qk, v, g, beta, pool, runs)
    for index, slot in enumerate(ordered):
        one = slice(index, index + 1)
        expected, states = naive(qk[one], v[one], g[one], beta[one], before[slot])
        assert_close(f"output {slot}", out[one], expected)
        assert_close(f"state {slot}", pool[slot], states[-1])
    others = [slot for slot in range(10) if slot not in slots]
    assert torch.equal(pool[others], before[others])


def test_states_of_several_sequences_are_saved_together():
    starts, cuts = [0] * 5, [[16], [16, 40], [7], [40], [16]]
    qk, v, g, beta = inputs(5 * 64, 6)
    before = torch.randn(5, HV, DK, DV, generator=torch.Generator().manual_seed(7))
    saved = [torch.empty(HV, DK, DV) for positions in cuts for _ in positions]
    layout = chunk_layout(starts, [64] * 5, cuts, torch.device("cpu"))
    chunk_gated_delta_rule(qk, v, g, beta, before.clone(), layout, saved)
    save = iter(saved)
    for row, positions in enumerate(cuts):
        part = slice(64 * row, 64 * row + 64)
        _, states = naive(qk[part], v[part], g[part], beta[part], before[row])
        for position in positions:
            assert (next(save) - states[position - 1]).abs().max() <= 1e-4


def test_layout_refuses_the_wrong_order():
    with pytest.raises(ValueError, match="longest"):
        chunk_layout([0, 0], [10, 100], [[], []], torch.device("cpu"))
