"""The step kernels compile for both architectures without spills."""

from __future__ import annotations

from aot import SHARED_LIMIT, KernelBuild, compile_kernels

MODULE = "sparkinfer_kernels.step.kernels:"


def test_step_kernels() -> None:
    pointers = ("tokens", "slots", "last_token", "table", "update_places", "update_blocks")
    update = dict.fromkeys(pointers, "*i32") | {"num_decode": "i32", "num_updates": "i32"}
    lines = dict.fromkeys(("table", "slots", "block_table"), "*i32") | {"width": "i32"}
    keep = dict.fromkeys(("chosen", "output_slots", "last_token"), "*i32") | {"count": "i32"}
    builds = [
        build
        for arch in (90, 120)
        for build in (
            KernelBuild(MODULE + "update_kernel", update, {"BLOCK": 256}, arch),
            KernelBuild(MODULE + "lines_kernel", lines, {"BLOCK": 1024}, arch),
            KernelBuild(MODULE + "keep_kernel", keep, {"BLOCK": 256}, arch),
        )
    ]
    for used in compile_kernels(builds):
        used.check(shared=SHARED_LIMIT[used.build.arch], spills=0)
