"""The kernels of a mixture of experts compile for both architectures: shared memory, spills, barriers in the loops.

As a command with builds on its standard input (see `inspect_loops`), it compiles them in a process of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest

if __name__ != "__main__":
    from aot import ROOT, SHARED_LIMIT, KernelBuild, Resources, compile_kernels
    from sparkinfer_kernels.moe import gpu

FOLDER = "sparkinfer_kernels.moe."
SIZES = {"E": 256, "TOP_K": 8, "SLOTS": 9}
LISTS = {"item_expert_ptr": "*i32", "item_pairs_ptr": "*i32"}
SPILLS = {90: 8, 120: 16}
"""Bytes of local memory a thread may use."""


def few_tokens(arch: int) -> list[KernelBuild]:
    router = {
        "x_ptr": "*bf16", "x_stride": "i32", "router_ptr": "*bf16", "partials_ptr": "*fp32", "counter_ptr": "*i32",
        "shares_ptr": "*fp32", **LISTS, "item_rows_ptr": "*i32", "position_ptr": "*i32", "count_ptr": "*i32",
        "T": "i32", "H": "i32",
    }  # fmt: skip
    builds = []
    for bt, by_token in ((16, True), (16, False), (32, False)):
        constexprs = SIZES | {
            "EP": 256, "BT": bt, "BM": gpu.ITEM, "MAX_ITEMS": bt * 16, "BY_TOKEN": by_token,
            "ROWS": gpu.ROUTER_ROWS, "SPLIT": gpu.ROUTER_SPLIT, "BK": 128, "PDL": True,
        }  # fmt: skip
        builds.append(
            KernelBuild(
                FOLDER + "kernels:route_few_kernel",
                router,
                constexprs,
                arch,
                num_warps=gpu.router_warps(bt),
                num_stages=4,
                unaligned=("count_ptr",),
                divisible=("x_stride", "H"),
            )
        )
    return builds


def experts(arch: int) -> list[KernelBuild]:
    signature = {
        "x_ptr": "*bf16", "x_stride": "i32", "codes_ptr": "*i32", "scales_ptr": "*i32", "row_scales_ptr": "*fp32",
        "shares_ptr": "*fp32", "out_ptr": "*bf16", **LISTS, "count_ptr": "*i32", "T": "i32", "N": "i32", "K": "i32",
    }  # fmt: skip
    kinds = (
        (gpu.GATE_UP, {"GATE_UP": True, "SHARED": True, "SUM": False}, True),
        (gpu.GATE_UP, {"GATE_UP": True, "SHARED": False, "SUM": False}, False),
        (gpu.DOWN, {"GATE_UP": False, "SHARED": False, "SUM": False}, True),
        (gpu.DOWN_SUM, {"GATE_UP": False, "SHARED": False, "SUM": True}, True),
    )
    return [
        KernelBuild(
            FOLDER + "skinny_kernel:nvfp4_experts_kernel",
            signature,
            {"TOP_K": 8, "SLOTS": 9, "BM": gpu.ITEM, "WK": p.wk, "WN": p.wn, "RT": p.rt, "KB": p.kb}
            | {"STAGES": p.stages, "EVEN": even, "PDL": True}
            | kind,
            arch,
            num_warps=p.wk * p.wn,
            unaligned=("count_ptr",),
            divisible=("x_stride", "N", "K"),
            sass=True,
        )
        for p, kind, even in kinds
    ]


def grouped(arch: int, form: str, rows: int, gate_up: bool, even: bool = True) -> KernelBuild:
    """`rows` of a block; 8: the items of few tokens."""
    tile = gpu.tile_for(rows, form) if rows > gpu.ITEM else gpu.FEW_BF16
    x = "*fp8e4nv" if form == "fp8" else "*bf16"
    signature = {
        "x_ptr": x, "x_stride": "i32", "w_ptr": "*i32" if form == "nvfp4" else x, "out_ptr": "*bf16",
        "pairs_ptr": "*i32", "block_expert_ptr": "*i32", "block_rows_ptr": "*i32", "N": "i32", "K": "i32",
    }  # fmt: skip
    absent: dict[str, Any] = {}
    for name, kind, there in (
        ("x_scales_ptr", "*fp32", form == "fp8"),
        ("w_scales_ptr", "*i32", form == "nvfp4"),
        ("row_scales_ptr", "*fp32", form != "bf16"),
    ):
        (signature if there else absent)[name] = kind if there else None
    constexprs = {
        "SLOTS": 9, "NVFP4": form == "nvfp4", "GATHER": gate_up, "ACTIVATE": gate_up, "BM": tile.bm, "BN": tile.bn,
        "BK": tile.bk, "EVEN_K": even, "ASM": True, "PDL": True,
    }  # fmt: skip
    return KernelBuild(
        FOLDER + "prefill_kernels:grouped_kernel", signature, constexprs | absent, arch, num_warps=tile.warps,
        num_stages=tile.stages, divisible=("x_stride", "N", "K"), sass=True,
    )  # fmt: skip


def sorting(arch: int) -> list[KernelBuild]:
    names = {"chosen_ptr": "*i32", "rank_ptr": "*i32"}
    route = {"x_ptr": "*bf16", "x_stride": "i32", "router_ptr": "*bf16", "shares_ptr": "*fp32", **names}
    route |= {"counts_ptr": "*i32", "T": "i32", "H": "i32"}
    totals = {"counts_ptr": "*i32", "before_ptr": "*i32", "totals_ptr": "*i32", "blocks": "i32"}
    place = {**names, "before_ptr": "*i32", "totals_ptr": "*i32", "pairs_ptr": "*i32", "position_ptr": "*i32"}
    place |= {"block_expert_ptr": "*i32", "block_rows_ptr": "*i32", "T": "i32", "max_blocks": "i32"}
    combine = {"y_ptr": "*bf16", "position_ptr": "*i32", "shares_ptr": "*fp32", "out_ptr": "*bf16", "H": "i32"}
    of_place = {"E": 256, "E1P": 512, "SLOTS": 9, "SLOTS_P": 16, "BT": gpu.ROUTER_TOKENS, "BM": 64, "BLOCKS": 16}
    of_combine = {"extra_ptr": None, "TOP_K": 8, "SLOTS": 9, "BLOCK": 1024}
    return [
        KernelBuild(
            FOLDER + "prefill_kernels:route_many_kernel", route,
            SIZES | {"EP": 256, "BT": gpu.ROUTER_TOKENS, "BK": 64, "PDL": True}, arch, 8, 3,
            divisible=("x_stride", "H"),
        ),
        KernelBuild(
            FOLDER + "prefill_kernels:totals_kernel", totals, {"E": 256, "BE": 8, "BB": 128, "PDL": True}, arch
        ),
        KernelBuild(FOLDER + "prefill_kernels:place_kernel", place, of_place | {"PDL": True}, arch, 8),
        KernelBuild(FOLDER + "kernels:combine_kernel", combine, of_combine | {"PDL": True}, arch, divisible=("H",)),
    ]  # fmt: skip


@pytest.mark.parametrize("arch", [90, 120])
def test_router_lists_and_sort(arch: int) -> None:
    for used in compile_kernels([*few_tokens(arch), *sorting(arch)]):
        print(used.build.kernel, arch, used.registers, used.spills, used.shared)
        used.check(SHARED_LIMIT[arch], SPILLS[arch])


def inspect_loops(builds: list[KernelBuild]) -> list[Resources]:
    """As `aot.compile_kernels`; opcodes also have LOOP.MMA, LOOP.BAR: of the loop with most matrix instructions."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT / "kernels"), str(ROOT / "tests" / "kernels"), environment.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([asdict(build) for build in builds]),
        capture_output=True,
        text=True,
        timeout=600,
        env=environment | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        check=False,
    )
    assert done.returncode == 0, f"compilation failed:\n{done.stderr[-6000:]}"
    results = json.loads(done.stdout.splitlines()[-1])
    return [Resources(build, **result) for build, result in zip(builds, results, strict=True)]


