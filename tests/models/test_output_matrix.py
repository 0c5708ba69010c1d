"""Logits are float32 sums: no rounding to 16 bits, whole or block by block."""

from __future__ import annotations

import pytest
import torch

from sparkinfer.models import output_matrix
from sparkinfer.models.output_matrix import OutputMatrix, float32_bytes


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
    for copy_bytes in (0, 1 << 30):
        torch.testing.assert_close(OutputMatrix(weight, copy_bytes)(hidden), hidden @ weight.t())


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="without oneDNN rows do depend on their number")
@pytest.mark.parametrize("shape", [(2048, 256), (512, 1040), (512, 2048), (4096, 4096)])
def test_a_row_s_logits_do_not_depend_on_the_number_of_rows(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    output = OutputMatrix(torch.randn(*shape, generator=generator).bfloat16())
    hidden = torch.randn(70, shape[1], generator=generator).bfloat16()
    together = output(hidden)
    for rows in (1, 2, 3, 5, 7, 9, 17, 33, 64):
        assert torch.equal(output(hidden[:rows]), together[:rows]), rows


def test_bytes_of_the_copy() -> None:
    assert float32_bytes(1000, 64) == 256000
    assert float32_bytes(1 << 17, 512) == output_matrix.COPY_BYTES
    assert float32_bytes((1 << 17) + 1, 512) == output_matrix.BLOCK_BYTES
