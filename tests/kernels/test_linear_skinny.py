"""The few-row products, emulated on the CPU: division of work, pipeline, sums over programs, epilogues."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from gluon_emulator import launch
from sparkinfer_kernels.linear import skinny_fp8_kernel, skinny_kernel, weights
from test_linear import plain, random_parts

MASK = 0x81C081C0
WORD = (1 << 32) - 1


def halves(pair: torch.Tensor) -> list[torch.Tensor]:
    """Low and high bfloat16 of pairs given as int64."""
    out = []
    for shift in (0, 16):
        half = (pair >> shift) & 0xFFFF
        out.append(torch.where(half > 32767, half - 65536, half).to(torch.int16).view(torch.bfloat16))
    return out


def times(pair: torch.Tensor, factor: torch.Tensor) -> list[torch.Tensor]:
    return [
        (a.double() * b.double()).to(torch.bfloat16)
        for a, b in zip(halves(pair & WORD), halves(factor.to(torch.int64) & WORD), strict=True)
    ]


def nvfp4_asm(word: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor) -> list[torch.Tensor]:
    w = word.to(torch.int64) & WORD
    d = ((w >> 3) & 0x01C001C0) | ((w << 2) & 0x80008000)
    pairs = [(w & MASK, upper), ((w << 3) & MASK, lower), (((w & 0x40074007) * 66) & MASK, upper), (d, lower)]
    return [half for pair, factor in pairs for half in times(pair, factor)]


def fp8_asm(word: torch.Tensor) -> list[torch.Tensor]:
    w = word.to(torch.int64) & WORD
    out = []
    for first in (0, 2):
        pair = sum((((w >> (8 * (first + i))) & 0xFF) << (16 * i + 8)) for i in range(2))
        pair = (pair & 0x80008000) | ((pair >> 4) & 0x07F007F0)
        out += times(pair, torch.tensor(0x7B807B80))
    return out


ASM = {skinny_kernel.DEQUANTISE: nvfp4_asm, skinny_fp8_kernel.DEQUANTISE: fp8_asm}


def arguments(x: torch.Tensor, out: torch.Tensor, shape: tuple[int, ...], n: int, k: int) -> dict[str, Any]:
    return {
        "x_ptr": x.reshape(-1),
        "x_stride": k,
        "out_ptr": out.reshape(-1),
        "out_stride": out.shape[1],
        "partials_ptr": torch.full((1 << 20,), float("nan")),
        "counters_ptr": torch.zeros(512, dtype=torch.int32),
        "M": x.shape[0],
        "N": n,
        "K": k,
        **dict(zip(("BM", "WK", "WN", "RT", "KB", "STAGES"), shape, strict=True)),
        "PDL": True,
    }


def nvfp4(weight: weights.Nvfp4Weight, x: torch.Tensor, shape: tuple[int, ...], programs: int, **how: Any) -> Any:
    (n, k), activate = weight.shape, how.get("activate", False)
    dtype = how.get("dtype", torch.bfloat16)
    out = torch.full((x.shape[0], n // 2 if activate else n), float("nan"), dtype=dtype)
    given = arguments(x, out, shape, n, k)
    columns = -(-k // 128)
    given |= {
        "codes_ptr": weight.codes.view(torch.int32).reshape(-1),
        "scales_ptr": weight.scales.view(torch.int32).reshape(-1),
        "row_scales_ptr": weight.row_scales,
        "row_tiles": weight.codes.shape[0],
        "EVEN": columns % (shape[1] * shape[4]) == 0,
        "GATE_UP": weight.gate_up,
        "ACTIVATE": activate,
    }
    grid = (-(-x.shape[0] // shape[0]), programs)
    launch(skinny_kernel.nvfp4_skinny_kernel, given, grid, ASM, how.get("order", sorted))
    assert not given["counters_ptr"].any(), "counters must be zero for the next launch"
    return out


def between(values: torch.Tensor) -> float:
    """Share of the values that are no bf16 numbers."""
    return (values != values.bfloat16().float()).float().mean().item()


def off(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("shape", [(8, 1, 2, 2, 1, 4), (8, 2, 1, 1, 1, 3), (16, 1, 2, 1, 2, 3), (8, 2, 2, 1, 2, 2)])
@pytest.mark.parametrize("programs", [1, 2, 3, 5, 7])
def test_shares_of_any_size(shape: tuple[int, ...], programs: int) -> None:
    parts = random_parts(136, 464, 2e-4, seed=1, low=0x30)
    weight = weights.prepare_nvfp4([parts])
    x = torch.randn(5, 464, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    expected = x.double() @ plain(parts).T
    got = nvfp4(weight, x, shape, programs)
    assert off(got, expected) < 3e-3
    whole = nvfp4(weight, x, shape, programs, dtype=torch.float32)
    assert torch.equal(whole.bfloat16(), got), "in fp32 the same sums are stored, in bf16 they are rounded once"
    # Each weight is rounded to bf16 in registers, the sums are not.
    assert between(whole) > 0.9
    # Whoever comes last sums in the same order.
    for order in (
        lambda ids: sorted(ids, reverse=True),
        lambda ids: random.Random(3).sample(list(ids), len(list(ids))),
    ):
        assert torch.equal(nvfp4(weight, x, shape, programs, order=order), got)


def test_more_programs_than_pieces_are_harmless() -> None:
    parts = random_parts(40, 208, 2e-4, seed=4, low=0x30)
    x = torch.randn(3, 208, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    got = nvfp4(weights.prepare_nvfp4([parts]), x, (8, 1, 1, 1, 1, 4), 9)
    assert off(got, x.double() @ plain(parts).T) < 3e-3


def test_several_blocks_of_tokens() -> None:
    parts = random_parts(48, 272, 2e-4, seed=6, low=0x30)
    x = torch.randn(19, 272, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    got = nvfp4(weights.prepare_nvfp4([parts]), x, (8, 1, 1, 1, 1, 3), 4)
    assert off(got, x.double() @ plain(parts).T) < 3e-3


@pytest.mark.parametrize("programs", [1, 3])
def test_gate_and_up(programs: int) -> None:
    one, two = random_parts(24, 208, 2e-4, seed=8, low=0x30), random_parts(24, 208, 3e-4, seed=9, low=0x30)
    weight = weights.prepare_nvfp4([one, two], gate_up=True)
    x = torch.randn(4, 208, generator=torch.Generator().manual_seed(10)).to(torch.bfloat16)
    gate, up = x.double() @ plain(one).T, x.double() @ plain(two).T
    assert off(nvfp4(weight, x, (8, 1, 2, 1, 1, 3), programs), torch.cat([gate, up], 1)) < 3e-3
    activated = nvfp4(weight, x, (8, 1, 2, 1, 1, 3), programs, activate=True)
    assert off(activated, torch.nn.functional.silu(gate) * up) < 3e-3


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(
    ("programs", "dtype"),
    [(1, torch.bfloat16), (3, torch.bfloat16), (5, torch.bfloat16), (1, torch.float32), (3, torch.float32)],
)
def test_fp8(blocks: bool, programs: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(11)
    n, k = 200, 272
    values = torch.randn(n, k, generator=g).to(weights.FP8)
    scales = torch.rand(2, 3, generator=g) + 0.5 if blocks else torch.rand(n, generator=g) + 0.5
    full = values.double()
    if blocks:
        full = full * scales.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    else:
        full = full * scales.double()[:, None]
    x = torch.randn(5, k, generator=g).to(torch.bfloat16)
    out = torch.full((5, n), float("nan"), dtype=dtype)
    given = arguments(x, out, (8, 2, 2, 1, 1, 3), n, k)
    given |= {
        "words_ptr": values.view(torch.int32).reshape(-1),
        "row_scales_ptr": None if blocks else scales,
        "block_scales_ptr": scales.reshape(-1) if blocks else None,
        "BLOCKS": blocks,
    }
    launch(skinny_fp8_kernel.fp8_skinny_kernel, given, (1, programs), ASM)
    # The weights are bf16 numbers exactly: what is left in fp32 is the rounding of the sums.
    assert off(out, x.double() @ full.T) < (3e-3 if dtype == torch.bfloat16 else 2e-6)
