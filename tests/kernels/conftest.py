"""One comparison for all operations."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


def compare(name: str, got: torch.Tensor, expected: torch.Tensor, ratio: float = 1e-5) -> None:
    """Largest difference within `ratio` of the largest expected value."""
    assert got.shape == expected.shape, f"{name}: shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    off = (got.double() - expected.double()).abs().max().item() if got.numel() else 0.0
    scale = max(expected.abs().max().item() if expected.numel() else 0.0, 1e-6)
    assert off <= ratio * scale, f"{name}: off by {off:.3e}, {off / scale:.1e} of the largest value {scale:.3e}"


@pytest.fixture
def assert_close():
    return compare
