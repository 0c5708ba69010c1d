"""Norms, rotary embedding, convolution and experts against formulas written out in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sparkinfer_kernels.causal_conv1d import reference as conv
from sparkinfer_kernels.dispatch import BACKENDS, select_ops
from sparkinfer_kernels.linear import reference as projection
from sparkinfer_kernels.moe import reference as moe
from sparkinfer_kernels.rms_norm import reference as norm
from sparkinfer_kernels.rotary import reference as rotary

QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def naive_norm(x, weight, eps=1e-6):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def silu(x):
    return x / (1 + (-x).exp())


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_norms(assert_close, dtype, ratio):
    x, residual = torch.randn(7, 48).to(dtype), torch.randn(7, 48).to(dtype)
    weight = torch.rand(48) + 0.5
    assert_close("norm", norm.rms_norm(x, weight, 1e-6), naive_norm(x, weight), ratio)
    total = (residual.float() + x.float()).to(dtype)
    y, kept = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert_close("sum", kept, total, ratio)
    assert_close("norm of sum", y, naive_norm(total, weight), ratio)
    assert kept is residual
    heads, gate = torch.randn(5, 3, 16), torch.randn(5, 3, 16).to(dtype)
    gated = norm.gated_rms_norm(heads, gate, weight[:16], 1e-6)
    assert gated.dtype is dtype
    assert_close("gated", gated, naive_norm(heads, weight[:16]) * silu(gate.double()), ratio)


def test_rotary_turns_pairs_by_position_times_frequency(assert_close):
    rot, d, positions = 12, 32, torch.tensor([0, 1, 5, 299])
    table = rotary.rotary_table(300, rot, 1e4, torch.device("cpu"))
    cos, sin = table.index_select(0, positions).unsqueeze(2).unbind(1)
    qk, weight1 = torch.randn(4, 3, d), torch.rand(3, d) + 0.5
    got = rotary.qk_norm_rotary(qk, weight1, cos, sin, 1e-6)
    expected = naive_norm(qk, weight1)
    for t, position in enumerate(positions.tolist()):
        for i in range(rot // 2):
            angle = torch.tensor(position / 1e4 ** (2 * i / rot), dtype=torch.float64)
            a, b = expected[t, :, i].clone(), expected[t, :, i + rot // 2].clone()
            expected[t, :, i] = a * angle.cos() - b * angle.sin()
            expected[t, :, i + rot // 2] = b * angle.cos() + a * angle.sin()
    assert_close("rotary", got, expected, 2e-5)


def test_rotary_of_a_long_pack_is_that_of_its_parts():
    total, cut = 2 * rotary.SLICE_TOKENS + 5, 1000
    qk = torch.randn(total, 3, 16).bfloat16()
    table = rotary.rotary_table(total, 8, 1e4, torch.device("cpu"))
    cos, sin = table.flip(0).unsqueeze(2).unbind(1)
    weight1 = torch.rand(3, 16) + 0.5
    edges = [*range(0, total, cut), total]
    parts = [rotary.qk_norm_rotary(qk[a:b], weight1, cos[a:b], sin[a:b], 1e-6) for a, b in itertools.pairwise(edges)]
    assert torch.equal(rotary.qk_norm_rotary(qk, weight1, cos, sin, 1e-6), torch.cat(parts))


@settings(max_examples=25, **QUIET)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), width=st.integers(2, 5), seed=st.integers(0, 99))
def test_convolution_varlen_and_update(assert_close, lengths, width, seed):
    g = torch.Generator().manual_seed(seed)
    channels, back = 10, width - 1
    x = torch.randn(sum(lengths), channels, generator=g)
    windows = torch.randn(len(lengths), back, channels, generator=g)
    weight = torch.randn(width, channels, generator=g)
    histories = [torch.cat([w, part]) for w, part in zip(windows.clone(), x.split(lengths), strict=True)]
    saved = [torch.empty(back, channels) for _ in lengths]
    saves = [(row, (length + 1) // 2, saved[row]) for row, length in enumerate(lengths)]
    got = conv.causal_conv1d_varlen(x, windows, weight, lengths, saves)
    expected = torch.cat(
        [
            torch.stack([(h[t : t + width].double() * weight.double()).sum(0) for t in range(length)])
            for h, length in zip(histories, lengths, strict=True)
        ]
    )
    assert_close("varlen", got, silu(expected), 1e-5)
    for row, (history, length) in enumerate(zip(histories, lengths, strict=True)):
        assert torch.equal(windows[row], history[length:])
        half = (length + 1) // 2
        assert torch.equal(saved[row], history[half : half + back])
    # One more token each, in scattered slots.
    pool = torch.randn(2 * len(lengths) + 1, back, channels, generator=g)
    slots = [2 * row + 1 for row in range(len(lengths))]
    pool[slots] = windows
    others = pool[::2].clone()
    new = torch.randn(len(lengths), channels, generator=g)
    update = conv.causal_conv1d_update(new, pool, weight, [(row, slot, 1) for row, slot in enumerate(slots)])
    full = torch.cat([windows, new[:, None]], dim=1)
    assert_close("update", update, silu((full.double() * weight.double()).sum(1)), 1e-5)
    assert torch.equal(pool[slots], full[:, 1:])
    assert torch.equal(pool[::2], others)


@pytest.mark.parametrize("total", [30, 300])
def test_convolution_of_bfloat16(total):
    g = torch.Generator().manual_seed(total)
    channels, lengths = 24, [total - 12, 12]
    x, windows = torch.randn(total, channels, generator=g).bfloat16(), torch.randn(2, 3, channels, generator=g)
    windows, weight = windows.bfloat16(), torch.randn(4, channels, generator=g).bfloat16().float()
    histories = [torch.cat([w, part]).double() for w, part in zip(windows.clone(), x.split(lengths), strict=True)]
    got = conv.causal_conv1d_varlen(x, windows, weight, lengths)
    expected = torch.cat([silu((h.unfold(0, 4, 1) * weight.t().double()).sum(-1)) for h in histories])
    assert ((got - expected).abs() <= 2**-7 * (expected.abs() + 1)).all()
    assert torch.equal(windows.double(), torch.stack([h[-3:] for h in histories]))


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 300])
def test_projection_of_bfloat16(rows):
    g = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 48, generator=g).bfloat16(), torch.randn(3000, 48, generator=g).bfloat16()
    got = projection.linear(x, projection.pack_linear(weight))
    expected = x.double() @ weight.double().t()
    assert got.dtype == torch.bfloat16
    assert ((got - expected).abs() <= 2**-8 * expected.abs() + 1e-5).all()


@pytest.mark.parametrize("rows", [1, 40, 4000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_of_few_and_of_many_rows(rows, dtype):
    g = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 2, 24, generator=g).to(dtype) * 1e-3, torch.rand(24, generator=g)
    wide = x.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    limit = 2**-8 if dtype == torch.bfloat16 else 1e-6
    assert (norm.rms_norm(x, weight, 1e-6).double() - exact * weight).abs().max() <= limit * exact.abs().max()
    assert (norm.unweighted_rms_norm(x, 1e-6).double() - exact).abs().max() <= 1e-6 * exact.abs().max()
    assert norm.rms_norm(x, weight, 1e-6).dtype == dtype
    gated = norm.gated_rms_norm(x.float(), x, weight, 1e-6)
    assert gated.dtype == dtype
    assert (gated.double() - exact * weight * silu(wide)).abs().max() <= limit * (exact * silu(wide)).abs().max()


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (5, 3, 3), (64, 8, 1), (40, 16, 4)])
def test_experts(assert_close, tokens, experts, top_k):
    hidden, inner, shared = 12, 10, 14
    x = torch.randn(tokens, hidden)
    router = torch.randn(hidden, experts + 1)
    gate_up, down = torch.randn(experts, hidden, 2 * inner), torch.randn(experts, inner, hidden)
    shared_gate_up, shared_down = torch.randn(hidden, 2 * shared), torch.randn(shared, hidden)
    got = moe.moe(x, router, gate_up, down, shared_gate_up, shared_down, top_k)

    def block(row, first, second):
        gate, up = (row @ first.double()).chunk(2)
        return (silu(gate) * up) @ second.double()

    expected = []
    for row in x.double():
        logits = row @ router.double()
        weights = logits[:-1].softmax(0)
        chosen = weights.argsort(descending=True)[:top_k]
        total = sum(weights[e] / weights[chosen].sum() * block(row, gate_up[e], down[e]) for e in chosen)
        expected.append(total + logits[-1].sigmoid() * block(row, shared_gate_up, shared_down))
    assert_close("moe", got, torch.stack(expected), 1e-5)


def test_dispatch_knows_its_devices():
    assert select_ops(torch.device("cpu")).backend == "torch"
    assert set(BACKENDS) >= {"torch"}
    with pytest.raises(ValueError, match="no kernels for device meta"):
        select_ops(torch.device("meta"))
    with pytest.raises(ValueError, match="backend 'magic'"):
        select_ops(torch.device("cpu"), "magic")
