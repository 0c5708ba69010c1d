"""Stand-ins of the experts' Gluon kernels on the CPU, for tests of what launches them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from gluon_emulator import launch


def quantised(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """As `rms_norm.gpu.quantise_rows`: the interpreter truncates what GPUs round to e4m3."""
    scales.copy_(x.float().abs().amax(1) / 448)
    values.copy_((x.float() / scales.unsqueeze(1)).to(torch.float8_e4m3fn))


class Emulated:
    """Stands for a kernel; its programs run in random order. `asm` does what inline assembly does."""

    def __init__(self, kernel: Any, asm: Mapping[Any, Any]) -> None:
        self.kernel, self.asm = kernel, dict(asm)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*given: Any, **options: Any) -> None:
            arguments = dict(zip(self.kernel.arg_names, given, strict=False)) | options
            for name in ("launch_pdl", "num_warps"):
                del arguments[name]
            flat = {
                name: value.reshape(-1) if isinstance(value, torch.Tensor) else value
                for name, value in arguments.items()
            }
            assert all(
                value.untyped_storage().data_ptr() == arguments[name].untyped_storage().data_ptr()
                for name, value in flat.items()
                if isinstance(value, torch.Tensor)
            )
            launch(
                self.kernel,
                flat,
                (*grid, 1)[:2],
                self.asm,
                order=lambda programs: random.Random(0).sample(list(programs), len(list(programs))),
            )

        return run
