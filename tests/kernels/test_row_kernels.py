"""The GPU's norms, SwiGLU and rotary kernels against their plain references; interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from interpreter_fixes import fix_interpreter
from sparkinfer_kernels.moe.reference import swiglu
from sparkinfer_kernels.rms_norm import gpu as norm
from sparkinfer_kernels.rms_norm import reference as norm_reference
from sparkinfer_kernels.rotary import gpu as rotary
from sparkinfer_kernels.rotary import reference as rotary_reference

fix_interpreter()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8_ERROR = 0.03 if torch.cuda.is_available() else 0.12  # the interpreter truncates to FP8
BF16_STEP = 2.0**-7


def fp8_pair(count, d):
    return torch.empty(count, d, dtype=torch.float8_e4m3fn, device=DEVICE), torch.empty(count, device=DEVICE)


def widen(pair):
    return pair[0].float() * pair[1][:, None]


def relative(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def close(got, expected, steps=1):
    """Within `steps` bf16 steps of every value."""
    return bool(((got.float() - expected.float()).abs() <= steps * BF16_STEP * expected.float().abs() + 1e-6).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("d", [96, 128, 2048, 5120])
def test_add_rms_norm(d, dtype):
    x = torch.randn(5, d + 8, device=DEVICE).bfloat16()[:, :d]
    residual = torch.randn(5, d, device=DEVICE).to(dtype)
    weight1 = torch.rand(d, device=DEVICE) + 0.5
    expected, kept = norm_reference.add_rms_norm(x, residual.clone(), weight1, 1e-6)
    mine, pair = residual.clone(), fp8_pair(5, d)
    out, same = norm.add_rms_norm(x, mine, weight1, 1e-6)
    assert same is mine
    assert torch.equal(mine, kept)
    assert out.dtype is torch.bfloat16
    assert close(out, expected)
    nothing, _ = norm.add_rms_norm(x, residual.clone(), weight1, 1e-6, fp8=pair)
    assert nothing is None
    assert relative(widen(pair), expected) < FP8_ERROR
    assert pair[0].float().abs().amax(1).eq(448).all()
    # rows are gathered, repeats included, and the stream is left alone
    rows = torch.tensor([3, 3, 0], dtype=torch.int32, device=DEVICE)
    before, gathered = residual.clone(), torch.empty(3, d, dtype=dtype, device=DEVICE)
    part, held = norm.add_rms_norm(x, residual, weight1, 1e-6, rows=rows, residual_out=gathered)
    assert torch.equal(residual, before)
    assert torch.equal(part, out[rows.long()])
    assert torch.equal(held, kept[rows.long()])


def test_rms_norm_and_embedding():
    weight1 = torch.rand(128, device=DEVICE) + 0.5
    embedding = torch.randn(50, 128, device=DEVICE).bfloat16()
    for dtype in (torch.int32, torch.int64):
        tokens = torch.tensor([0, 49, 7, 7], device=DEVICE, dtype=dtype)
        residual = torch.empty(4, 128, device=DEVICE)
        out, kept = norm.embed_rms_norm(tokens, embedding, weight1, 1e-6, residual)
        assert torch.equal(kept, embedding[tokens.long()].float())
        assert close(out, norm_reference.rms_norm(embedding[tokens.long()], weight1, 1e-6))
    alone = norm.rms_norm(embedding, weight1, 1e-6)
    assert close(alone, norm_reference.rms_norm(embedding, weight1, 1e-6))
    assert norm.rms_norm(embedding[:0], weight1, 1e-6).shape == (0, 128)


def test_swiglu_and_quantisation():
    gate_up = torch.randn(3, 2 * 384, device=DEVICE).bfloat16()
    expected, pair = swiglu(gate_up), fp8_pair(3, 384)
    assert close(norm.swiglu(gate_up), expected)
    assert norm.swiglu(gate_up, fp8=pair) is None
    assert relative(widen(pair), expected) < FP8_ERROR
    x, pair = torch.randn(3, 96, device=DEVICE).bfloat16(), fp8_pair(3, 96)
    x[1] = 0
    norm.quantise_rows(x, *pair)
    assert relative(widen(pair), x) < FP8_ERROR
    assert (widen(pair)[1] == 0).all()


def test_gather_needs_a_place():
    x = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="residual_out"):
        norm.add_rms_norm(x, x.clone(), x[0], 1e-6, rows=torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("shape", [None, (1, 4, 4)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (16, 2), (24, 4)])
def test_rotary_and_cache_write(heads, kv_heads, shape, monkeypatch):
    d, count = 256, 5
    if shape:
        monkeypatch.setattr(rotary, "_launch_shape", lambda *_: shape)
    proj = torch.randn(count, 2 * (heads + kv_heads) * d, device=DEVICE).bfloat16()
    positions = torch.tensor([0, 5, 6, 100, 0], device=DEVICE, dtype=torch.int32)
    places = torch.tensor([16, 3, 40, 47, 79], device=DEVICE, dtype=torch.int32)
    q_norm, k_norm = torch.rand(2, d, device=DEVICE) + 0.5
    table = rotary_reference.rotary_table(128, 64, 1e7, DEVICE)
    cache = torch.full((2, 5, 16, kv_heads, d), 9.0, device=DEVICE).bfloat16()
    q = torch.full((count, heads, d), torch.nan, device=DEVICE).bfloat16()
    keys = torch.full((count, kv_heads, d), torch.nan, device=DEVICE).bfloat16()
    rotary.qk_norm_rotary_write(proj, positions, places, q_norm, k_norm, table, *cache, 1e-6, q, keys)
    cos, sin = table.index_select(0, positions).unsqueeze(2).unbind(1)
    weight1 = torch.cat([q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)])
    qk = proj[:, : (heads + kv_heads) * d].unflatten(-1, (-1, d))
    expected = rotary_reference.qk_norm_rotary(qk, weight1, cos, sin, 1e-6)
    assert close(q, expected[:, :heads], 2)
    assert close(keys, expected[:, heads:], 2)
    flat = cache.flatten(1, 2)
    assert torch.equal(flat[0, places.long()], keys)
    assert torch.equal(flat[1, places.long()], rotary.value_view(proj, heads, kv_heads, d))
    untouched = torch.ones(80, dtype=torch.bool)
    untouched[places.long().cpu()] = False
    assert (flat[:, untouched.to(DEVICE)] == 9).all()
    scales = torch.rand(2, kv_heads, device=DEVICE) * 0.02 + 0.02
    small = torch.zeros(2, 5, 16, kv_heads, d, device=DEVICE).to(torch.float8_e4m3fn)
    rotary.qk_norm_rotary_write(proj, positions, places, q_norm, k_norm, table, *small, 1e-6, q, kv_scales=scales)
    for part, value in zip(small.flatten(1, 2), (keys, rotary.value_view(proj, heads, kv_heads, d)), strict=True):
        row = 0 if part.data_ptr() == small.data_ptr() else 1
        assert relative(part[places.long()].float() * scales[row][:, None], value) < FP8_ERROR


def test_rotary_names_what_does_not_fit():
    q, cache = torch.zeros(1, 2, 256), torch.zeros(1, 16, 1, 256)
    ints, vector = torch.zeros(1, dtype=torch.int32), torch.ones(256)
    table = rotary_reference.rotary_table(4, 64, 1e7, torch.device("cpu"))
    with pytest.raises(ValueError, match="does not hold"):
        rotary.qk_norm_rotary_write(torch.zeros(1, 7), ints, ints, vector, vector, table, cache, cache, 1e-6, q)
