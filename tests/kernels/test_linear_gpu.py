"""Projections on a GPU against fp64: every kernel, shapes that fill no tile, every tuned set of parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sparkinfer_kernels.linear import layout, skinny, weights
from sparkinfer_kernels.linear.gpu import (
    linear,
    linear_swiglu,
    make_workspace,
    prepare_fp8_block,
    prepare_nvfp4,
)
from test_linear import Parts, plain, random_parts

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["mma", "wgmma"], autouse=True)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both orders of NVFP4 weights, each with its kernels."""
    if request.param == "wgmma" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma needs an sm_90 GPU")
    monkeypatch.setattr(layout, "ORDER", request.param)


def on_gpu(n: int, k: int, factor: float, seed: int) -> tuple[Parts, torch.Tensor]:
    """Parts on the GPU and the matrix [N, K] in fp64."""
    parts = random_parts(n, k, factor, seed, low=0x30)
    moved = Parts(parts.packed.cuda(), parts.scales.cuda(), parts.global_scale.cuda())
    return moved, plain(parts).cuda()


def off(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("n", "k"), [(48, 208), (1544, 256), (2064, 640), (5120, 6144)])
def test_nvfp4_at_few_and_many_rows(n: int, k: int) -> None:
    parts, matrix = on_gpu(n, k, 2e-4, seed=n)
    weight = prepare_nvfp4([parts])
    workspace = make_workspace([weight], 1000)
    for m in (1, 3, 17, 33, 64, 65, 200, 1000):
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        out = torch.full((m, n + 8), float("nan"), device="cuda", dtype=torch.bfloat16)
        linear(x, weight, workspace, out[:, :n])
        assert off(out[:, :n], x.double() @ matrix.T) < 4e-3, m
        assert out[:, n:].isnan().all()
        assert torch.equal(out[:, :n], linear(x, weight, workspace)), "the same product twice differs"
    assert not workspace.counters.any()


def test_swiglu_in_the_same_kernel() -> None:
    (gate, gate_matrix), (up, up_matrix) = on_gpu(776, 272, 2e-4, seed=1), on_gpu(776, 272, 3e-4, seed=2)
    weight = prepare_nvfp4([gate, up], gate_up=True, fp8=True)
    workspace = make_workspace([weight], 300)
    for m, bound in ((1, 4e-3), (40, 4e-3), (300, 6e-2)):
        x = torch.randn(m, 272, device="cuda").to(torch.bfloat16)
        g, u = x.double() @ gate_matrix.T, x.double() @ up_matrix.T
        assert off(linear(x, weight, workspace), torch.cat([g, u], 1)) < bound
        assert off(linear_swiglu(x, weight, workspace), torch.nn.functional.silu(g) * u) < bound


def test_fp8_weights() -> None:
    for n, k, m in ((1000, 272, 1), (2048, 1024, 33), (2048, 1024, 130)):
        values = torch.randn(n, k, device="cuda").to(weights.FP8)
        scales = torch.rand(-(-n // 128), -(-k // 128), device="cuda") + 0.5
        block, exact = prepare_fp8_block([(values, scales)], multiply_fp8=True), prepare_fp8_block([(values, scales)])
        row = weights.Fp8RowWeight(values, torch.rand(n, device="cuda") + 0.5)
        workspace = make_workspace([block, exact, row], m)
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        full = scales.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k] * values.double()
        bound = 4e-3 if m <= 64 else 4e-2
        assert off(linear(x, block, workspace), x.double() @ full.T) < bound
        assert off(linear(x, exact, workspace), x.double() @ full.T) < 4e-3
        by_row = values.double() * row.scales.double()[:, None]
        assert off(linear(x, row, workspace), x.double() @ by_row.T) < bound


def fp32_weights(n: int, k: int) -> list[tuple[weights.Weight, torch.Tensor, float]]:
    """(weight, matrix [N, K] in fp64, error of a product with more rows than `SKINNY_ROWS`) of every form."""
    parts, matrix = on_gpu(n, k, 2e-4, seed=4)
    values, plain16 = torch.randn(n, k, device="cuda").to(weights.FP8), torch.randn(n, k, device="cuda").bfloat16()
    scales = torch.rand(-(-n // 128), -(-k // 128), device="cuda") + 0.5
    full = scales.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k] * values.double()
    row = weights.Fp8RowWeight(values, torch.rand(n, device="cuda") + 0.5)
    return [
        (weights.prepare_bf16([plain16]), plain16.double(), 1e-5),
        (prepare_nvfp4([parts]), matrix, 4e-3),
        (prepare_fp8_block([(values, scales)]), full, 4e-3),
        (prepare_fp8_block([(values, scales)], multiply_fp8=True), full, 4e-2),
        (row, values.double() * row.scales.double()[:, None], 4e-2),
    ]


def test_results_in_fp32() -> None:
    """As logits are stored: the sums of bf16 products are the same, but for the rounding at the end."""
    for weight, matrix, many in fp32_weights(2064, 640):
        workspace = make_workspace([weight], 300)
        for m in (1, 3, 33, 64, 65, 300):
            x = torch.randn(m, 640, device="cuda").to(torch.bfloat16)
            expected = x.double() @ matrix.T
            out = linear(x, weight, workspace, torch.full((m, 2064), float("nan"), device="cuda"))
            few = 4e-3 if isinstance(weight, weights.Nvfp4Weight) else 1e-5
            assert off(out, expected) < (few if m <= 64 else many), (type(weight), m)
            if m <= 64 or not isinstance(weight, weights.Fp8RowWeight):
                assert (out != out.bfloat16().float()).float().mean() > 0.9, (type(weight), m)
            if m <= 64 and not isinstance(weight, weights.Bf16Weight):
                assert torch.equal(out.bfloat16(), linear(x, weight, workspace)), (type(weight), m)


@pytest.mark.slow
def test_every_tuned_set_of_parameters() -> None:
    parts, matrix = on_gpu(2064, 640, 2e-4, seed=3)
    weight = prepare_nvfp4([parts])
    workspace = make_workspace([weight], 64)
    for tokens, config in every_config():
        x = torch.randn(tokens - 1, 640, device="cuda").to(torch.bfloat16)
        for per_sm in (0, 1, 5):
            out = torch.full((tokens - 1, 2064), float("nan"), device="cuda", dtype=torch.bfloat16)
            chosen = replace(config, per_sm=per_sm)
            skinny.product(x, weight, workspace.partials, workspace.counters, out, config=chosen)
            assert off(out, x.double() @ matrix.T) < 4e-3, (tokens, chosen)


def every_config() -> set[tuple[int, skinny.Config | skinny.WgmmaConfig]]:
    """(rows of x, parameters) of the table."""
    if layout.linear_order() == "wgmma":
        stored = skinny._stored()["sm_90"]["nvfp4_wgmma"].items()
        return {(int(tokens), skinny.WgmmaConfig(*row[2:])) for tokens, rows in stored for row in rows}
    return {(tokens, row[2]) for tokens, rows in skinny._table()["sm_90"]["nvfp4"].items() for row in rows}
