"""The rotary kernel compiles for both architectures without spills."""

from __future__ import annotations

import pytest
from aot import SHARED_LIMIT, KernelBuild, compile_kernels
from sparkinfer_kernels.rotary.gpu import _launch_shape


def build(arch, heads, kv_heads, count, fp8):
    tile, tokens, warps = _launch_shape(heads, kv_heads, 256, count)
    cache = "*fp8e4nv" if fp8 else "*bf16"
    signature = {"proj_ptr": "*bf16", "q_out_ptr": "*bf16", "k_cache_ptr": cache, "v_cache_ptr": cache}
    signature |= dict.fromkeys(("positions_ptr", "kv_positions_ptr"), "*i32")
    signature |= dict.fromkeys(("q_norm_ptr", "k_norm_ptr", "table_ptr"), "*fp32")
    signature |= {"proj_stride": "i32", "count": "i32", "eps": "fp32"}
    constexprs = {"k_out_ptr": None, "HQ": heads, "HKV": kv_heads, "D": 256, "HALF": 32, "TILE": tile, "TOKENS": tokens}
    constexprs |= {"KEYS": False, "FP8": fp8, "PDL": True}
    (signature if fp8 else constexprs)["scales_ptr"] = "*fp32" if fp8 else None
    return KernelBuild(
        "sparkinfer_kernels.rotary.kernels:qk_norm_rotary_kernel",
        signature,
        constexprs,
        arch,
        num_warps=warps,
        divisible=("proj_stride",),
    )


@pytest.mark.parametrize("arch", [90, 120])
def test_rotary(arch):
    for used in compile_kernels(
        [build(arch, 24, 4, 8192, False), build(arch, 16, 2, 8192, True), build(arch, 2, 1, 1, False)]
    ):
        used.check(shared=SHARED_LIMIT[arch], spills=0)
