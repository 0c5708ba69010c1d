"""The chunked gated delta rule against the one-token recurrence in float64."""

from __future__ import annotations

import pytest
import torch
from sparkinfer_models import delta_rule
from torch import Tensor


def _recurrent(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    batch, time, heads, dim = q.shape
    state = torch.zeros(batch, heads, dim, dim, dtype=q.dtype)
    rows = []
    for t in range(time):
        row, state = delta_rule.step(q[:, t], k[:, t], v[:, t], beta[:, t], g[:, t], state)
        rows.append(row)
    return torch.stack(rows, 1), state


def _chunked(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    terms = delta_rule.chunk_terms(*(delta_rule.to_chunks(x) for x in (q, k, v, beta, g)))
    output, state = delta_rule.chunk_scan(terms)
    return delta_rule.from_chunks(output, q.shape[1]), state


@pytest.mark.parametrize("time", [1, 63, 64, 65, 150])
@pytest.mark.parametrize("alike", [False, True], ids=["random keys", "equal neighbouring keys"])
def test_chunked_form_equals_recurrence_and_its_gradients(time: int, alike: bool) -> None:
    generator = torch.Generator().manual_seed(time)
    q, k, v = (torch.randn(2, time, 2, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    if alike:  # runs of white space: the triangular system's worst case
        k[:, 2:60] = k[:, 2:3] if time > 2 else k[:, 2:60]
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    beta = torch.rand(2, time, 2, generator=generator, dtype=torch.float64) * 0.1 + 0.9
    g = -torch.rand(2, time, 2, generator=generator, dtype=torch.float64) * 0.05
    weights = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    results = []
    for function, dtype in ((_recurrent, torch.float64), (_chunked, torch.float32)):
        leaves = [x.detach().clone().to(dtype).requires_grad_() for x in (q, k, v, beta, g)]
        output, state = function(*leaves)
        (output * weights.to(dtype)).sum().backward()
        results.append([output, state, *(x.grad for x in leaves)])
    for exact, found in zip(*results, strict=True):
        assert exact is not None
        assert found is not None
        assert (exact - found).norm() <= 1e-4 * exact.norm().clamp(min=1e-6)