def main_loop(listing: str) -> dict[str, int]:
    """Matrix instructions and barriers of the innermost loop that has most of the former."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", listing)
    code = [(int(address, 16), name, rest) for address, name, rest in lines]
    best = {"LOOP.MMA": 0, "LOOP.BAR": 0}
    for address, name, rest in code:
        target = re.search(r"0x([0-9a-f]+)", rest) if name.startswith("BRA") else None
        if target is None or int(target.group(1), 16) >= address:
            continue
        body = [op for at, op, _ in code if int(target.group(1), 16) <= at <= address]
        found = {
            "LOOP.MMA": sum("MMA" in op for op in body),
            "LOOP.BAR": sum(op.startswith("BAR.SYNC") for op in body),
        }
        # Of nested loops the shorter one comes first.
        if found["LOOP.MMA"] > best["LOOP.MMA"]:
            best = found
    return best


@pytest.mark.parametrize("arch", [90, 120])
def test_experts_of_few_tokens(arch: int) -> None:
    for used in compile_kernels(experts(arch)):
        print(used.build.constexprs, arch, used.registers, used.spills, used.shared)
        used.check(SHARED_LIMIT[arch], SPILLS[arch])
        assert used.count("HMMA") > 0
        assert used.count("LDGSTS.E.BYPASS.128") > 0


GROUPED = [
    ("bf16", 8, True), ("bf16", 16, False), ("bf16", 64, True), ("bf16", 128, True), ("bf16", 128, False),
    ("fp8", 32, False), ("fp8", 128, True),
    ("nvfp4", 16, True), ("nvfp4", 32, True), ("nvfp4", 64, False), ("nvfp4", 128, True),
]  # fmt: skip


@pytest.mark.parametrize("arch", [90, 120])
def test_grouped_product(arch: int) -> None:
    builds = [grouped(arch, form, rows, gate_up) for form, rows, gate_up in GROUPED]
    builds.append(grouped(arch, "bf16", 64, True, even=False))
    compiled = inspect_loops(builds)
    for used in compiled:
        form = used.build.signature["w_ptr"], used.build.constexprs["BM"], used.build.constexprs["ACTIVATE"]
        print(form, arch, used.registers, used.spills, used.shared, used.opcodes["LOOP.MMA"], used.opcodes["LOOP.BAR"])
    for used in compiled:
        form = used.build.signature["w_ptr"], used.build.constexprs["BM"], used.build.constexprs["ACTIVATE"]
        used.check(SHARED_LIMIT[arch], SPILLS[arch])
        assert used.opcodes["LOOP.MMA"] > 0
        if used.build.constexprs["NVFP4"] is False and used.build.constexprs["BM"] > gpu.ITEM:
            # One behind the wait for the copies, one before the next copies overwrite what was read.
            assert used.opcodes["LOOP.BAR"] <= 2, f"{form}: {used.opcodes['LOOP.BAR']} barriers for each K step"


def test_every_number_of_tokens_has_a_tile() -> None:
    for tokens, form in itertools.product((65, 128, 512, 1024, 2048, 8192), ("bf16", "fp8", "nvfp4")):
        tile = gpu.tile_for(gpu.block_rows(tokens, 8, 256), form)
        width = {"bf16": 2, "fp8": 1, "nvfp4": 2}[form]
        assert tile.stages * tile.bk * (tile.bm + tile.bn) * width <= SHARED_LIMIT[120]


def _main() -> None:
    import aot

    plain = aot._inspect

    def with_loops(cubin: bytes, sass: bool) -> dict[str, Any]:
        import tempfile
        from pathlib import Path

        from triton.backends.nvidia import compiler

        result = plain(cubin, sass)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            tool = Path(compiler.__file__).parent / "bin" / "cuobjdump"
            listing = subprocess.check_output([tool, "--dump-sass", file.name], text=True)
        result["opcodes"] |= main_loop(listing)
        return result

    aot._inspect = with_loops
    print(json.dumps([aot._compile(build) for build in json.load(sys.stdin)]))


if __name__ == "__main__":
    _main()
