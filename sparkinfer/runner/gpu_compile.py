"""Kernels compiled side by side before passes are captured one after another.

Compiling is most of a first start: some dozens of kernels of one to three seconds each, one waiting for the other. So a
trial run first only notes what would be compiled (Triton's hook for other caches lets it skip compiling and launching),
and then all of it is compiled by threads; Triton's compiler releases the interpreter in its passes and in ptxas.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Noted:
    """The kernels that a trial run asked for, each once."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[str, str, str], tuple[Any, str]] = {}
        """(module, name, key of the specialisation) to (function, the specialisation as Triton writes it down)."""

    def __call__(self, *, key: str, fn: Any, compile: dict[str, Any], **rest: object) -> bool:
        """Triton's hook. The answer keeps it from compiling and launching the kernel."""
        self.kernels[fn.module, fn.name, key] = fn.jit_function, compile["specialization_data"]
        return True


def compile_ahead(trial: Callable[[], None], threads: int) -> int:
    """Compile what `trial` launches and no cache in this process holds; returns how many kernels that were.

    Args:
        trial: launches kernels whose results nobody looks at: those not compiled yet do not run.
        threads: that compile at the same time.
    """
    from triton import knobs
    from triton.runtime._async_compile import AsyncCompileMode

    noted, before = Noted(), knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = noted
    try:
        trial()
    finally:
        knobs.runtime.jit_cache_hook = before
    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool):
        for function, specialisation in noted.kernels.values():
            function.preload(specialisation)
    return len(noted.kernels)
