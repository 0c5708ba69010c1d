"""Kernels, and a stand-in for the driver of a GPU, for `test_gpu_compile.py`: run as a program of its own.

Prints as JSON what a trial run launched, what was compiled, and what a second trial found missing.
"""

from __future__ import annotations

import json
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from sparkinfer.runner.gpu_compile import compile_ahead


@triton.jit
def scaled(source, target, count, factor: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + places, tl.load(source + places, places < count) * factor, places < count)


@triton.jit
def summed(source, target, dtype: tl.constexpr, missing: tl.constexpr, BLOCK: tl.constexpr):
    values = tl.load(source + tl.arange(0, BLOCK)).to(dtype)
    if missing is None:
        tl.store(target, tl.sum(values, 0))


class Driver:
    """A GPU that compiles and never runs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Pointer:
    """An argument that stands for device memory."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 4096


def trial() -> None:
    source, target = Pointer("bfloat16"), Pointer("float32")
    for block in (64, 128, 64):
        scaled[(3,)](source, target, 100, 2.5, BLOCK=block, num_warps=2)
    summed[(1,)](source, target, tl.float32, None, BLOCK=64)


def compiled() -> dict[str, int]:
    return {kernel.__name__: len(kernel.device_caches[0][0]) for kernel in (scaled, summed)}


def main() -> None:
    driver.set_active(Driver())
    first = compile_ahead(trial, 2)
    after: dict[str, Any] = compiled()
    print(json.dumps({"first": first, "compiled": after, "second": _second()}))


def _second() -> int | str:
    """A launch of what was compiled ahead finds it: it gets as far as the driver, which has no way to run it."""
    try:
        return compile_ahead(trial, 2)
    except AttributeError as error:
        return str(error)


if __name__ == "__main__":
    main()
