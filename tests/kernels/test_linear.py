"""Projections on a GPU: fragment order, weights, the plain Triton kernels in the interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from sparkinfer_kernels.linear import dequantise, layout, ops, scaled, weights

from sparkinfer.quantization import fp8


@dataclass
class Parts:
    packed: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor


TABLE = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def random_parts(n: int, k: int, factor: float, seed: int, low: int = 0) -> Parts:
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=g)
    scales = torch.randint(low, 127, (n, k // 16), dtype=torch.uint8, generator=g)
    return Parts(packed, scales.view(weights.FP8), torch.tensor(factor))


def plain(parts: Parts) -> torch.Tensor:
    codes = torch.stack([parts.packed & 15, parts.packed >> 4], -1).flatten(-2)
    rows = TABLE[codes.int()].unflatten(-1, (-1, 16)).double() * parts.scales.double().unsqueeze(-1)
    return rows.flatten(-2) * parts.global_scale.double()


def emulate(weight: weights.Nvfp4Weight) -> torch.Tensor:
    """What the skinny kernel forms in its registers, bit for bit: bf16 [N, K], before the row scales."""
    rows, columns = weight.codes.shape[:2]
    mask = 0x81C081C0 - (1 << 32)
    w = weight.codes.view(torch.int32).to(torch.int64)
    cut = (1 << 32) - 1
    pairs = [w, w << 3, (w & 0x40074007) * 66, ((w >> 3) & 0x01C001C0) | ((w << 2) & 0x80008000)]
    pairs = [(pair & cut) & (mask & cut) for pair in pairs]
    scale = weight.scales.view(rows, columns // 2, 32, 2, 2).permute(0, 1, 3, 2, 4).reshape(rows, columns, 32, 1, 2)
    factor = ((scale.to(torch.int32) << 4) + 0x6F80).to(torch.int16).view(torch.bfloat16)
    out = torch.empty(rows, 2, 8, columns, 4, 4, 2, 2, dtype=torch.bfloat16)
    for p, pair in enumerate(pairs):
        for i in range(2):
            value = ((pair >> (16 * i)) & 0xFFFF).to(torch.int32)
            value = torch.where(value > 32767, value - 65536, value).to(torch.int16).view(torch.bfloat16)
            product = (value.double() * factor[..., p % 2].double()).to(torch.bfloat16)
            out[:, p % 2, :, :, :, :, p // 2, i] = product.view(rows, columns, 8, 4, 4).permute(0, 2, 1, 3, 4)
    return out.reshape(rows * 16, columns * 64)


def test_fragments_hold_the_exact_products() -> None:
    parts = random_parts(48, 208, 1.0, seed=1)
    weight = weights.prepare_nvfp4([parts])
    got = emulate(weight).double()[:48, :208] * weight.row_scales.double()[:48, None]
    assert torch.equal(got, plain(parts))
    assert not emulate(weight)[:, 208:].any()


def test_codes_and_scales_survive_packing() -> None:
    parts = random_parts(32, 256, 1.0, seed=2, low=1)
    codes = torch.stack([parts.packed & 15, parts.packed >> 4], -1).flatten(-2)
    assert torch.equal(layout.unpack_codes(layout.pack_codes(parts.packed)), codes)
    assert torch.equal(layout.unpack_scales(layout.pack_scales(parts.scales)), parts.scales.float())


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x81, 0xB8])
def test_scales_that_cannot_be_are_refused(byte: int) -> None:
    parts = random_parts(32, 256, 1.0, seed=3)
    parts.scales.view(torch.uint8)[5, 3] = byte
    with pytest.raises(ValueError, match="negative or NaN"):
        weights.prepare_nvfp4([parts])


def test_shapes_that_do_not_fit_are_refused() -> None:
    a, b = random_parts(32, 256, 1.0, seed=3), random_parts(32, 128, 1.0, seed=3)
    with pytest.raises(ValueError, match="agree in K"):
        weights.prepare_nvfp4([a, b])
    with pytest.raises(ValueError, match="need scales of shape"):
        weights.prepare_nvfp4([Parts(a.packed, b.scales, a.global_scale)])
    with pytest.raises(ValueError, match="same N"):
        weights.prepare_nvfp4([a, random_parts(16, 256, 1.0, seed=4)], gate_up=True)


@pytest.mark.parametrize("gate_up", [False, True])
def test_dequantised_rows(gate_up: bool) -> None:
    one, two = random_parts(24, 208, 0.37, seed=5), random_parts(24, 208, 3e-4, seed=6)
    weight = weights.prepare_nvfp4([one, two], gate_up=gate_up)
    out = torch.full((48, 208), float("nan"), dtype=torch.bfloat16)
    dequantise.nvfp4_to_bf16(weight, out)
    expected = torch.cat([plain(one), plain(two)])
    # The interpreter cuts off where the GPU rounds to nearest: twice the GPU's bound.
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=0)


def test_fp8_copy_keeps_three_and_six() -> None:
    parts = random_parts(64, 256, 0.01, seed=7, low=0x38)
    copy = weights.prepare_nvfp4([parts], fp8=True).fp8
    assert copy is not None
    back = copy.values.double() * copy.scales.double()[:, None]
    assert (back - plain(parts)).norm() / plain(parts).norm() < 0.02
    mantissa = copy.scales.double() / parts.global_scale.double() / 1.5
    torch.testing.assert_close(torch.log2(mantissa), torch.log2(mantissa).round())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_block_product(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(8)
    n, k, m = 200, 320, 9
    values = torch.randn(n, k, generator=g).to(weights.FP8)
    scales = torch.rand(2, 3, generator=g) + 0.5
    weight = weights.prepare_fp8_block([(values, scales)])
    x = torch.randn(m, k, generator=g).to(torch.bfloat16)
    out = torch.full((m, n), float("nan"), dtype=dtype)
    dequantise.product_fp8_block(x, weight, out)
    assert torch.equal(out.float(), out.bfloat16().float()) == (dtype == torch.bfloat16)
    full = values.double() * scales.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    expected = x.double() @ full.T
    assert (out.double() - expected).norm() / expected.norm() < 0.08


def test_fp8_blocks_expanded() -> None:
    g = torch.Generator().manual_seed(9)
    n, k = 328, 272
    values, scales = torch.randn(n, k, generator=g).to(weights.FP8), torch.rand(3, 3, generator=g) + 0.5
    weight = weights.prepare_fp8_block([(values[:256], scales[:2]), (values[256:], scales[2:])])
    out = torch.full((n, k), float("nan"), dtype=torch.bfloat16)
    dequantise.fp8_block_to_bf16(weight, out)
    # The interpreter cuts off where the GPU rounds to nearest: compare with the same product within one step.
    expected = fp8.dequantise(values, scales)
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=0)
    # The order of rows and columns is exact: scales of one leave nothing to round.
    dequantise.fp8_block_to_bf16(weights.prepare_fp8_block([(values, torch.ones(3, 3))]), out)
    assert torch.equal(out.float(), values.float())


@pytest.mark.parametrize(("multiply_fp8", "bound"), [(False, 1e-2), (True, 0.08)])
def test_many_rows_of_fp8_blocks(multiply_fp8: bool, bound: float) -> None:
    """Exact by default, in FP8 when asked for."""
    g = torch.Generator().manual_seed(10)
    n, k, m = 200, 272, 66
    values, scales = torch.randn(n, k, generator=g).to(weights.FP8), torch.rand(2, 3, generator=g) + 0.5
    weight = weights.prepare_fp8_block([(values, scales)], multiply_fp8)
    workspace = ops.make_workspace([weight], m)
    assert (workspace.dequantised.numel() == 0) == multiply_fp8
    x = torch.randn(m, k, generator=g).to(torch.bfloat16)
    expected = x.double() @ fp8.dequantise(values, scales).double().T
    error = (ops.linear(x, weight, workspace).double() - expected).norm() / expected.norm()
    assert error < bound
    assert (error > 1e-2) == multiply_fp8


@pytest.mark.parametrize("form", ["bf16", "nvfp4"])
def test_products_in_fp32_are_not_rounded(form: str) -> None:
    """As logits are: what lies between bf16 numbers stays there."""
    n, k, m = 200, 272, 200  # more rows than a quantised weight is read for in registers
    parts = random_parts(n, k, 2e-4, seed=12, low=0x30)
    weight = weights.prepare_nvfp4([parts]) if form == "nvfp4" else weights.prepare_bf16([plain(parts)])
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(13)).to(torch.bfloat16)
    workspace = ops.make_workspace([weight], m)
    wide = torch.full((m, n + 8), float("nan"))
    out = ops.linear(x, weight, workspace, wide[:, :n])
    assert wide[:, n:].isnan().all()
    values = weight.values if isinstance(weight, weights.Bf16Weight) else workspace.dequantised.view(n, k)
    expected = x.double() @ values.double().T
    assert (out - expected).norm() / expected.norm() < 1e-6
    assert (out != out.bfloat16().float()).float().mean() > 0.9
    rounded = ops.linear(x, weight, workspace)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.double() - expected).norm() / expected.norm() < 4e-3
    with pytest.raises(ValueError, match="out must be bf16 or fp32"):
        ops.linear(x, weight, workspace, out.half())


def test_nvfp4_activations() -> None:
    x = torch.randn(5, 208, generator=torch.Generator().manual_seed(10)).to(torch.bfloat16)
    x[2] = 0
    codes, scales, factors = scaled.quantise_nvfp4(x)
    back = plain(Parts(codes, scales, torch.tensor(1.0))) * factors.double()[:, None]
    assert not back[2].any()
    # Four bits: about 9 % of normal numbers; the interpreter cuts scales off where the GPU rounds.
    assert (back - x.double()).norm() / x.double().norm() < 0.12
    # The codes are the nearest ones under their scale.
    step = scales.double().repeat_interleave(16, 1) * factors.double()[:, None]
    distance = (TABLE.double() * step.unsqueeze(-1) - x.double().unsqueeze(-1)).abs().amin(-1)
    assert torch.all((back - x.double()).abs() <= distance * 1.0001 + 1e-9)
