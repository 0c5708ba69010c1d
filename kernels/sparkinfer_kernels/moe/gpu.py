"""Mixture of experts on a GPU: what the model imports. Nothing synchronises; grids depend on the number of rows alone.

* T <= `FEW_TOKENS`: one kernel for router, choice and the list of (expert, its pairs); gate and up with SwiGLU over
  that list, so that an expert's weights are read once for all of its tokens; down; the weighted sum (at most
  `BY_TOKEN` tokens: in the down kernel, which then walks all experts for each of its rows).
* more: router; a counting sort into blocks of one expert each (two kernels); the product of every block with its
  expert, SwiGLU in its epilogue; the down product; the weighted sum.

NVFP4 experts are expanded in registers, exactly (`linear/layout.py`); above `NVFP4_TOKENS` tokens a bf16 or FP8 copy is
used where `prepare_moe` has made one. Sums have one order, whatever else is in the batch. Weights in order "wgmma" go
through `items.py` instead, but for passes of so many tokens that blocks of a copy are faster (`ITEM_TOKENS`).
"""

from __future__ import annotations

import torch
import triton

from sparkinfer_kernels.linear import layout
from sparkinfer_kernels.moe import items, kernels, prefill_kernels
from sparkinfer_kernels.moe.items_workspace import ITEM_TOKENS, ItemWorkspace, make_item_workspace
from sparkinfer_kernels.moe.skinny_kernel import nvfp4_experts_kernel
from sparkinfer_kernels.moe.weights import ExpertMatrices, MoeWeights, Nvfp4Experts, prepare_moe
from sparkinfer_kernels.moe.workspace import (
    BY_TOKEN,
    DOWN,
    DOWN_SUM,
    FEW_BF16,
    FEW_TOKENS,
    GATE_UP,
    ITEM,
    NVFP4_TOKENS,
    ROUTER_ROWS,
    ROUTER_SPLIT,
    ROUTER_TOKENS,
    MoeConfig,
    Pipeline,
    Tile,
    Workspace,
    block_rows,
    max_blocks,
    tile_for,
)
from sparkinfer_kernels.moe.workspace import make_workspace as make_mma_workspace
from sparkinfer_kernels.programmatic import launch
from sparkinfer_kernels.rms_norm.gpu import quantise_rows

__all__ = ["ExpertMatrices", "MoeWeights", "Nvfp4Experts", "Workspace", "make_workspace", "moe", "prepare_moe"]


def make_workspace(config: MoeConfig, rows: int, device: torch.device) -> Workspace | ItemWorkspace:
    """Scratch memory for passes of up to `rows` rows, for weights in the order `layout.expert_order`."""
    blocks = make_mma_workspace(config, rows, device)
    return make_item_workspace(config, blocks) if layout.expert_order(device) == "wgmma" else blocks


