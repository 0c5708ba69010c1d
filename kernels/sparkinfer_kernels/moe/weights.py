"""Weights of a mixture of experts as the GPU kernels read them, and their preparation from a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparkinfer_kernels.linear import layout
from sparkinfer_kernels.linear.weights import Fp8RowWeight, Nvfp4Parts, prepare_fp8_rows, prepare_nvfp4

Matrices = torch.Tensor | Sequence[Nvfp4Parts]
"""All experts' matrices of one kind: [E, N, K] float, or one NVFP4 matrix [N, K] for each expert (gate_up: gate and up
of expert 0, of expert 1, ...)."""

PIECE_ROWS = 1 << 14
"""Rows of NVFP4 experts that are expanded at once when a copy is made."""


@dataclass(frozen=True, slots=True)
class Nvfp4Experts:
    """All experts' matrices [N, K] in the fragment order of `linear/layout.py`, one expert after another."""

    codes: torch.Tensor
    """[E * N / 16, Kp / 64, 32, 16] uint8, Kp = K rounded up to 128."""
    scales: torch.Tensor
    """[E * N / 16, Kp / 128, 32, 4] uint8; in order "wgmma" [E * N / 16, Kp / 64, 8, 8]."""
    row_scales: torch.Tensor
    """[E * N] fp32: each row's global scale times `layout.ROW_FACTOR`."""


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """All experts' matrices of one kind; of gate and up, the rows lie in turns of eight."""

    shape: tuple[int, int, int]
    """(experts, N, K)."""
    nvfp4: Nvfp4Experts | None
    bf16: torch.Tensor | None
    """[E, N, K]."""
    fp8: Fp8RowWeight | None
    """values [E * N, K] e4m3 with one scale a row, for many tokens."""

    def stored(self, form: str) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """What a kernel reads of one form ("nvfp4", "fp8", "bf16"): words or values, block scales, row scales."""
        if form == "nvfp4":
            assert self.nvfp4 is not None
            packed = self.nvfp4
            return packed.codes.view(torch.int32), packed.scales.view(torch.int32), packed.row_scales
        if form == "fp8":
            assert self.fp8 is not None
            return self.fp8.values, None, self.fp8.scales
        assert self.bf16 is not None
        return self.bf16, None, None


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """One block's weights, made by `prepare_moe`."""

    router: torch.Tensor
    """[E + 1, H] bf16: the router's rows and, last, the shared expert's gate."""
    gate_up: ExpertMatrices
    """[experts, 2 * I, H]; experts: E, or E + 1 where the shared one is stored with them."""
    down: ExpertMatrices
    """[experts, H, I]."""
    shared_gate_up: torch.Tensor | None
    """[2 * S, H] bf16 in plain order, where the shared expert is apart."""
    shared_down: torch.Tensor | None
    """[H, S] bf16."""
    top_k: int
    order: str
    """Of the NVFP4 columns (`linear/layout.py`), and with it the kernels that multiply."""

    @property
    def slots(self) -> int:
        """Pairs of a token."""
        return self.top_k + (self.shared_down is None)


def prepare_moe(
    router: torch.Tensor,
    gate_up: Matrices,
    down: Matrices,
    shared_gate_up: Matrices,
    shared_down: Matrices,
    top_k: int,
    wide: str = "bf16",
) -> MoeWeights:
    """Bring a block's weights into the kernels' order.

    Args:
        router: [E + 1, H], the shared expert's gate last.
        gate_up: [E, 2 * I, H] (gate above up) or E times NVFP4 gate [I, H] and up [I, H].
        down: [E, H, I] or E NVFP4 matrices.
        shared_gate_up, shared_down: [2 * S, H] and [H, S], or NVFP4 (gate, up) and (down,). They are stored with the
            other experts where S = I and the format is the same.
        top_k: experts of a token.
        wide: what passes of many tokens multiply NVFP4 experts in: "bf16" (a copy; exact), "fp8" (a copy with row
            scales) or "nvfp4" (no copy, expanded in registers; exact).

    Raises:
        ValueError: shapes do not fit together, or I or H is no multiple of 16.
    """
    if wide not in ("bf16", "fp8", "nvfp4"):
        raise ValueError(f"experts for many tokens can be kept in bf16, fp8 or nvfp4, not in {wide!r}")
    experts, hidden = router.shape[0] - 1, router.shape[1]
    inner = down.shape[2] if isinstance(down, torch.Tensor) else down[0].packed.shape[1] * 2
    if inner % 16 or hidden % 16:
        raise ValueError(f"experts need sizes that are multiples of 16, got hidden {hidden} and inner {inner}")
    if isinstance(gate_up, torch.Tensor) != isinstance(down, torch.Tensor):
        gate_up = _in_bf16(gate_up, (experts, 2 * inner, hidden))
        down = _in_bf16(down, (experts, hidden, inner))
    if not 1 <= top_k <= experts:
        raise ValueError(f"cannot choose {top_k} of {experts} experts")
    fused = _kept_together(gate_up, shared_gate_up, 2 * inner) and _kept_together(down, shared_down, hidden)
    if fused:
        gate_up, down = _append(gate_up, shared_gate_up), _append(down, shared_down)
    count, order = experts + fused, layout.expert_order(router.device)
    return MoeWeights(
        router.to(torch.bfloat16).contiguous(),
        _matrices(gate_up, (count, 2 * inner, hidden), wide, order, gate_up=True),
        _matrices(down, (count, hidden, inner), wide, order, gate_up=False),
        None if fused else plain(shared_gate_up),
        None if fused else plain(shared_down),
        top_k,
        order,
    )


