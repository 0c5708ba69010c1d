"""One comparison for all operations; tests marked `gpu` are skipped where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `aot`
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def compare(name: str, got: torch.Tensor, expected: torch.Tensor, ratio: float = 1e-5) -> None:
    """Largest difference within `ratio` of the largest expected value."""
    assert got.shape == expected.shape, f"{name}: shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    off = (got.double() - expected.double()).abs().max().item() if got.numel() else 0.0
    scale = max(expected.abs().max().item() if expected.numel() else 0.0, 1e-6)
    assert off <= ratio * scale, f"{name}: off by {off:.3e}, {off / scale:.1e} of the largest value {scale:.3e}"


@pytest.fixture
def assert_close():
    return compare
