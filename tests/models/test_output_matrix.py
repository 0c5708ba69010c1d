"""Logits are float32 sums: no rounding to 16 bits, whole or block by block."""

from __future__ import annotations

import pytest
import torch

from sparkinfer.models import output_matrix
from sparkinfer.models.output_matrix import OutputMatrix


@pytest.mark.parametrize("copy_bytes", [1 << 30, 0])
@pytest.mark.parametrize("rows", [1, 5])
def test_against_fp64(copy_bytes: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_matrix, "BLOCK_BYTES", 300 * 4 * 64)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1000, 64, generator=generator).bfloat16()
    hidden = torch.randn(rows, 64, generator=generator).bfloat16()
    logits = OutputMatrix(weight, copy_bytes)(hidden)
    assert logits.dtype == torch.float32
    exact = hidden.double() @ weight.double().t()
    # Rounded to bfloat16 they would be off by up to 1/256 of their size.
    assert (logits - exact).abs().max() < 1e-5 * exact.abs().max()


def test_a_bfloat16_engine_gives_logits_between_bfloat16_numbers(checkpoint, make_driver, prompt) -> None:
    folder, _ = checkpoint("dense")
    driver = make_driver(folder, dtype="bfloat16")
    logits = driver.logits([driver.row(driver.add(prompt(20, 1)))])
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9


def test_float32_weights_are_never_cut() -> None:
    weight = torch.randn(50, 16)
    hidden = torch.randn(3, 16)
    assert torch.equal(OutputMatrix(weight, 0)(hidden), hidden @ weight.t().contiguous())