def _kept_together(experts: Matrices, shared: Matrices, rows: int) -> bool:
    if isinstance(experts, torch.Tensor) or isinstance(shared, torch.Tensor):
        both = isinstance(experts, torch.Tensor) and isinstance(shared, torch.Tensor)
        return both and shared.shape == experts.shape[1:]  # type: ignore[union-attr]
    return sum(part.packed.shape[0] for part in shared) == rows and all(
        part.packed.shape[1] == experts[0].packed.shape[1] for part in shared
    )


def _in_bf16(experts: Matrices, shape: tuple[int, int, int]) -> torch.Tensor:
    return experts if isinstance(experts, torch.Tensor) else plain(experts).view(shape)


def _append(experts: Matrices, shared: Matrices) -> Matrices:
    if isinstance(experts, torch.Tensor):
        assert isinstance(shared, torch.Tensor)
        return torch.cat([experts, shared.unsqueeze(0)])
    return [*experts, *shared]


def plain(matrix: Matrices) -> torch.Tensor:
    """bf16 [N, K] of one matrix, or of parts below each other."""
    if isinstance(matrix, torch.Tensor):
        return matrix.to(torch.bfloat16).contiguous()
    return torch.cat([_expanded(part.packed, part.scales, part.global_scale.float()) for part in matrix])


def _expanded(packed: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """bf16 [N, K] of NVFP4 rows; factors: fp32 [], or [N, 1] for each row."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=packed.device)
    table = torch.cat([table, -table])
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).to(torch.int32)
    values = table[codes].unflatten(-1, (-1, layout.BLOCK)) * scales.float().unsqueeze(-1)
    return values.flatten(-2).mul_(factors).to(torch.bfloat16)


def _interleave(rows: torch.Tensor, experts: int) -> torch.Tensor:
    """Rows [experts * 2 * I, ...] of gates and ups in turns of eight, as `layout.interleave` for each expert."""
    inner = rows.shape[0] // (2 * experts)
    turned = rows.view(experts, 2, inner // 8, 8, *rows.shape[1:]).transpose(1, 2)
    return turned.reshape(rows.shape)


def _matrices(given: Matrices, shape: tuple[int, int, int], wide: str, order: str, gate_up: bool) -> ExpertMatrices:
    experts, n, k = shape
    if isinstance(given, torch.Tensor):
        if tuple(given.shape) != shape:
            raise ValueError(f"experts of shape {tuple(given.shape)} do not fit the others: expected {shape}")
        flat = given.to(torch.bfloat16).reshape(experts * n, k)
        flat = _interleave(flat, experts) if gate_up else flat.contiguous()
        return ExpertMatrices(shape, None, flat.view(shape), None)
    parts = (1 + gate_up) * experts
    if len(given) != parts or any(tuple(part.packed.shape) != (n * experts // parts, k // 2) for part in given):
        raise ValueError(f"expected {parts} NVFP4 matrices of {n * experts // parts} x {k}, got others")
    stacked = _Stacked(given, experts if gate_up else 0)
    copy = fp8 = None
    if wide != "nvfp4":
        copy = torch.empty(experts * n, k, dtype=torch.bfloat16, device=stacked.packed.device)
        for first in range(0, experts * n, PIECE_ROWS):
            piece = slice(first, first + PIECE_ROWS)
            copy[piece] = _expanded(stacked.packed[piece], stacked.scales[piece], stacked.factors[piece].unsqueeze(1))
    if wide == "fp8" and copy is not None:
        fp8, copy = prepare_fp8_rows([copy], mantissa=1.5), None
    weight = prepare_nvfp4([stacked], order=order)
    packed = Nvfp4Experts(weight.codes, weight.scales, stacked.factors * layout.ROW_FACTOR[order])
    return ExpertMatrices(shape, packed, None if copy is None else copy.view(shape), fp8)


class _Stacked:
    """NVFP4 matrices below each other as one with global scale 1, and each row's own."""

    def __init__(self, parts: Sequence[Nvfp4Parts], pairs: int) -> None:
        packed = torch.cat([part.packed for part in parts])
        scales = torch.cat([part.scales.view(torch.uint8) for part in parts])
        factors = torch.stack([part.global_scale.float().reshape(()) for part in parts]).to(packed.device)
        factors = factors.repeat_interleave(parts[0].packed.shape[0])
        if pairs:
            packed, scales, factors = (_interleave(one, pairs) for one in (packed, scales, factors))
        self.packed, self.scales, self.factors = packed, scales.view(torch.float8_e4m3fn), factors
        self.global_scale = torch.ones((), device=packed.device)
