"""The kernels of experts through lists of items compile for Hopper: shared memory, spills, one barrier a K step."""

from __future__ import annotations

from typing import Any

import pytest
from aot import SHARED_LIMIT, KernelBuild, Resources, compile_kernels
from sparkinfer_kernels.moe import items_workspace as sizes
from test_aot_moe import grouped, inspect_loops

FOLDER = "sparkinfer_kernels.moe."
SIZES = {"E": 256, "TOP_K": 8, "SLOTS": 9}
LISTS = {"item_expert_ptr": "*i32", "item_pairs_ptr": "*i32"}
SPILLS = 16
"""Bytes of local memory a thread may use."""


def router() -> list[KernelBuild]:
    logits = {"x_ptr": "*bf16", "x_stride": "i32", "router_ptr": "*bf16", "partials_ptr": "*fp32"}
    logits |= {"counts_ptr": "*i32", "T": "i32", "H": "i32"}
    pairs = {"chosen_ptr": "*i32", "ranks_ptr": "*i32", "counts_ptr": "*i32"}
    choose = {"partials_ptr": "*fp32", "shares_ptr": "*fp32", **pairs, "T": "i32"}
    place = {**pairs, "pairs_ptr": "*i32", "item_expert_ptr": "*i32", "items_ptr": "*i32", "T": "i32"}
    of_choice = SIZES | {"EP": 256, "WIDTH": sizes.router_width(256), "TOP_KP": 8, "PDL": True}
    of_place = {"E": 256, "E1P": 512, "SLOTS": 9, "SLOTS_P": 16, "PDL": True}
    of_place |= {"BT": sizes.PLACED_TOKENS, "ITEMS": sizes.PLACED_ITEMS}
    of_logits = {"E": 256, "WIDTH": sizes.router_width(256), "PDL": True}
    kernels = FOLDER + "items_kernels:"
    builds = [
        KernelBuild(
            kernels + "logits_kernel", logits, of_logits | {"BT": bt, "ROWS": rows, "SPLIT": split, "BK": bk}, 90,
            num_stages=4, divisible=("x_stride", "H"),
        )
        for bt, rows, split, bk in ((16, 16, 8, 256), (32, 16, 8, 256), (64, 64, 4, 64), (64, 64, 1, 64))
    ]  # fmt: skip
    builds += [
        KernelBuild(kernels + "choose_kernel", choose, of_choice | {"SPLIT": split, "TOKENS": tokens}, 90, 1)
        for split, tokens in ((8, 1), (4, 4), (1, 4))
    ]
    builds += [KernelBuild(kernels + "place_kernel", place, of_place | {"BM": bm}, 90) for bm in (8, 16, 128)]
    return builds


def product_arguments(form: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Signature of the product, and the arguments that are absent."""
    x = "*fp8e4nv" if form == "fp8" else "*bf16"
    signature = {
        "x_ptr": x,
        "x_stride": "i32",
        "out_ptr": "*bf16",
        **LISTS,
        "count_ptr": "*i32",
        "N": "i32",
        "K": "i32",
    }
    signature["words_ptr"] = "*i32" if form == "nvfp4" else x
    absent: dict[str, Any] = {}
    for name, kind, there in (
        ("x_scales_ptr", "*fp32", form == "fp8"),
        ("scales_ptr", "*i32", form == "nvfp4"),
        ("row_scales_ptr", "*fp32", form != "bf16"),
    ):
        (signature if there else absent)[name] = kind if there else None
    return signature, absent


def experts(form: str, rows: int, gate_up: bool, items: int = 1000) -> KernelBuild:
    """The Gluon kernel for that many items of up to `rows` pairs."""
    signature, absent = product_arguments(form)
    p = sizes.pipeline_for(form, rows, items, gate_up)
    constexprs = {
        "SLOTS": 9, "FORM": form, "GATE_UP": gate_up, "BM": rows, "WARPS": p.warps, "RT": p.rt, "COLUMNS": p.columns,
        "STAGES": p.stages, "PDL": True,
    }  # fmt: skip
    return KernelBuild(
        FOLDER + "experts_kernel:experts_kernel", signature, constexprs | absent, num_warps=p.warps,
        divisible=("x_stride", "K"), sass=True,
    )  # fmt: skip


def test_router_and_lists() -> None:
    for used in compile_kernels(router()):
        print(used.build.kernel, used.registers, used.spills, used.shared)
        used.check(SHARED_LIMIT[90], SPILLS)


def described(used: Resources) -> str:
    c = used.build.constexprs
    return (
        f"{used.build.kernel.split(':')[1]} {used.build.signature['x_ptr']} BM {c['BM']}, gate and up: {c['GATE_UP']},"
        f" sm_{used.build.arch}: {used.registers} registers, {used.spills} spilled, {used.shared} bytes, in the main"
        f" loop {used.opcodes['LOOP.MMA']} matrix instructions, {used.opcodes['LOOP.BAR']} barriers"
    )


EVERY = sorted(sizes.GATE_UP)


def check_products(builds: list[KernelBuild]) -> None:
    for used in inspect_loops(builds):
        print(described(used))
        used.check(SHARED_LIMIT[90], SPILLS)
        assert used.count("HGMMA") + used.count("QGMMA") > 0
        assert used.count("LDGSTS.E.BYPASS.128") > 0
        # The loop is unrolled over the stages: as many K steps, each with one barrier.
        assert used.opcodes["LOOP.BAR"] == used.build.constexprs["STAGES"], described(used)


def test_one_barrier_for_each_k_step() -> None:
    cases = (("nvfp4", 8, True), ("nvfp4", 8, False), ("bf16", 64, False), ("fp8", 128, False))
    check_products([experts(*case) for case in cases] + [experts("nvfp4", 8, True, sizes.FEWEST_ITEMS)])
    # What it is compared with, Triton's pipeline: two.
    other, *_ = inspect_loops([grouped(90, "bf16", 64, True)])
    assert other.opcodes["LOOP.BAR"] == 2


@pytest.mark.slow
def test_every_product() -> None:
    check_products([experts(form, rows, gate_up=i % 2 == 0) for i, (form, rows) in enumerate(EVERY)])


def test_parameters_fit_for_every_number_of_tokens() -> None:
    for tokens in (1, 32, 33, 65, 128, 512, 1024, 2048, 8192):
        rows = sizes.item_pairs(tokens, 8, 256)
        for form, size, width in (("bf16", 2, 2), ("fp8", 1, 1), ("nvfp4", 0.5625, 2)):
            for p in (sizes.GATE_UP[form, rows], sizes.DOWN[form, rows], sizes.pipeline_for(form, rows, 9, True)):
                stages = p.stages * p.columns * (p.rows * size + rows * width)
                assert stages + p.rows * rows * 2 <= SHARED_LIMIT[90]
