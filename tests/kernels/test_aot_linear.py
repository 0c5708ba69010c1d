"""The projections' kernels compile for both architectures, within their shared memory, without spills."""

from __future__ import annotations

import itertools
from dataclasses import replace

from aot import SHARED_LIMIT, KernelBuild, compile_kernels
from sparkinfer_kernels.linear import skinny as skinny_launcher

SKINNY = {
    "x_ptr": "*bf16",
    "x_stride": "i32",
    "codes_ptr": "*i32",
    "scales_ptr": "*i32",
    "row_scales_ptr": "*fp32",
    "out_ptr": "*bf16",
    "out_stride": "i32",
    "partials_ptr": "*fp32",
    "counters_ptr": "*i32",
    "M": "i32",
    "N": "i32",
    "K": "i32",
    "row_tiles": "i32",
}
SPILLS = {90: 8, 120: 16}
"""Bytes of local memory a thread may use."""
HEAD = (248320, 5120)
"""An output matrix, whose product is stored in fp32."""


def tuned(form: str, arch: int) -> list[tuple[int, ...]]:
    """(token columns, WK, WN, RT, KB, stages): every set of parameters that `tuned.json` leads to."""
    found = set()
    for tokens, rows in skinny_launcher._table()["sm_90"][form].items():
        for n, k, _ in rows:
            c = skinny_launcher.config_for(f"sm_{arch}", form, tokens, n, k)
            found.add((tokens, c.wk, c.wn, c.rt, c.kb, c.stages))
    return sorted(found)


def head(form: str, arch: int) -> list[tuple[int, ...]]:
    """Parameters for the output matrix, few rows and many."""
    configs = ((tokens, skinny_launcher.config_for(f"sm_{arch}", form, tokens, *HEAD)) for tokens in (8, 64))
    return [(tokens, c.wk, c.wn, c.rt, c.kb, c.stages) for tokens, c in configs]


def skinny(values: tuple[int, ...], arch: int, even: bool, activate: bool, out: str = "*bf16") -> KernelBuild:
    constexprs = dict(zip(("BM", "WK", "WN", "RT", "KB", "STAGES"), values, strict=True))
    return KernelBuild(
        "sparkinfer_kernels.linear.skinny_kernel:nvfp4_skinny_kernel",
        SKINNY | {"out_ptr": out},
        {
            **constexprs,
            "EVEN": even,
            "GATE_UP": activate,
            "ACTIVATE": activate,
            "PDL": True,
        },
        arch=arch,
        num_warps=values[1] * values[2],
        divisible=("x_stride", "out_stride", "K", "N"),
        sass=True,
    )


def test_skinny_kernel() -> None:
    builds = [
        skinny(values, arch, even=index % 2 == 0, activate=index % 2 == 0)
        for arch in (90, 120)
        for index, values in enumerate(tuned("nvfp4", arch))
    ]
    builds += [skinny(values, arch, True, False, "*fp32") for arch in (90, 120) for values in head("nvfp4", arch)]
    for used in compile_kernels(builds):
        used.check(SHARED_LIMIT[used.build.arch], SPILLS[used.build.arch])
        assert used.count("HMMA") > 0
        # Operands come in 16-byte copies.
        assert used.count("LDGSTS.E.BYPASS.128") > 0


def test_skinny_fp8_kernel() -> None:
    signature = {("words_ptr" if name == "codes_ptr" else name): kind for name, kind in SKINNY.items()}
    signature |= {"block_scales_ptr": "*fp32"}
    del signature["scales_ptr"], signature["row_tiles"]
    builds, chosen = [], []
    for arch, (index, values) in itertools.product((90, 120), enumerate(tuned("fp8", 90))):
        values = next(one for one in tuned("fp8", arch) if one[0] == values[0])
        chosen.append((arch, values, index % 2 == 0, "*bf16"))
    for arch, blocks in itertools.product((90, 120), (False, True)):
        chosen += [(arch, values, blocks, "*fp32") for values in head("fp8", arch) if not (blocks and values[4] > 1)]
    for arch, values, blocks, out in chosen:
        constexprs = dict(zip(("BM", "WK", "WN", "RT", "KB", "STAGES"), values, strict=True))
        builds.append(
            KernelBuild(
                "sparkinfer_kernels.linear.skinny_fp8_kernel:fp8_skinny_kernel",
                signature | {"out_ptr": out},
                {**constexprs, "BLOCKS": blocks, "PDL": True},
                arch=arch,
                num_warps=values[1] * values[2],
                divisible=("x_stride", "out_stride", "K", "N"),
                sass=True,
            )
        )
    for used in compile_kernels(builds):
        used.check(SHARED_LIMIT[used.build.arch], SPILLS[used.build.arch])
        assert used.count("HMMA") > 0


WGMMA = {name: kind for name, kind in SKINNY.items() if name != "row_tiles"}


