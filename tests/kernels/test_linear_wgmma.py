"""The few-row product on `wgmma` and its order of the weights: packing bit for bit, the kernel emulated on the CPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from gluon_emulator import launch
from sparkinfer_kernels.linear import dequantise, layout, skinny, tiles, weights, wgmma_kernel
from test_linear import TABLE, plain, random_parts
from test_linear_skinny import MASK, WORD, off, times


@pytest.fixture(autouse=True)
def in_wgmma_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "ORDER", "wgmma")


def nvfp4_asm(word: torch.Tensor, pair: torch.Tensor) -> list[torch.Tensor]:
    w, pair = word.to(torch.int64) & WORD, pair.to(torch.int64) & WORD
    upper, lower = (pair & 0xFFFF) * 0x10001, (pair >> 16) * 0x10001
    d = ((w >> 3) & 0x01C001C0) | ((w << 2) & 0x80008000)
    pairs = [(w & MASK, upper), ((w << 3) & MASK, lower), (((w & 0x40074007) * 66) & MASK, upper), (d, lower)]
    return [half for codes, factor in pairs for half in times(codes, factor)]


def scales_asm(word: torch.Tensor) -> list[torch.Tensor]:
    w = word.to(torch.int64) & WORD
    return [(one & 0x0FF00FF0 | 0x60006000).to(torch.int32) for one in (w, (w >> 8) | (w << 24) & WORD)]


ASM = {tiles.DEQUANTISE: nvfp4_asm, tiles.SCALES: scales_asm}


def product(weight: weights.Nvfp4Weight, x: torch.Tensor, shape: tuple[int, ...], programs: int, **how: Any) -> Any:
    (n, k), activate = weight.shape, how.get("activate", False)
    out = torch.full((x.shape[0], n // 2 if activate else n), float("nan"), dtype=torch.bfloat16)
    given = {
        "x_ptr": x.reshape(-1),
        "x_stride": k,
        "codes_ptr": weight.codes.view(torch.int32).reshape(-1),
        "scales_ptr": weight.scales.view(torch.int32).reshape(-1),
        "row_scales_ptr": weight.row_scales,
        "out_ptr": out.reshape(-1),
        "out_stride": out.shape[1],
        "partials_ptr": torch.full((1 << 20,), float("nan")),
        "counters_ptr": torch.zeros(512, dtype=torch.int32),
        "M": x.shape[0],
        "N": n,
        "K": k,
        **dict(zip(("BM", "WARPS", "RT", "COLUMNS", "STAGES"), shape, strict=True)),
        "GATE_UP": weight.gate_up,
        "ACTIVATE": activate,
        "PDL": True,
    }
    grid = (-(-x.shape[0] // shape[0]), programs)
    launch(wgmma_kernel.nvfp4_wgmma_kernel, given, grid, ASM, how.get("order", sorted))
    assert not given["counters_ptr"].any(), "counters must be zero for the next launch"
    return out


def test_codes_and_scales_survive_packing() -> None:
    parts = random_parts(32, 256, 1.0, seed=2, low=1)
    codes = torch.stack([parts.packed & 15, parts.packed >> 4], -1).flatten(-2)
    assert torch.equal(layout.unpack_codes(layout.pack_codes(parts.packed, order="wgmma"), "wgmma"), codes)
    assert torch.equal(layout.unpack_scales(layout.pack_scales(parts.scales, "wgmma"), "wgmma"), parts.scales.float())
    with pytest.raises(ValueError, match="must be one of mma, wgmma"):
        layout._order_from("other")


def test_a_word_is_what_an_instruction_takes() -> None:
    """Lane 4g + t, word s, half i: codes p = 2h + r of rows g + 8r, columns 16s + 8h + 2t + i."""
    parts = random_parts(16, 64, 1.0, seed=3)
    codes = torch.stack([parts.packed & 15, parts.packed >> 4], -1).flatten(-2)
    word = layout.pack_codes(parts.packed, order="wgmma").view(torch.int32).view(8, 4, 4).to(torch.int64) & WORD
    for g, t, s, i, h, r in [(0, 0, 0, 0, 0, 0), (3, 1, 2, 1, 0, 1), (7, 3, 3, 1, 1, 1), (5, 2, 1, 0, 1, 0)]:
        half = int(word[g, t, s]) >> (16 * i)
        sign, code = layout.SIGN_BIT[2 * h + r], layout.CODE_BIT[2 * h + r]
        found = (half >> sign & 1) << 3 | (half >> code & 7)
        assert found == int(codes[g + 8 * r, 16 * s + 8 * h + 2 * t + i])


@pytest.mark.parametrize("gate_up", [False, True])
def test_dequantised_rows(gate_up: bool) -> None:
    one, two = random_parts(24, 208, 0.37, seed=5), random_parts(24, 208, 3e-4, seed=6)
    weight = weights.prepare_nvfp4([one, two], gate_up=gate_up)
    out = torch.full((48, 208), float("nan"), dtype=torch.bfloat16)
    dequantise.nvfp4_to_bf16(weight, out)
    # The interpreter cuts off where the GPU rounds to nearest: twice the GPU's bound.
    torch.testing.assert_close(out.double(), torch.cat([plain(one), plain(two)]), rtol=2**-7, atol=0)


@pytest.mark.parametrize("shape", [(8, 4, 1, 128, 4), (16, 4, 2, 256, 3), (8, 8, 1, 128, 2)])
@pytest.mark.parametrize("programs", [1, 3, 5])
def test_shares_of_any_size(shape: tuple[int, ...], programs: int) -> None:
    parts = random_parts(232, 464, 2e-4, seed=1, low=0x30)
    weight = weights.prepare_nvfp4([parts])
    x = torch.randn(5, 464, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    got = product(weight, x, shape, programs)
    assert off(got, x.double() @ plain(parts).T) < 3e-3
    shuffled = product(weight, x, shape, programs, order=lambda ids: random.Random(3).sample(list(ids), len(list(ids))))
    assert torch.equal(shuffled, got), "whoever comes last sums in the same order"


def test_several_blocks_of_tokens_and_a_program_a_piece() -> None:
    parts = random_parts(72, 272, 2e-4, seed=6, low=0x30)
    x = torch.randn(19, 272, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    expected = x.double() @ plain(parts).T
    for programs in (3, 6):
        assert off(product(weights.prepare_nvfp4([parts]), x, (8, 4, 1, 128, 3), programs), expected) < 3e-3


@pytest.mark.parametrize("programs", [1, 3])
def test_gate_and_up(programs: int) -> None:
    one, two = random_parts(40, 208, 2e-4, seed=8, low=0x30), random_parts(40, 208, 3e-4, seed=9, low=0x30)
    weight = weights.prepare_nvfp4([one, two], gate_up=True)
    x = torch.randn(4, 208, generator=torch.Generator().manual_seed(10)).to(torch.bfloat16)
    gate, up = x.double() @ plain(one).T, x.double() @ plain(two).T
    assert off(product(weight, x, (8, 4, 1, 128, 3), programs), torch.cat([gate, up], 1)) < 3e-3
    activated = product(weight, x, (8, 4, 1, 128, 3), programs, activate=True)
    assert off(activated, torch.nn.functional.silu(gate) * up) < 3e-3


def test_zero_scales_and_every_code() -> None:
    parts = random_parts(16, 128, 1.0, seed=11)
    parts.scales.view(torch.uint8)[:, ::3] = 0
    parts.packed[0, :8] = torch.arange(8, dtype=torch.uint8) * 2 + (torch.arange(8, dtype=torch.uint8) * 2 + 1) * 16
    got = product(weights.prepare_nvfp4([parts]), torch.eye(128).to(torch.bfloat16), (16, 4, 1, 128, 2), 1)
    torch.testing.assert_close(got.double().T, plain(parts), rtol=2**-8, atol=0)
    assert TABLE[1] == 0.5


def test_every_set_of_parameters_fits() -> None:
    for tokens in skinny.WGMMA_TOKENS:
        for n, k in ((34816, 5120), (5120, 17408), (2048, 4096), (96, 128)):
            config = skinny.wgmma_config(tokens, n, k)
            assert config.shared(tokens) + 2048 <= skinny.SHARED["sm_90"]
            assert config.warps % 4 == 0
