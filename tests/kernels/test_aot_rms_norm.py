"""The row kernels compile for both architectures without spills and with 16-byte accesses."""

from __future__ import annotations

import pytest
from aot import SHARED_LIMIT, KernelBuild, compile_kernels
from sparkinfer_kernels.rms_norm.gpu import _blocks, _warps

KERNELS = "sparkinfer_kernels.rms_norm.kernels:"
STRIDES = ("x_stride", "residual_stride", "keep_stride", "out_stride", "fp8_stride")


def norm(arch, d, rows, residual="*bf16"):
    first, rest = _blocks(d)
    signature = {"x_ptr": "*bf16", "residual_ptr": residual, "keep_ptr": residual, "weight_ptr": "*fp32"}
    signature |= {"out_ptr": "*bf16", "fp8_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "d": "i32", "eps": "fp32"}
    signature |= dict.fromkeys(STRIDES, "i32")
    constexprs = {"rows_ptr": None, "ROWS": False, "ADD": True, "KEEP": True, "OUT": True, "FP8": True}
    constexprs |= {"A": first, "B": rest, "PDL": True}
    return KernelBuild(
        KERNELS + "norm_kernel",
        signature,
        constexprs,
        arch,
        _warps(d, rows),
        divisible=(*STRIDES, "d"),
        sass=True,
    )


def swiglu(arch, inner, rows):
    first, rest = _blocks(inner)
    strides = ("x_stride", "out_stride", "fp8_stride")
    signature = {"x_ptr": "*bf16", "out_ptr": "*bf16", "fp8_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "inner": "i32"}
    signature |= dict.fromkeys(strides, "i32")
    constexprs = {"OUT": True, "FP8": True, "A": first, "B": rest, "PDL": True}
    return KernelBuild(
        KERNELS + "swiglu_kernel",
        signature,
        constexprs,
        arch,
        _warps(inner, rows),
        divisible=(*strides, "inner"),
        sass=True,
    )


def quantise(arch, d, rows):
    first, rest = _blocks(d)
    signature = {"x_ptr": "*bf16", "fp8_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "x_stride": "i32", "d": "i32"}
    constexprs = {"A": first, "B": rest, "PDL": True}
    kernel, divisible = KERNELS + "quantise_kernel", ("x_stride", "d")
    return KernelBuild(kernel, signature, constexprs, arch, _warps(d, rows), divisible=divisible, sass=True)


@pytest.mark.parametrize("arch", [90, 120])
def test_row_kernels(arch):
    builds = [norm(arch, 5120, 8192), norm(arch, 2048, 1, "*fp32"), swiglu(arch, 17408, 8192), swiglu(arch, 512, 1)]
    builds += [quantise(arch, 6144, 8192), quantise(arch, 4096, 65)]
    for used in compile_kernels(builds):
        used.check(shared=SHARED_LIMIT[arch], spills=0)
        assert used.count("LDG.E.128"), f"{used.build.constexprs}: no 16-byte loads in {used.opcodes}"
