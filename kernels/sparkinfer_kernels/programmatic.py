"""Programmatic dependent launch (Hopper and later): a kernel starts while the one before it still runs.

A kernel that is launched with `launch_pdl=True` may begin early. It must call `wait_for_previous` before it reads or
writes anything that an earlier kernel touches; weights it may read before. The same call lets the next kernel begin,
and since that one waits for this one's end, and this one has waited for its predecessor, order is kept along a chain,
kernels without the attribute included.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PDL = not triton.knobs.runtime.interpret
"""Whether kernels are launched that way: on a GPU, not in the interpreter."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel that way; it is told so by its argument PDL."""
    kernel[grid](*arguments, **options, PDL=PDL, launch_pdl=PDL)


@triton.jit
def wait_for_previous(ENABLED: tl.constexpr):
    """Wait until the kernel before has ended and its writes are visible; let the kernel after begin."""
    if ENABLED:
        gdc_wait()
        gdc_launch_dependents()
