"""Blocks of experts with random weights, and what they compute in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sparkinfer_kernels.moe import gpu
from test_linear import Parts, plain, random_parts


class Case(NamedTuple):
    """Sizes; `kind` is how the checkpoint stores experts, `wide` what many tokens multiply NVFP4 experts in."""

    tokens: int
    hidden: int
    experts: int
    inner: int
    top_k: int
    kind: str
    wide: str = "nvfp4"
    shared: str = "same"
    skew: str = ""

    def __str__(self) -> str:
        return "-".join(str(part) for part in self if part)

    @property
    def limit(self) -> float:
        return 0.08 if self.kind == "nvfp4" and self.wide == "fp8" and self.tokens > gpu.FEW_TOKENS else 0.006


TINY = {"hidden": 128, "experts": 16, "inner": 64, "top_k": 2}
CASES = [
    *(Case(tokens, **TINY, kind=kind) for tokens in (1, 2, 7, 27) for kind in ("bf16", "nvfp4")),
    Case(8, 208, 6, 48, 3, "nvfp4"),
    Case(30, 208, 6, 48, 3, "nvfp4", shared="apart"),
    Case(5, 128, 9, 64, 4, "nvfp4", shared="bf16"),
    Case(9, 128, 9, 64, 4, "bf16", shared="apart"),
    Case(32, **TINY, kind="nvfp4", skew="one"),
    Case(7, **TINY, kind="nvfp4", skew="one"),
    Case(33, **TINY, kind="nvfp4"),
    Case(100, **TINY, kind="bf16"),
    Case(100, **TINY, kind="nvfp4"),
    Case(100, **TINY, kind="nvfp4", wide="bf16", skew="one"),
    Case(100, **TINY, kind="nvfp4", wide="fp8"),
    Case(100, 208, 6, 48, 3, "nvfp4", shared="apart"),
    Case(150, 128, 40, 64, 8, "nvfp4", skew="few"),
    Case(70, 144, 128, 80, 2, "bf16"),
]


@dataclass
class Made:
    x: torch.Tensor
    weights: gpu.MoeWeights
    config: Any
    expected: torch.Tensor
    """[T, H] fp64."""
    shares: torch.Tensor
    """[T, top_k + 1] fp64."""
    given: list[Any]


def matrices(case: Case, n: int, k: int, count: int, parts: int, seed: int, kind: str, device: str) -> tuple[Any, Any]:
    """As `prepare_moe` takes them, and [count, n, k] fp64."""
    if kind == "bf16":
        generator = torch.Generator().manual_seed(seed)
        values = (torch.randn(count, n, k, generator=generator) * k**-0.5).to(torch.bfloat16)
        return values.to(device), values.double().to(device)
    made = [random_parts(n // parts, k, 2e-4 * (1 + i % 3), seed + i, low=0x30) for i in range(count * parts)]
    moved = [Parts(p.packed.to(device), p.scales.to(device), p.global_scale.to(device)) for p in made]
    values = torch.stack([plain(p) for p in made]).view(count, n, k).to(device)
    size = values.std().item() * k**0.5
    for part in moved:
        part.global_scale /= size
    return moved, values / size


def make_case(case: Case, device: str) -> Made:
    """Random weights, inputs and the result in fp64."""
    generator = torch.Generator().manual_seed(case.tokens)
    hidden, inner, experts, top_k = case.hidden, case.inner, case.experts, case.top_k
    shared = 2 * inner if case.shared == "apart" else inner
    kind = "bf16" if case.shared == "bf16" else case.kind
    router = torch.randn(experts + 1, hidden, generator=generator) * hidden**-0.5
    x = torch.randn(case.tokens, hidden, generator=generator)
    if case.skew:
        # All tokens at one expert, or most of them at a few.
        x[:, 0] = 8.0
        router[:, 0] = 0
        router[: 1 if case.skew == "one" else 3, 0] = 4.0
    router, x = router.to(device, torch.bfloat16), x.to(device, torch.bfloat16)
    gate_up, gate_up64 = matrices(case, 2 * inner, hidden, experts, 2, 100, case.kind, device)
    down, down64 = matrices(case, hidden, inner, experts, 1, 2000, case.kind, device)
    shared_gate_up, shared_gate_up64 = matrices(case, 2 * shared, hidden, 1, 2, 3000, kind, device)
    shared_down, shared_down64 = matrices(case, hidden, shared, 1, 1, 4000, kind, device)
    if kind == "bf16":
        shared_gate_up, shared_down = shared_gate_up[0], shared_down[0]
    given = [router, gate_up, down, shared_gate_up, shared_down]

    logits = x.double() @ router.double().t()
    probability, chosen = torch.softmax(logits[:, :-1], -1).topk(top_k, -1)
    shares = torch.cat([probability / probability.sum(-1, keepdim=True), torch.sigmoid(logits[:, -1:])], -1)

    def expert(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        gate, up = (rows @ first.t()).chunk(2, -1)
        return (F.silu(gate) * up) @ second.t()

    expected = shares[:, -1:] * expert(x.double(), shared_gate_up64[0], shared_down64[0])
    for index in range(experts):
        token, slot = (chosen == index).nonzero(as_tuple=True)
        if token.numel():
            y = expert(x[token].double(), gate_up64[index], down64[index])
            expected.index_add_(0, token, y * shares[token, slot].unsqueeze(1))
    config = SimpleNamespace(
        num_experts=experts, experts_per_token=top_k, hidden_size=hidden, moe_intermediate_size=inner
    )
    weights = gpu.prepare_moe(*given, top_k=top_k, wide=case.wide)
    return Made(x, weights, config, expected, shares, given)


def off(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Euclidean, relative."""
    return ((got.double() - expected).norm() / expected.norm()).item()
