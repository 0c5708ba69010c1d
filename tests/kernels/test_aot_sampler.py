"""The sampler's kernels compile for both architectures without spills, at the real vocabulary's slices."""

from __future__ import annotations

import pytest
from aot import SHARED_LIMIT, KernelBuild, compile_kernels
from sparkinfer_kernels.sampler.gpu import CAPACITY, DRAW_WARPS, SUB, _warps

FOLDER = "sparkinfer_kernels.sampler."
FILTERS = {"temperature_ptr": "*fp32", "top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32"}
SIZES = {"stride": "i32", "vocab": "i32", "slices": "i32"}
DRAW = FILTERS | {"keys_ptr": "*i32", "value_ptr": "*fp32", "token_ptr": "*i32"} | SIZES


def builds(arch, logits, block, slices):
    x, warps = {"logits_ptr": logits}, _warps(block)
    first = x | DRAW | {"lowest_ptr": "*fp32", "found_ptr": "*i32"}
    for sample, filters in ((False, False), (True, False), (True, True)):
        sub = SUB if sample else block
        flags = {"SAMPLE": sample, "FILTER": filters, "BLOCK": block, "SUB": sub}
        yield KernelBuild(FOLDER + "kernels:first_kernel", first, flags, arch, DRAW_WARPS if sample else _warps(block))
    draw, size = x | DRAW | {"pivot_ptr": "*fp32"}, {"BLOCK": block, "SUB": SUB}
    yield KernelBuild(FOLDER + "kernels:draw_kernel", draw, size, arch, DRAW_WARPS)
    pick = {"value_ptr": "*fp32", "token_ptr": "*i32", "out_ptr": "*i64", "vocab": "i32", "slices": "i32"}
    yield KernelBuild(FOLDER + "kernels:pick_kernel", pick, {"SLICES": slices}, arch, 1)
    shape = {"BLOCK": block, "VEC": 8 if logits == "*bf16" else 4}
    state = {"bracket_ptr": "*fp32", "above_ptr": "*i32"}
    sums = {"counts_ptr": "*i32", "masses_ptr": "*fp32"} | state
    for level in (0, 1):
        ends = FILTERS | {"value_ptr": "*fp32", "lowest_ptr": "*fp32"} | sums | {"vocab": "i32", "slices": "i32"}
        sizes = {"LEVELS": level, "SLICES": slices}
        yield KernelBuild(FOLDER + "filter_kernels:bracket_kernel", ends, sizes, arch, 4)
        search = x | FILTERS | sums | SIZES
        yield KernelBuild(
            FOLDER + "filter_kernels:count_kernel",
            search,
            shape | {"LEVEL": level},
            arch,
            4,
            divisible=("stride", "vocab"),
            sass=True,
        )
    inside = {"inside_ptr": "*fp32", "found_ptr": "*i32"}
    collect = x | FILTERS | {"bracket_ptr": "*fp32"} | inside | {"stride": "i32", "vocab": "i32"}
    yield KernelBuild(
        FOLDER + "filter_kernels:collect_kernel", collect, shape, arch, 4, divisible=("stride", "vocab"), sass=True
    )
    pivot = FILTERS | state | inside | {"pivot_ptr": "*fp32", "vocab": "i32"}
    yield KernelBuild(FOLDER + "pivot_kernel:pivot_kernel", pivot, {"CAPACITY": CAPACITY}, arch, 16)
    work = {"top_ptr": "*fp32", "sum_ptr": "*fp32", "greater_ptr": "*i32", "values_ptr": "*fp32", "ids_ptr": "*i32"}
    part = x | {"tokens_ptr": "*i64"} | work | SIZES
    yield KernelBuild(FOLDER + "logprob_kernels:logprob_slice_kernel", part, {"COUNT": 20, "BLOCK": block}, arch, warps)
    out = {"chosen_ptr": "*fp32", "rank_ptr": "*i32", "out_ids_ptr": "*i32", "out_values_ptr": "*fp32"}
    whole = x | {"tokens_ptr": "*i64"} | work | out | {"stride": "i32", "slices": "i32"}
    sizes = {"COUNT": 20, "SLICES": slices, "CANDIDATES": 1024}
    yield KernelBuild(FOLDER + "logprob_kernels:logprob_row_kernel", whole, sizes, arch, 4)


@pytest.mark.parametrize(
    ("arch", "logits"),
    [
        (90, "*fp32"),
        pytest.param(120, "*fp32", marks=pytest.mark.slow),
        pytest.param(90, "*bf16", marks=pytest.mark.slow),
    ],
)
def test_sampler(arch, logits):
    """The engine's logits are fp32; the kernels take bf16 too."""
    for used in compile_kernels(list(builds(arch, logits, 4096, 64))):
        used.check(shared=SHARED_LIMIT[arch], spills=0)
