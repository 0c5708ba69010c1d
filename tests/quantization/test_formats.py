"""NVFP4 and FP8 in plain torch: every code, rounding, the choice of scales, what is refused."""

from __future__ import annotations

import pytest
import torch

from sparkinfer.quantization import fp8, nvfp4

torch.set_num_threads(1)


def matrix(rows, columns, seed=0, scale=0.02):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale


def relative_error(parts, weight):
    return float((parts.dequantise().double() - weight).norm() / weight.double().norm())


def test_all_codes_there_and_back():
    codes = torch.arange(16, dtype=torch.uint8)
    values = nvfp4.decode(codes)
    assert values.tolist()[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert values.tolist()[9:] == [-0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.equal(nvfp4.encode(values), codes)
    assert torch.equal(nvfp4.unpack(nvfp4.pack(codes.view(2, 8))), codes.view(2, 8))
    # The even column is in the low nibble.
    assert nvfp4.pack(torch.tensor([[1, 7]], dtype=torch.uint8)).item() == 0x71


def test_rounding_is_to_nearest_with_ties_to_even():
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 100.0])
    assert nvfp4.decode(nvfp4.encode(halfway)).tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    values = matrix(1, 20000, scale=3).flatten()
    grid = torch.tensor(nvfp4.E2M1_VALUES)
    nearest = grid[(values.abs().unsqueeze(1) - grid).abs().argmin(1)].copysign(values)
    assert torch.equal(nvfp4.decode(nvfp4.encode(values)), nearest)


def test_dequantise_is_the_product_of_the_three_parts():
    parts = nvfp4.quantise(matrix(7, 48))
    scales = parts.scales.float().repeat_interleave(16, 1)
    expected = nvfp4.decode(nvfp4.unpack(parts.packed)) * scales * parts.global_scale
    assert torch.equal(parts.dequantise(), expected)
    assert torch.equal(parts.dequantise(torch.bfloat16), expected.to(torch.bfloat16))
    assert parts.shape == (7, 48)


def test_pieces_do_not_change_the_result(monkeypatch):
    weight = matrix(40, 64)
    whole = nvfp4.quantise(weight)
    monkeypatch.setattr(nvfp4, "PIECE", 200)
    pieces = nvfp4.quantise(weight)
    assert torch.equal(whole.packed, pieces.packed)
    assert torch.equal(whole.dequantise(), pieces.dequantise())


def test_search_beats_the_plain_scale_in_every_block():
    weight = matrix(64, 256)
    scale = nvfp4.global_scale_for(float(weight.abs().max()))
    errors = []
    for search in (False, True):
        parts = nvfp4.quantise(weight, scale, search=search)
        errors.append((parts.dequantise() - weight).unflatten(1, (-1, 16)).square().sum(-1))
    assert (errors[1] <= errors[0] + 1e-12).all()
    assert relative_error(nvfp4.quantise(weight), weight) < 0.09
    # What ModelOpt's rule gives: amax / 6 throughout, the largest block scale at 448.
    modelopt = nvfp4.quantise(weight, float(weight.abs().max()) / (6 * 448), search=False)
    assert relative_error(modelopt, weight) > 1.1 * relative_error(nvfp4.quantise(weight), weight)


def test_importance_moves_the_error_to_columns_that_matter_less():
    weight, importance = matrix(64, 256), torch.ones(256)
    importance[::4] = 100.0
    plain = (nvfp4.quantise(weight).dequantise() - weight).square()
    weighed = (nvfp4.quantise(weight, importance=importance).dequantise() - weight).square()
    assert float((weighed * importance).sum()) < 0.97 * float((plain * importance).sum())
    assert float(weighed.sum()) > float(plain.sum())


@pytest.mark.parametrize("extreme", [1e-30, 3e4])
def test_extreme_magnitudes_keep_their_relative_error(extreme):
    weight = matrix(8, 64) * extreme
    parts = nvfp4.quantise(weight)
    assert relative_error(parts, weight) < 0.1
    assert torch.isfinite(parts.scales.float()).all()


def test_zeros_have_positive_scales():
    weight = torch.zeros(4, 32)
    weight[0, 0] = 1.0
    for value in (weight, torch.zeros(4, 32)):
        parts = nvfp4.quantise(value)
        assert (parts.scales.float() > 0).all()
        assert parts.global_scale > 0
        assert torch.equal(parts.dequantise(), value)


@pytest.mark.parametrize("least", [1e-36, 1e-39, 1e-42, 1e-45])
def test_scales_of_the_least_magnitudes_are_positive(least):
    weight = torch.full((128, 128), least)
    four, eight = nvfp4.quantise(weight), fp8.quantise(weight)
    for scale in (four.global_scale, eight.scales, torch.tensor(nvfp4.input_scale_for(least))):
        assert (scale > 0).all()
        assert torch.isfinite(scale.reciprocal()).all()
    for parts in (four, eight):
        got = parts.dequantise()
        assert ((got == 0) | (got / least - 1).abs().lt(0.1)).all()
        assert (got == 0).all() or least > 1e-41


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_unusable_weights_are_refused(bad):
    weight = matrix(128, 128)
    weight[100, 70] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        nvfp4.quantise(weight)
    with pytest.raises(ValueError, match="NaN or infinity"):
        fp8.quantise(weight)
    with pytest.raises(ValueError, match="no multiple of 16"):
        nvfp4.quantise(matrix(4, 24))


def test_fp8_blocks_and_edges():
    weight = matrix(200, 300)
    weight[:128, :128] *= 50
    parts = fp8.quantise(weight)
    assert parts.scales.shape == (2, 3)
    for row, rows in enumerate((slice(0, 128), slice(128, 200))):
        for column, columns in enumerate((slice(0, 128), slice(128, 256), slice(256, 300))):
            block = weight[rows, columns]
            assert float(parts.scales[row, column]) == pytest.approx(float(block.abs().max()) / 448)
            expected = (block / parts.scales[row, column]).to(torch.float8_e4m3fn).float() * parts.scales[row, column]
            assert torch.equal(parts.dequantise()[rows, columns], expected)
    assert relative_error(parts, weight) < 0.03
    assert torch.equal(fp8.quantise(torch.zeros(3, 5)).dequantise(), torch.zeros(3, 5))


def test_fp8_of_several_experts_is_that_of_each():
    one, two = (fp8.quantise(matrix(130, 200, seed)) for seed in (1, 2))
    both = fp8.dequantise(
        torch.stack([one.weight.view(torch.uint8), two.weight.view(torch.uint8)]).view(torch.float8_e4m3fn),
        torch.stack([one.scales, two.scales]),
    )
    assert torch.equal(both, torch.stack([one.dequantise(), two.dequantise()]))


def test_picked_rows():
    parts = nvfp4.quantise(matrix(12, 32))
    rows = torch.tensor([11, 0, 5])
    assert torch.equal(parts.pick_rows(rows).dequantise(), parts.dequantise()[rows])
    blocks = fp8.quantise(matrix(384, 256))
    rows = torch.cat([torch.arange(256, 384), torch.arange(0, 128)])
    assert torch.equal(blocks.pick_rows(rows).dequantise(), blocks.dequantise()[rows])
    for rows in (torch.arange(64), torch.arange(64, 192), torch.arange(128).flip(0)):
        with pytest.raises(ValueError, match="whole blocks"):
            blocks.pick_rows(rows)