def wgmma(tokens: int, n: int, k: int, activate: bool, out: str = "*bf16") -> KernelBuild:
    p = skinny_launcher.wgmma_config(tokens, n, k)
    constexprs = {"BM": tokens, "WARPS": p.warps, "RT": p.rt, "COLUMNS": p.columns, "STAGES": p.stages}
    return KernelBuild(
        "sparkinfer_kernels.linear.wgmma_kernel:nvfp4_wgmma_kernel",
        WGMMA | {"out_ptr": out},
        {**constexprs, "GATE_UP": activate, "ACTIVATE": activate, "PDL": True},
        num_warps=p.warps,
        divisible=("x_stride", "out_stride", "K"),
        sass=True,
    )


def test_wgmma_kernel() -> None:
    """Hopper only: expanded weights go from registers to the tensor core, x from shared memory."""
    shapes = itertools.product(skinny_launcher.WGMMA_TOKENS, ((34816, 5120), (2048, 4096)))
    builds = [wgmma(tokens, *shape, activate=index % 2 == 0) for index, (tokens, shape) in enumerate(shapes)]
    builds += [wgmma(tokens, *HEAD, activate=False, out="*fp32") for tokens in (8, 64, 128)]
    for used in compile_kernels(builds):
        print(used.build.constexprs, used.registers, used.spills, used.shared)
        # 128 columns of accumulators leave few registers: 40 bytes a thread spill.
        used.check(SHARED_LIMIT[90], 48 if used.build.constexprs["BM"] == 128 else 16)
        assert used.count("HGMMA") > 0
        assert used.count("LDSM") == used.count("HMMA") == 0
        assert used.count("LDGSTS.E.BYPASS.128") > 0


def test_plain_kernels() -> None:
    module = "sparkinfer_kernels.linear.triton_kernels:"
    dequantise = {
        "codes_ptr": "*i32",
        "scales_ptr": "*i32",
        "row_scales_ptr": "*fp32",
        "out_ptr": "*bf16",
    }
    dequantise |= dict.fromkeys(("N", "K", "tiles"), "i32")
    block = {
        "x_ptr": "*bf16",
        "x_stride": "i32",
        "w_ptr": "*fp8e4nv",
        "w_scale_ptr": "*fp32",
        "out_ptr": "*bf16",
    }
    block |= dict.fromkeys(("M", "N", "K"), "i32")
    tiles = {
        "BLOCK_M": 128,
        "BLOCK_N": 128,
        "BLOCK_K": 128,
        "GROUP": 8,
        "scale_columns": 40,
    }
    builds = []
    for arch in (90, 120):
        builds += [
            KernelBuild(
                module + "nvfp4_to_bf16_kernel",
                dequantise,
                {"GATE_UP": True, "TILES": 4, "WGMMA": arch == 90},
                arch,
                divisible=("N", "K"),
            ),
            KernelBuild(
                module + "fp8_block_to_bf16_kernel",
                {name: block[name] for name in ("w_ptr", "w_scale_ptr", "out_ptr", "N", "K")}
                | {"scale_columns": "i32"},
                {"BLOCK_N": 64},
                arch,
                divisible=("N", "K"),
            ),
            KernelBuild(
                module + "fp8_block_kernel",
                block,
                tiles,
                arch,
                num_warps=8,
                num_stages=3 if arch == 90 else 2,
                divisible=("x_stride", "K", "N"),
            ),
        ]
        builds.append(replace(builds[-1], signature=block | {"out_ptr": "*fp32"}))
    for used in compile_kernels(builds):
        used.check(SHARED_LIMIT[used.build.arch])


def test_block_scaled_kernels() -> None:
    module = "sparkinfer_kernels.linear.scaled_kernels:"
    product = {f"{name}_ptr": kind for name, kind in (("x", "*u8"), ("x_scales", "*fp8e4nv"), ("x_factors", "*fp32"))}
    product |= {f"{name}_ptr": kind for name, kind in (("w", "*u8"), ("w_scales", "*fp8e4nv"), ("w_factors", "*fp32"))}
    product |= {"out_ptr": "*bf16", "M": "i32", "N": "i32"}
    rows = {"x_ptr": "*bf16", "x_stride": "i32", "codes_ptr": "*u8", "scales_ptr": "*fp8e4nv", "factors_ptr": "*fp32"}
    tiles = {"K": 5120, "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128}
    used, quantise = compile_kernels(
        [
            KernelBuild(
                module + "nvfp4_scaled_kernel",
                product,
                tiles,
                arch=120,
                num_warps=8,
                num_stages=2,
                divisible=("N",),
                sass=True,
            ),
            KernelBuild(module + "quantise_nvfp4_kernel", {**rows, "K": "i32"}, {"BLOCK": 8192}, arch=120, num_warps=8),
        ]
    )
    used.check(SHARED_LIMIT[120])
    quantise.check(SHARED_LIMIT[120])
    # The tensor core's own NVFP4 instruction, not a product of numbers widened before.
    assert used.count("OMMA.SF") > 0
    assert used.count("HMMA") == 0
