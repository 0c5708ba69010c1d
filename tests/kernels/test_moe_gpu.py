"""Mixture of experts on a GPU against fp64: ragged numbers of tokens, every form of weights, graphs."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from moe_cases import CASES, Case, make_case, off
from sparkinfer_kernels.linear import layout
from sparkinfer_kernels.moe import gpu, items

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["mma", "wgmma"], autouse=True)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both orders of NVFP4 weights, each with its kernels."""
    if request.param == "wgmma" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma needs an sm_90 GPU")
    monkeypatch.setattr(layout, "ORDER", request.param)


REAL = {"hidden": 2048, "experts": 256, "inner": 512, "top_k": 8}
LARGE = [
    *(Case(tokens, **REAL, kind="nvfp4") for tokens in (1, 4, 8, 9, 32, 64, 65, 500, 3000)),
    Case(3000, **REAL, kind="nvfp4", wide="bf16"),
    Case(3000, **REAL, kind="nvfp4", wide="fp8"),
    Case(2000, **REAL, kind="nvfp4", wide="bf16"),
    Case(1000, **REAL, kind="nvfp4", wide="fp8"),
    Case(64, **REAL, kind="bf16"),
    Case(700, **REAL, kind="bf16", skew="few"),
]


@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_against_fp64_and_captured(case: Case) -> None:
    made = make_case(case, "cuda")
    workspace = gpu.make_workspace(made.config, case.tokens + 3, made.x.device)
    out = torch.full_like(made.x, float("nan"))
    most = 1 << 20 if case.wide == "nvfp4" else 0
    with mock.patch.object(gpu, "NVFP4_TOKENS", most), mock.patch.object(items, "NVFP4_TOKENS", most):
        gpu.moe(made.x, made.weights, workspace, out)
        torch.cuda.synchronize()
        assert off(out, made.expected) < case.limit
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = gpu.moe(made.x, made.weights, workspace)
    for buffer in (workspace.inner, workspace.y):
        buffer.fill_(float("nan"))
    for _ in range(3):
        again.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, again)


@pytest.mark.parametrize("tokens", [7, 20, 64, 70, 3000])
def test_rows_without_numbers_disturb_no_other(tokens: int) -> None:
    """Padding rows hold whatever was in memory: their pairs must not get among those of other rows."""
    made = make_case(Case(tokens=tokens, hidden=128, experts=8, inner=64, top_k=2, kind="nvfp4"), "cuda")
    workspace = gpu.make_workspace(made.config, tokens, made.x.device)
    whole = gpu.moe(made.x, made.weights, workspace)
    for turn, wrong in itertools.product(range(20), (float("nan"), float("inf"))):
        x, bad = made.x.clone(), torch.randperm(tokens)[: tokens // 3].tolist()
        x[bad] = wrong
        out = gpu.moe(x, made.weights, workspace)
        others = torch.ones(tokens, dtype=torch.bool)
        others[bad] = False
        assert torch.equal(out[others.cuda()], whole[others.cuda()]), turn
