"""From stored formats to projections: stacking, row order, the bf16 copy; with twins in place of the kernels."""

from __future__ import annotations

import pytest
import torch

from sparkinfer.models.gpu_moe import stacked
from sparkinfer.models.gpu_weights import GpuWeights, Rows, aligned
from sparkinfer.quantization import nvfp4

from .gpu_twins import Plain, twin_ops

K = 32


class Source:
    """Random weights; names that start with `q` are stored as NVFP4."""

    def __init__(self) -> None:
        self.made: dict[str, torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        weight = torch.randn(shape, generator=generator)
        if name.startswith("q"):
            weight = nvfp4.quantise(weight).dequantise()
        self.made[name] = weight
        return weight

    def quantised(self, name: str, shape: tuple[int, ...] | None = None) -> nvfp4.Nvfp4Parts | None:
        if not name.startswith("q"):
            return None
        assert shape is not None
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        return nvfp4.quantise(torch.randn(shape, generator=generator))


def make(bf16_copy: bool) -> GpuWeights:
    return GpuWeights(
        Source(), torch.device("cpu"), torch.float32, twin_ops(), fp8_prefill=False, fp8_kv=False, bf16_copy=bf16_copy
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("bf16_copy", [False, True])
@pytest.mark.parametrize("count", [2, 9])
def test_formats_side_by_side(bf16_copy: bool, count: int) -> None:
    weights = make(bf16_copy)
    names = [("q1", 16), ("q2", 48), ("plain", 8), ("q3", 16)]
    projection = weights.projection(names, K)
    assert len(projection.weights) == 3
    assert len(projection.wide) == (1 if bf16_copy else 3)
    x = torch.randn(count, K, generator=torch.Generator().manual_seed(1))
    expected = torch.cat([x @ weights.source.get(name, (rows, K)).t() for name, rows in names], dim=1)
    torch.testing.assert_close(projection(Rows(x, None)), expected)


@pytest.mark.parametrize("bf16_copy", [False, True])
@pytest.mark.parametrize("count", [2, 9])
@pytest.mark.parametrize("prefix", ["q", "p"])
def test_gate_and_up_with_swiglu(bf16_copy: bool, count: int, prefix: str) -> None:
    weights = make(bf16_copy)
    block = weights.gate_up((f"{prefix}gate", 24), (f"{prefix}up", 24), K)
    assert (block.fused is not None) == (prefix == "q")
    x = torch.randn(count, K, generator=torch.Generator().manual_seed(1))
    gate, up = (x @ weights.source.get(f"{prefix}{name}", (24, K)).t() for name in ("gate", "up"))
    out = Rows(torch.empty(count, 24), None)
    block(Rows(x, None), out)
    torch.testing.assert_close(out.bf16, torch.nn.functional.silu(gate) * up)


def test_a_format_is_stacked_only_with_its_like() -> None:
    projection = make(False).projection([("a", 8), ("b", 8)], K)
    assert [type(weight) for weight in projection.weights] == [Plain]
    assert projection.n == 16


def test_experts_expanded_at_once_equal_each_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    parts = [nvfp4.quantise(torch.randn(24, K, generator=generator) * scale) for scale in (0.1, 1.0, 7.0)]
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(stacked(parts, dtype), torch.cat([part.dequantise(dtype) for part in parts]))
    plain = [torch.randn(4, K, generator=generator) for _ in range(2)]
    assert torch.equal(stacked(plain, torch.float32), torch.cat(plain))


def test_weights_that_begin_anywhere_are_moved() -> None:
    buffer = torch.zeros(64, dtype=torch.bfloat16)
    odd, even = buffer[1:33], buffer[8:40]
    assert aligned(odd).data_ptr() % 16 == 0
    assert aligned(even).data_ptr() == even.data_ptr()


def test_the_output_matrix_in_fp8_where_it_is_stored_in_16_bits() -> None:
    weights = make(False)
    weights.fp8_head = True
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(1))
    exact = x @ weights.source.get("plain", (40, K)).t()
    error = (weights.output_matrix("plain", 40, K)(Rows(x, None)) - exact).norm() / exact.norm()
    assert 1e-3 < float(error) < 0.05
    stored = x @ weights.source.get("quantised", (40, K)).t()
    torch.testing.assert_close(weights.output_matrix("quantised", 40, K)(Rows(x, None)), stored)
    weights.fp8_head = False
    torch.testing.assert_close(weights.output_matrix("plain", 40, K)(Rows(x, None)), exact)
