"""Experts through lists of items on the CPU: Triton's kernels in its interpreter, the product emulated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

from interpreter_fixes import fix_interpreter
from moe_cases import CASES, Case, make_case, off
from moe_emulation import Emulated, quantised
from sparkinfer_kernels.linear import layout
from sparkinfer_kernels.moe import gpu, items
from sparkinfer_kernels.moe.experts_kernel import experts_kernel
from test_linear_wgmma import ASM

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_moe_gpu.py runs the kernels on the GPU")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels interpreted; the Gluon kernel emulated with few programs, in random order."""
    fix_interpreter()
    monkeypatch.setattr(layout, "ORDER", "wgmma")
    with (
        mock.patch.object(items, "experts_kernel", Emulated(experts_kernel, ASM)),
        mock.patch.object(items, "quantise_rows", quantised),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=mock.Mock(multi_processor_count=2)),
    ):
        yield


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_fp64(case: Case) -> None:
    made = make_case(case, "cpu")
    workspace = gpu.make_workspace(made.config, case.tokens + 3, torch.device("cpu"))
    for buffer in (workspace.inner, workspace.y, workspace.pairs, workspace.shares):
        buffer.fill_(float("nan") if buffer.is_floating_point() else 1 << 28)
    out = torch.full((case.tokens, case.hidden), float("nan"), dtype=torch.bfloat16)
    with mock.patch.object(items, "NVFP4_TOKENS", 1 << 20 if case.wide == "nvfp4" else 0):
        gpu.moe(made.x, made.weights, workspace, out)
    if case.tokens == 7:
        # Counters and lists are as they were.
        assert torch.equal(out, gpu.moe(made.x, made.weights, workspace))
    assert off(out, made.expected) < case.limit
    # Weights of the experts, in the order of the choice, and the gate's sigmoid.
    assert torch.allclose(workspace.shares[: case.tokens].double(), made.shares, atol=2e-5)


def test_equal_logits_take_the_first_experts() -> None:
    case = Case(tokens=5, hidden=128, experts=8, inner=64, top_k=3, kind="bf16")
    for tokens in (5, 70):
        made = make_case(case._replace(tokens=tokens), "cpu")
        made.weights.router.zero_()
        made.weights.router[:8] = made.weights.router[0]
        workspace = gpu.make_workspace(made.config, tokens, torch.device("cpu"))
        gpu.moe(made.x, made.weights, workspace)
        assert torch.allclose(workspace.shares[:tokens, :3], torch.tensor(1 / 3))
        assert workspace.chosen.view(-1, 4)[:tokens].tolist() == [[0, 1, 2, 8]] * tokens
        used = workspace.block_expert[: int(workspace.items)]
        assert used.unique_consecutive().tolist() == [0, 1, 2, 8]


def test_rows_do_not_depend_on_their_neighbours() -> None:
    case = Case(tokens=20, hidden=128, experts=16, inner=64, top_k=4, kind="nvfp4")
    made = make_case(case, "cpu")
    workspace = gpu.make_workspace(made.config, 20, torch.device("cpu"))
    whole = gpu.moe(made.x, made.weights, workspace)
    part = gpu.moe(made.x[3:15], made.weights, workspace)
    assert torch.equal(whole[3:15], part)


@pytest.mark.parametrize("tokens", [7, 20, 70])
def test_rows_without_numbers_disturb_no_other(tokens: int) -> None:
    """Padding rows hold whatever was in memory: their pairs must not get among those of other rows."""
    made = make_case(Case(tokens=tokens, hidden=128, experts=8, inner=64, top_k=2, kind="nvfp4"), "cpu")
    workspace = gpu.make_workspace(made.config, tokens, torch.device("cpu"))
    whole = gpu.moe(made.x, made.weights, workspace)
    for wrong in (float("nan"), float("inf")):
        x = made.x.clone()
        x[[0, 4, tokens - 1]] = wrong
        x[4, ::2] *= -1
        out = gpu.moe(x, made.weights, workspace)
        chosen = workspace.chosen.view(-1, 3)[:tokens]
        assert (chosen[:, :2] < 8).all()
        assert (chosen[:, 0] != chosen[:, 1]).all()
        others = [row for row in range(tokens) if row not in (0, 4, tokens - 1)]
        assert torch.equal(out[others], whole[others])
        assert not out[0].isfinite().any()


@pytest.mark.parametrize(("most", "through_items"), [(64, False), (70, True)])
def test_many_tokens_go_through_blocks_of_a_copy(most: int, through_items: bool) -> None:
    case = Case(tokens=70, hidden=128, experts=8, inner=64, top_k=2, kind="nvfp4", wide="bf16")
    made = make_case(case, "cpu")
    workspace = gpu.make_workspace(made.config, case.tokens, torch.device("cpu"))
    with (
        mock.patch.dict(gpu.ITEM_TOKENS, bf16=most),
        mock.patch.object(items, "pairs_output", wraps=items.pairs_output) as taken,
    ):
        out = gpu.moe(made.x, made.weights, workspace)
    assert taken.called == through_items
    assert off(out, made.expected) < case.limit


def test_without_a_copy_all_passes_go_through_items() -> None:
    case = Case(tokens=70, hidden=128, experts=8, inner=64, top_k=2, kind="nvfp4", wide="nvfp4")
    made = make_case(case, "cpu")
    workspace = gpu.make_workspace(made.config, case.tokens, torch.device("cpu"))
    with mock.patch.dict(gpu.ITEM_TOKENS, nvfp4=8):
        assert off(gpu.moe(made.x, made.weights, workspace), made.expected) < case.limit


def test_order_of_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen, expected in (("mma", "mma"), ("wgmma", "wgmma"), (None, "mma")):
        monkeypatch.setattr(layout, "ORDER", chosen)
        assert layout.expert_order(torch.device("cpu")) == expected
    for capability, expected in (((9, 0), "wgmma"), ((8, 9), "mma"), ((12, 0), "mma")):
        with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
            assert layout.expert_order(torch.device("cuda")) == expected
    assert layout.linear_order() == "mma"


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tokens=4, hidden=128, experts=8, inner=64, top_k=2, kind="bf16")
    made = make_case(case, "cpu")
    workspace = gpu.make_workspace(made.config, 4, torch.device("cpu"))
    with pytest.raises(ValueError, match="make it for the largest pass"):
        gpu.moe(made.x.repeat(2, 1), made.weights, workspace)
    with pytest.raises(ValueError, match="x must be bf16"):
        gpu.moe(made.x.float(), made.weights, workspace)
    monkeypatch.setattr(layout, "ORDER", "mma")
    with pytest.raises(ValueError, match="made for that order"):
        gpu.moe(made.x, made.weights, gpu.make_workspace(made.config, 4, torch.device("cpu")))
