"""Found by Python at its start when this folder is on PYTHONPATH: vLLM's CPU build runs its second model runner.

That runner, the only one with DFlash2, needs Triton, and the Triton of PyPI has no backend for CPUs. Triton's own
interpreter takes its place: the same kernels, one operation after the other in NumPy. For figures that are no times.

One fault of the CPU build is mended besides, unless VLLM_CPU_AS_SHIPPED is set: DFlash normalises the context's keys of
all its layers in one call with a weight for each, and the CPU's norm takes the first layer's for all of them.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.language.extra import libdevice
from triton.runtime import interpreter

known_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    """vLLM asks for its own distribution, which its CPU build has under another name."""
    return f"{known_version('vllm-cpu')}+cpu" if distribution_name == "vllm" else known_version(distribution_name)


class Driver:
    """What vLLM and Triton ask of a driver when no kernel is compiled."""

    @staticmethod
    def is_active() -> bool:
        """It is there."""
        return True

    def get_current_target(self) -> GPUTarget:
        """No GPU's."""
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")


class Backend:
    """Triton's entry of a backend, as far as it is looked at."""

    driver = Driver


def boolean(mask: Any) -> Any:
    """The interpreter takes NumPy's booleans only, and has bytes where a mask was combined with a scalar."""
    return interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)


def log1p(x: tl.tensor) -> tl.tensor:
    """A GPU library's function, of which the interpreter has the name only."""
    return tl.tensor(interpreter.TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)


patched: set[str] = set()
patch, numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
numpy_types: dict[str, Any] = {}


def call_inside(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A kernel's call of a function. The language was patched for the kernel; the interpreter does it at each call."""
    if function.fn.__module__ not in patched:
        patched.add(function.fn.__module__)
        patch(function.fn)
    return function.rewrite()(*args, **kwargs)


def known_type(triton_type: Any) -> Any:
    """NumPy's type, looked up once: the interpreter makes a table of all types each time."""
    name = str(triton_type)
    if name not in numpy_types:
        numpy_types[name] = numpy_type(triton_type)
    return numpy_types[name]


def by_rows(norm: Callable[..., None]) -> Callable[..., None]:
    """vLLM's RMS norm, which takes a weight [rows, width] for an input [rows, ..., width] as its GPU kernel does."""

    def rms_norm(out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
        if weight is None or weight.dim() == 1:
            norm(out, input, weight, epsilon)
        else:
            for row in range(len(weight)):
                norm(out[row], input[row], weight[row], epsilon)

    return rms_norm


class Mending:
    """Finds vLLM's operators for Python, and mends the norm among them."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, _: ModuleType | None = None) -> ModuleSpec | None:
        """As an import asks for it."""
        spec = PathFinder.find_spec(name, path) if name == "vllm._custom_ops" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def mended(module: ModuleType) -> None:
                execute(module)
                vars(module)["rms_norm"] = by_rows(vars(module)["rms_norm"])

            vars(spec.loader)["exec_module"] = mended
        return spec


if "VLLM_CPU_AS_SHIPPED" not in os.environ:
    sys.meta_path.insert(0, Mending)
importlib.metadata.version = version
backends["cpu"] = Backend
builder: Any = interpreter.InterpreterBuilder
load, store = builder.create_masked_load, builder.create_masked_store
interpreter._get_np_dtype = known_type
called: Any = interpreter.InterpretedFunction
called.__call__ = call_inside
vars(libdevice)["log1p"] = log1p
builder.create_masked_load = lambda self, ptrs, mask, *rest: load(self, ptrs, boolean(mask), *rest)
builder.create_masked_store = lambda self, ptrs, value, mask, *rest: store(self, ptrs, value, boolean(mask), *rest)