def moe(
    x: torch.Tensor, weights: MoeWeights, workspace: Workspace | ItemWorkspace, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Routed experts plus sigmoid(shared gate) times the shared expert.

    Args:
        x: [T, H] bf16, rows contiguous. Padding rows are computed like others.
        weights: of `prepare_moe`.
        workspace: for at least T rows.
        out: [T, H] bf16, contiguous; made if None.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes or the size of the workspace do not fit.
    """
    tokens, hidden = x.shape[0], weights.router.shape[1]
    if x.ndim != 2 or x.shape[1] != hidden or x.dtype != torch.bfloat16 or x.stride(1) != 1:
        raise ValueError(f"x must be bf16 rows of {hidden} values side by side, got {x.dtype} {tuple(x.shape)}")
    if tokens > workspace.rows:
        raise ValueError(f"a workspace for {workspace.rows} rows cannot take {tokens}: make it for the largest pass")
    if out is None:
        out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=x.device)
    elif out.shape != x.shape or out.dtype != torch.bfloat16 or not out.is_contiguous():
        raise ValueError(f"out must be contiguous bf16 {tuple(x.shape)}, got {out.dtype} {tuple(out.shape)}")
    if tokens == 0:
        return out
    if isinstance(workspace, ItemWorkspace) != (weights.order == "wgmma"):
        raise ValueError(f"weights in order {weights.order!r} need a workspace made for that order")
    extra = _shared_apart(x, weights)
    if isinstance(workspace, ItemWorkspace):
        if tokens > ITEM_TOKENS[form := items.copied_form(weights)] and form != "nvfp4":
            _many(x, weights, workspace.blocks, out, extra)
            return out
        y = items.pairs_output(x, weights, workspace)
        _combine(y, workspace.shares, None, extra, out, weights.top_k, weights.slots)
    elif tokens > FEW_TOKENS:
        _many(x, weights, workspace, out, extra)
    else:
        _few(x, weights, workspace, out, extra)
    return out


def _shared_apart(x: torch.Tensor, weights: MoeWeights) -> torch.Tensor | None:
    if weights.shared_gate_up is None or weights.shared_down is None:
        return None
    gate, up = (x @ weights.shared_gate_up.t()).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate.float()) * up).to(x.dtype) @ weights.shared_down.t()


def _few(x: torch.Tensor, weights: MoeWeights, w: Workspace, out: torch.Tensor, extra: torch.Tensor | None) -> None:
    tokens, top_k, slots = x.shape[0], weights.top_k, weights.slots
    packed = weights.gate_up.nvfp4 is not None and weights.down.nvfp4 is not None
    by_token = packed and tokens <= BY_TOKEN and extra is None
    route_few(x, weights, w, by_token)
    if not packed:
        blocks = min(tokens * slots, tokens * top_k + triton.cdiv(tokens, ITEM))
        _grouped(x, weights.gate_up, "bf16", FEW_BF16, blocks, slots, w, w.inner, gate_up=True)
        _grouped(w.inner, weights.down, "bf16", FEW_BF16, blocks, slots, w, w.y, gate_up=False)
        _combine(w.y, w.shares, w.positions, extra, out, top_k, slots)
        return
    _experts(x, weights, w, w.inner, gate_up=True, shared=by_token)
    _experts(w.inner, weights, w, out if by_token else w.y, gate_up=False, total=by_token, tokens=tokens)
    if not by_token:
        _combine(w.y, w.shares, None, extra, out, top_k, slots)


def router_warps(tokens: int) -> int:
    """Warps of the router's program, whose last one holds all logits in registers."""
    return 8 if tokens <= 16 else 16


def route_few(x: torch.Tensor, weights: MoeWeights, w: Workspace, by_token: bool) -> None:
    """Shares and list of items of at most `FEW_TOKENS` tokens: one kernel."""
    (tokens, hidden), experts = x.shape, weights.router.shape[0] - 1
    slots, bt = weights.slots, max(16, triton.next_power_of_2(x.shape[0]))
    launch(
        kernels.route_few_kernel,
        (triton.cdiv(experts + 1, ROUTER_ROWS), ROUTER_SPLIT),
        x,
        x.stride(0),
        weights.router,
        w.partials,
        w.counters,
        w.shares,
        w.block_expert,
        w.pairs,
        w.block_rows,
        w.positions,
        w.counters[1:],
        tokens,
        hidden,
        E=experts,
        EP=triton.next_power_of_2(experts),
        TOP_K=weights.top_k,
        SLOTS=slots,
        BT=bt,
        BM=ITEM,
        MAX_ITEMS=triton.next_power_of_2(tokens * slots),
        BY_TOKEN=by_token,
        ROWS=ROUTER_ROWS,
        SPLIT=ROUTER_SPLIT,
        BK=128,
        num_warps=router_warps(bt),
        num_stages=4,
    )


def pipeline_programs(pipeline: Pipeline, blocks: int, total: bool, multiprocessors: int) -> int:
    """Programs of the NVFP4 kernel: a fixed number, with `total` no more than there are blocks."""
    return min(blocks, pipeline.per_sm * multiprocessors) if total else pipeline.per_sm * multiprocessors


def _experts(
    x: torch.Tensor,
    weights: MoeWeights,
    w: Workspace,
    out: torch.Tensor,
    gate_up: bool,
    shared: bool = False,
    total: bool = False,
    tokens: int = 0,
) -> None:
    """The NVFP4 kernel over the items."""
    matrices = weights.gate_up if gate_up else weights.down
    codes, scales, row_scales = matrices.stored("nvfp4")
    _, n, k = matrices.shape
    chosen = GATE_UP if gate_up else DOWN_SUM if total else DOWN
    columns = triton.cdiv(k, 128)
    wk = min(chosen.wk, triton.next_power_of_2(columns))
    blocks = triton.cdiv(n, chosen.rows)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    launch(
        nvfp4_experts_kernel,
        (1, pipeline_programs(chosen, blocks, total, processors)),
        x,
        x.stride(0),
        codes,
        scales,
        row_scales,
        w.shares,
        out,
        w.block_expert,
        w.pairs,
        w.counters[1:],
        tokens,
        n,
        k,
        TOP_K=weights.top_k,
        SLOTS=weights.slots,
        GATE_UP=gate_up,
        SHARED=shared,
        SUM=total,
        BM=ITEM,
        WK=wk,
        WN=chosen.wn,
        RT=chosen.rt,
        KB=chosen.kb,
        STAGES=chosen.stages,
        EVEN=columns % (wk * chosen.kb) == 0,
        num_warps=wk * chosen.wn,
    )


def _many(x: torch.Tensor, weights: MoeWeights, w: Workspace, out: torch.Tensor, extra: torch.Tensor | None) -> None:
    tokens, experts, top_k, slots = x.shape[0], weights.router.shape[0] - 1, weights.top_k, weights.slots
    bm = block_rows(tokens, top_k, experts)
    blocks = max_blocks(tokens * slots, experts + 1, bm)
    sort(x, weights, w, bm, blocks)
    form = wide_form(weights.gate_up, tokens)
    x_scales = None
    if form == "fp8":
        x_scales, values = w.x_scales[:tokens], w.x_fp8[:tokens]
        quantise_rows(x, values, x_scales)
        x = values
    _grouped(x, weights.gate_up, form, tile_for(bm, form), blocks, slots, w, w.inner, True, x_scales)
    inner, scales, form = w.inner, None, wide_form(weights.down, tokens)
    if form == "fp8":
        inner, scales = w.inner_fp8[: blocks * bm], w.scales[: blocks * bm]
        quantise_rows(w.inner[: blocks * bm], inner, scales)
    _grouped(inner, weights.down, form, tile_for(bm, form), blocks, slots, w, w.y, False, scales)
    _combine(w.y, w.shares, w.positions, extra, out, top_k, slots)


def wide_form(matrices: ExpertMatrices, tokens: int) -> str:
    """Which of the stored forms a pass of many tokens multiplies."""
    if matrices.fp8 is not None:
        return "fp8"
    if matrices.nvfp4 is not None and (tokens <= NVFP4_TOKENS or matrices.bf16 is None):
        return "nvfp4"
    return "bf16"


def sort(x: torch.Tensor, weights: MoeWeights, w: Workspace, bm: int, blocks: int) -> None:
    """Shares, and the pairs in blocks of `bm` rows of one expert each: three kernels."""
    (tokens, hidden), experts = x.shape, weights.router.shape[0] - 1
    token_blocks = triton.cdiv(tokens, ROUTER_TOKENS)
    sizes = {"E": experts, "SLOTS": weights.slots}
    launch(
        prefill_kernels.route_many_kernel,
        (token_blocks,),
        x,
        x.stride(0),
        weights.router,
        w.shares,
        w.chosen,
        w.ranks,
        w.counts,
        tokens,
        hidden,
        EP=triton.next_power_of_2(experts),
        TOP_K=weights.top_k,
        BT=ROUTER_TOKENS,
        BK=64,
        num_warps=8,
        num_stages=3,
        **sizes,
    )
    launch(
        prefill_kernels.totals_kernel,
        (triton.cdiv(experts + 1, 8),),
        w.counts,
        w.before,
        w.totals,
        token_blocks,
        E=experts,
        BE=8,
        BB=128,
        num_warps=4,
    )
    per_program = 16
    launch(
        prefill_kernels.place_kernel,
        (max(token_blocks, triton.cdiv(blocks, per_program)),),
        w.chosen,
        w.ranks,
        w.before,
        w.totals,
        w.pairs,
        w.positions,
        w.block_expert,
        w.block_rows,
        tokens,
        blocks,
        E1P=triton.next_power_of_2(experts + 1),
        SLOTS_P=triton.next_power_of_2(weights.slots),
        BT=ROUTER_TOKENS,
        BM=bm,
        BLOCKS=per_program,
        num_warps=8,
        **sizes,
    )


def _grouped(
    x: torch.Tensor,
    matrices: ExpertMatrices,
    form: str,
    tile: Tile,
    blocks: int,
    slots: int,
    w: Workspace,
    out: torch.Tensor,
    gate_up: bool,
    x_scales: torch.Tensor | None = None,
) -> None:
    """Every block's product with its expert; rows of x by token for gate and up, by position for down."""
    _, n, k = matrices.shape
    weight, scales, row_scales = matrices.stored(form)
    launch(
        prefill_kernels.grouped_kernel,
        (blocks * triton.cdiv(n, tile.bn),),
        x,
        x.stride(0),
        x_scales,
        weight,
        scales,
        row_scales,
        out,
        w.pairs,
        w.block_expert,
        w.block_rows,
        n,
        k,
        SLOTS=slots,
        NVFP4=form == "nvfp4",
        GATHER=gate_up,
        ACTIVATE=gate_up,
        BM=tile.bm,
        BN=tile.bn,
        BK=tile.bk,
        EVEN_K=k % tile.bk == 0,
        ASM=not triton.knobs.runtime.interpret,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _combine(
    y: torch.Tensor,
    shares: torch.Tensor,
    positions: torch.Tensor | None,
    extra: torch.Tensor | None,
    out: torch.Tensor,
    top_k: int,
    slots: int,
) -> None:
    tokens, hidden = out.shape
    block = min(1024, triton.next_power_of_2(hidden))
    launch(
        kernels.combine_kernel,
        (tokens, triton.cdiv(hidden, block)),
        y,
        positions,
        shares,
        extra,
        out,
        hidden,
        TOP_K=top_k,
        SLOTS=slots,
        BLOCK=block,
        num_warps=4,
    )
