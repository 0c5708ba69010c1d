"""Mixture of experts on Hopper through one kernel for all products, `experts_kernel.py`.

Router (logits, choice), a list of items on the device (an expert with some of its pairs, so that its weights are read
once for all of them), gate and up with SwiGLU over the items, down, and the weighted sum: six launches for any number
of tokens. `gpu.moe` comes here where weights were prepared in order "wgmma" (`linear/layout.py`).
"""

from __future__ import annotations

import torch
import triton

from sparkinfer_kernels.moe import items_kernels
from sparkinfer_kernels.moe.experts_kernel import experts_kernel
from sparkinfer_kernels.moe.items_workspace import (
    NVFP4_TOKENS,
    PLACED_ITEMS,
    PLACED_TOKENS,
    ROUTER_FEW,
    ROUTER_SPLIT_TOKENS,
    ItemWorkspace,
    item_pairs,
    max_items,
    pipeline_for,
    router_width,
)
from sparkinfer_kernels.moe.weights import ExpertMatrices, MoeWeights
from sparkinfer_kernels.moe.workspace import FEW_TOKENS
from sparkinfer_kernels.programmatic import launch
from sparkinfer_kernels.rms_norm.gpu import quantise_rows


def pairs_output(x: torch.Tensor, weights: MoeWeights, w: ItemWorkspace) -> torch.Tensor:
    """What each pair's expert gives, in `w.y`, and the shares, in `w.shares`.

    Args:
        x: [T, H] bf16, rows contiguous.
        weights: of `prepare_moe` in order "wgmma".
        w: for at least T rows.

    Returns:
        y [T * slots, H] bf16, a row for each pair.

    Raises:
        ValueError: the GPU is not a Hopper one.
    """
    if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] != 9:
        raise ValueError("experts in the order of wgmma need an sm_90 GPU: unset SPARKINFER_NVFP4_ORDER")
    tokens = x.shape[0]
    bm, items = item_sizes(tokens, weights)
    route(x, weights, w, bm, items)
    form, x_scales = form_for(weights.gate_up, tokens), None
    if form == "fp8":
        x_scales, values = w.x_scales[:tokens], w.x_fp8[:tokens]
        quantise_rows(x, values, x_scales)
        x = values
    _product(x, weights, w, w.inner, form, bm, items, True, x_scales)
    form, inner, scales = form_for(weights.down, tokens), w.inner, None
    if form == "fp8":
        pairs = tokens * weights.slots
        inner, scales = w.inner_fp8[:pairs], w.scales[:pairs]
        quantise_rows(w.inner[:pairs], inner, scales)
    _product(inner, weights, w, w.y, form, bm, items, False, scales)
    return w.y


def item_sizes(tokens: int, weights: MoeWeights) -> tuple[int, int]:
    """Pairs of an item, and the most items that there can be."""
    experts = weights.router.shape[0] - 1
    bm = item_pairs(tokens, weights.top_k, experts)
    return bm, max_items(tokens, weights.top_k, weights.slots, experts, bm)


def form_for(matrices: ExpertMatrices, tokens: int) -> str:
    """Which of the stored forms a pass of this many tokens multiplies."""
    if matrices.nvfp4 is not None and (tokens <= FEW_TOKENS or (matrices.fp8 is None and tokens <= NVFP4_TOKENS)):
        return "nvfp4"
    if matrices.fp8 is not None:
        return "fp8"
    return "bf16" if matrices.bf16 is not None else "nvfp4"


def copied_form(weights: MoeWeights) -> str:
    """What passes of many tokens can multiply: "fp8", "bf16", or "nvfp4" where there is no copy."""
    found = {_copy_of(matrices) for matrices in (weights.gate_up, weights.down)}
    return found.pop() if len(found) == 1 else "nvfp4"


def _copy_of(matrices: ExpertMatrices) -> str:
    return "fp8" if matrices.fp8 is not None else "bf16" if matrices.bf16 is not None else "nvfp4"


def route(x: torch.Tensor, weights: MoeWeights, w: ItemWorkspace, bm: int, items: int) -> None:
    """Shares of the experts and the list of items of up to `bm` pairs: three kernels."""
    (tokens, hidden), experts = x.shape, weights.router.shape[0] - 1
    few = tokens <= ROUTER_FEW
    bt, rows, bk, split = (max(16, triton.next_power_of_2(tokens)), 16, 256, 8) if few else (64, 64, 64, 4)
    if tokens > ROUTER_SPLIT_TOKENS:
        split = 1
    sizes = {"E": experts, "SLOTS": weights.slots}
    launch(
        items_kernels.logits_kernel,
        (triton.cdiv(tokens, bt), triton.cdiv(experts + 1, rows), split),
        x,
        x.stride(0),
        weights.router,
        w.partials,
        w.counts,
        tokens,
        hidden,
        E=experts,
        WIDTH=router_width(experts),
        BT=bt,
        ROWS=rows,
        SPLIT=split,
        BK=bk,
        num_warps=4,
        num_stages=4,
    )
    per_program = 1 if few else 4
    launch(
        items_kernels.choose_kernel,
        (triton.cdiv(tokens, per_program),),
        w.partials,
        w.shares,
        w.chosen,
        w.ranks,
        w.counts,
        tokens,
        EP=triton.next_power_of_2(experts),
        WIDTH=router_width(experts),
        TOP_K=weights.top_k,
        TOP_KP=triton.next_power_of_2(weights.top_k),
        SPLIT=split,
        TOKENS=per_program,
        num_warps=1,
        **sizes,
    )
    launch(
        items_kernels.place_kernel,
        (max(triton.cdiv(tokens, PLACED_TOKENS), triton.cdiv(items, PLACED_ITEMS)),),
        w.chosen,
        w.ranks,
        w.counts,
        w.pairs,
        w.block_expert,
        w.items,
        tokens,
        E1P=triton.next_power_of_2(experts + 1),
        SLOTS_P=triton.next_power_of_2(weights.slots),
        BT=PLACED_TOKENS,
        BM=bm,
        ITEMS=PLACED_ITEMS,
        num_warps=4,
        **sizes,
    )


def _product(
    x: torch.Tensor,
    weights: MoeWeights,
    w: ItemWorkspace,
    out: torch.Tensor,
    form: str,
    bm: int,
    items: int,
    gate_up: bool,
    x_scales: torch.Tensor | None = None,
) -> None:
    """Every item's product with its expert: rows of x by token for gate and up, by pair for down; rows of out by pair.

    Args:
        form: of the weights.
        bm: columns of an item.
        items: the most there can be.
    """
    matrices = weights.gate_up if gate_up else weights.down
    _, n, k = matrices.shape
    words, scales, row_scales = matrices.stored(form)
    chosen = pipeline_for(form, bm, items, gate_up)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    blocks = triton.cdiv(n, chosen.rows)
    launch(
        experts_kernel,
        (min(items * blocks, chosen.per_sm * processors),),
        x,
        x.stride(0),
        x_scales,
        words,
        scales,
        row_scales,
        out,
        w.block_expert,
        w.pairs,
        w.items,
        n,
        k,
        SLOTS=weights.slots,
        FORM=form,
        GATE_UP=gate_up,
        BM=bm,
        WARPS=chosen.warps,
        RT=chosen.rt,
        COLUMNS=chosen.columns,
        STAGES=chosen.stages,
        num_warps=chosen.warps,
    )
