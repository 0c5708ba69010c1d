"""The kernels around a captured pass against their plain twins: in Triton's interpreter here, compiled on a GPU."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

from sparkinfer_kernels.step import gpu, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_inputs_tables_and_tokens() -> None:
    generator = torch.Generator().manual_seed(0)

    def ints(high: int, *size: int) -> torch.Tensor:
        return torch.randint(0, high, size, generator=generator, dtype=torch.int32).to(DEVICE)

    for decode, prompts, width, updates in ((1, 0, 3, 1), (5, 3, 1500, 700), (0, 2, 40, 9)):
        slots = torch.randperm(12, generator=generator)[: decode + prompts].to(DEVICE, torch.int32)
        tokens = ints(100, decode + 7)
        tokens[:decode:2] = -1
        last, table = ints(100, 12), ints(1000, 12, width)
        places = torch.randperm(12 * width, generator=generator)[:updates].to(DEVICE, torch.int32)
        results = []
        for module in (reference, gpu):
            copies = [tensor.clone() for tensor in (tokens, last, table)]
            lines = torch.full((decode + prompts, width), -1, dtype=torch.int32, device=DEVICE)
            module.prepare_step(copies[0], slots, decode, copies[1], copies[2], places, places + 5, lines)
            module.keep_tokens(slots.new_tensor([7, 8]), slots.new_tensor([3, 11]), copies[1])
            results.append([*copies, lines])
        for expected, got in zip(*results, strict=True):
            assert torch.equal(expected, got)
