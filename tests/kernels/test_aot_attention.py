"""The attention kernels compile for both architectures within their shared memory, with the spills stated here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from aot import SHARED_LIMIT, KernelBuild, compile_kernels
from sparkinfer_kernels.attention.configs import DECODE, DECODE_FP8, DECODE_MANY, MAX_PIECES, MIN_PIECE, PREFILL
from sparkinfer_kernels.attention.gpu import COMBINED_PARTS, COMBINED_ROWS

FOLDER = "sparkinfer_kernels.attention."
SHAPES = {"27B": (24, 4), "35B": (16, 2), "tiny": (2, 1)}
"""Query heads and key heads."""


def decode(arch, model, fp8, table=None):
    heads, kv_heads = SHAPES[model]
    config, cache = (table or (DECODE_FP8 if fp8 else DECODE))[arch], "*fp8e4nv" if fp8 else "*bf16"
    signature = dict.fromkeys(("q_ptr", "gate_ptr", "out_ptr"), "*bf16")
    signature |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), cache) | dict.fromkeys(
        ("partial_ptr", "lse_ptr"), "*fp32"
    )
    signature |= dict.fromkeys(("table_ptr", "items_ptr", "pieces_ptr"), "*i32")
    signature |= {"gate_stride": "i32", "table_stride": "i32", "scale_log2": "fp32"}
    constexprs = {"HQ": heads, "HKV": kv_heads, "D": 256, "TOKENS": config.tokens, "FP8": fp8, "WIDE": False}
    constexprs |= {"STAGES": config.stages, "PDL": True}
    (signature if fp8 else constexprs)["scales_ptr"] = "*fp32" if fp8 else None
    return KernelBuild(
        FOLDER + "decode_kernel:attention_decode_kernel",
        signature,
        constexprs,
        arch,
        config.warps,
        divisible=("gate_stride",),
        sass=True,
    )


def prefill(arch, model, fp8, spans):
    heads, kv_heads = SHAPES[model]
    config, cache = PREFILL[arch], "*fp8e4nv" if fp8 else "*bf16"
    signature = dict.fromkeys(("q_ptr", "gate_ptr", "out_ptr"), "*bf16")
    signature |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), cache) | dict.fromkeys(
        ("partial_ptr", "lse_ptr"), "*fp32"
    )
    signature |= dict.fromkeys(("table_ptr", "cu_seqlens_ptr", "starts_ptr", "items_ptr"), "*i32")
    signature |= {"gate_stride": "i32", "table_stride": "i32", "scale_log2": "fp32"}
    constexprs = {"HQ": heads, "HKV": kv_heads, "D": 256, "M": config.rows, "N": config.tokens, "FP8": fp8}
    constexprs |= {"WIDE": False, "SPANS": spans, "STAGES": config.stages, "PDL": True}
    (signature if fp8 else constexprs)["scales_ptr"] = "*fp32" if fp8 else None
    return KernelBuild(
        FOLDER + "prefill_kernel:attention_prefill_kernel",
        signature,
        constexprs,
        arch,
        config.warps,
        divisible=("gate_stride",),
        sass=True,
    )


def hopper(model):
    triton = prefill(90, model, False, True)
    left_out = ("FP8", "SPANS", "STAGES", "scales_ptr")
    constexprs = {name: value for name, value in triton.constexprs.items() if name not in left_out}
    return replace(triton, kernel=FOLDER + "hopper_kernel:attention_hopper_kernel", constexprs=constexprs)


def plans(arch):
    ints = dict.fromkeys(("positions_ptr", "items_ptr", "pieces_ptr"), "*i32") | {"n": "i32", "max_items": "i32"}
    sizes = {"ROWS": 32, "ITEMS": 128, "MIN_PIECE": MIN_PIECE, "MAX_PIECES": MAX_PIECES, "PIECE": 0}
    yield KernelBuild(FOLDER + "plan_kernel:plan_decode_kernel", ints, sizes, arch, 8)
    signature = dict.fromkeys(("gate_ptr", "out_ptr"), "*bf16") | dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32")
    signature |= {"pieces_ptr": "*i32", "gate_stride": "i32"}
    sizes = {"HQ": 24, "HKV": 4, "D": 256, "MAX_PIECES": MAX_PIECES, "PDL": True}
    yield KernelBuild(FOLDER + "decode_kernel:combine_kernel", signature, sizes, arch, 4)
    ints = dict.fromkeys(("cu_seqlens_ptr", "starts_ptr", "items_ptr"), "*i32") | {"n": "i32", "max_items": "i32"}
    lengths = {"SEQUENCES": 32, "M": 128, "GROUP": 6}
    yield KernelBuild(FOLDER + "plan_kernel:plan_tiles_kernel", ints, lengths | {"TILES": 64}, arch, 4)
    spans = ints | {"spans_ptr": "*i32", "max_tiles": "i32", "one_wave": "i32"}
    sizes = lengths | {"TILES": 64, "ITEMS": 128, "N": 64, "MIN_SPAN": 256}
    yield KernelBuild(FOLDER + "plan_kernel:plan_spans_kernel", spans, sizes, arch, 8)
    signature = dict.fromkeys(("gate_ptr", "out_ptr"), "*bf16") | dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32")
    signature |= {"spans_ptr": "*i32", "cu_seqlens_ptr": "*i32", "gate_stride": "i32"}
    sizes = {"HQ": 24, "HKV": 4, "D": 256, "M": 128, "ROWS": COMBINED_ROWS, "PARTS": COMBINED_PARTS, "PDL": True}
    yield KernelBuild(FOLDER + "prefill_kernel:combine_spans_kernel", signature, sizes, arch, 4)


@pytest.mark.parametrize("arch", [90, 120])
def test_shipped_shapes(arch):
    builds = [decode(arch, "27B", False), decode(arch, "35B", True), *plans(arch)]
    builds += [prefill(arch, "27B", False, spans) for spans in (False, True)]
    builds += [decode(arch, "27B", False, DECODE_MANY)] if arch in DECODE_MANY else []
    for used in compile_kernels(builds):
        # 128 accumulator rows of 256 leave few registers: some of the prologue's values wait in local memory.
        used.check(shared=SHARED_LIMIT[arch], spills=160 if "prefill_kernel:a" in used.build.kernel else 0)
        if "decode_kernel:a" in used.build.kernel:
            assert used.count("LDGSTS"), "the cache is not copied asynchronously"
        if arch == 90 and "prefill_kernel:a" in used.build.kernel:
            assert used.count("HGMMA"), "prefill does not use the warpgroup matrix instructions"


def test_hopper_kernel_runs_its_matrix_products_in_the_background():
    """Its loops wait for scores and for values only; had the compiler run the products one by one, each had a wait."""
    for used in compile_kernels([hopper(model) for model in ("27B", "35B")]):
        # What the epilogue needs waits in local memory; the loops touch none.
        used.check(shared=SHARED_LIMIT[90], spills=320)
        assert used.count("HGMMA") == 60
        assert used.count("WARPGROUP.DEPBAR") == 6


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 120])
def test_all_shapes(arch):
    builds = [decode(arch, model, fp8) for model in SHAPES for fp8 in (False, True)]
    builds += [prefill(arch, model, fp8, True) for model in SHAPES for fp8 in (False, True)]
    for used in compile_kernels(builds):
        used.check(shared=SHARED_LIMIT[arch], spills=384 if "prefill_kernel:a" in used.build.kernel else 0)
