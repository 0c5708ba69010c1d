"""The sampler's kernels compile for both architectures without spills, at the real vocabulary's slices."""

from __future__ import annotations

import pytest
from aot import SHARED_LIMIT, KernelBuild, compile_kernels
from sparkinfer_kernels.sampler.gpu import CAPACITY, _warps

FOLDER = "sparkinfer_kernels.sampler."
FILTERS = {"temperature_ptr": "*fp32", "top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32"}
FOUND = {"value_ptr": "*fp32", "lowest_ptr": "*fp32", "counts_ptr": "*i32", "masses_ptr": "*fp32"}
SIZES = {"stride": "i32", "vocab": "i32", "slices": "i32"}
DRAW = FILTERS | {"keys_ptr": "*i32", "value_ptr": "*fp32", "token_ptr": "*i32"} | SIZES


def builds(arch, logits, block, slices):
    x, warps = {"logits_ptr": logits}, _warps(block)
    first = x | DRAW | {"lowest_ptr": "*fp32", "found_ptr": "*i32"}
    for sample, filters in ((False, False), (True, False), (True, True)):
        flags = {"SAMPLE": sample, "FILTER": filters, "BLOCK": block}
        yield KernelBuild(FOLDER + "kernels:first_kernel", first, flags, arch, warps)
    yield KernelBuild(FOLDER + "kernels:draw_kernel", x | DRAW | {"pivot_ptr": "*fp32"}, {"BLOCK": block}, arch, warps)
    pick = {"value_ptr": "*fp32", "token_ptr": "*i32", "out_ptr": "*i64", "vocab": "i32", "slices": "i32"}
    yield KernelBuild(FOLDER + "kernels:pick_kernel", pick, {"SLICES": slices}, arch, 1)
    shape = {"BLOCK": block, "SLICES": slices}
    for level in (0, 1):
        search = x | FILTERS | FOUND | SIZES
        yield KernelBuild(FOLDER + "filter_kernels:count_kernel", search, shape | {"LEVEL": level}, arch, warps)
    inside = {"inside_ptr": "*fp32", "found_ptr": "*i32"}
    collect = x | FILTERS | FOUND | inside | SIZES
    yield KernelBuild(FOLDER + "filter_kernels:collect_kernel", collect, shape, arch, warps)
    pivot = FILTERS | FOUND | inside | {"pivot_ptr": "*fp32", "vocab": "i32", "slices": "i32"}
    sizes = {"SLICES": slices, "CAPACITY": CAPACITY}
    yield KernelBuild(FOLDER + "filter_kernels:pivot_kernel", pivot, sizes, arch, 16)
    work = {"top_ptr": "*fp32", "sum_ptr": "*fp32", "greater_ptr": "*i32", "values_ptr": "*fp32", "ids_ptr": "*i32"}
    part = x | {"tokens_ptr": "*i64"} | work | SIZES
    yield KernelBuild(FOLDER + "logprob_kernels:logprob_slice_kernel", part, {"COUNT": 20, "BLOCK": block}, arch, warps)
    out = {"chosen_ptr": "*fp32", "rank_ptr": "*i32", "out_ids_ptr": "*i32", "out_values_ptr": "*fp32"}
    whole = x | {"tokens_ptr": "*i64"} | work | out | {"stride": "i32", "slices": "i32"}
    sizes = {"COUNT": 20, "SLICES": slices, "CANDIDATES": 1024}
    yield KernelBuild(FOLDER + "logprob_kernels:logprob_row_kernel", whole, sizes, arch, 4)


@pytest.mark.parametrize("arch", [90, pytest.param(120, marks=pytest.mark.slow)])
def test_sampler(arch):
    for used in compile_kernels(list(builds(arch, "*bf16", 8192, 32))):
        used.check(shared=SHARED_LIMIT[arch], spills=0)
