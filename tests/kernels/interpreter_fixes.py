"""Faults of Triton 3.6's interpreter that kernels of linear attention meet, mended for tests.

It multiplies the bit patterns of bf16 operands in `tl.dot`, it truncates fp32 to bf16 where GPUs round to nearest, and
with numpy 2.4 and later it cannot run a loop whose bound was loaded from memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _rounded(values: np.ndarray) -> np.ndarray:
    """fp32 to the bits of the nearest bf16."""
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def fix_interpreter() -> None:
    """Patch the interpreter, once."""
    builder = interpreter.InterpreterBuilder
    patch_tensor, dot, cast = interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl
    if getattr(patch_tensor, "fixed", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return dot(self, _widened(a), _widened(b), d, *options)

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_rounded(source.data), tl.bfloat16)
        return cast(self, source, to)

    patched.fixed = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched
    builder.create_dot = create_dot
    builder.cast_impl = cast_impl
