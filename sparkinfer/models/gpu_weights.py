"""From a checkpoint's tensors to projections as the GPU kernels read them: stored as they are quantised, module by
module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sparkinfer_kernels.gpu_ops import GpuOps
from sparkinfer_kernels.linear.weights import Fp8BlockWeight

from sparkinfer.models.config import ModelConfig
from sparkinfer.models.loader import WeightSource
from sparkinfer.quantization.fp8 import Fp8BlockParts
from sparkinfer.quantization.nvfp4 import Nvfp4Parts

Parts = torch.Tensor | Nvfp4Parts | Fp8BlockParts
FP8_BLOCK = 128
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Rows:
    """A projection's input: T rows in bf16, or in FP8 with a scale for each row, or both, as its weights want them."""

    bf16: torch.Tensor | None
    """[T, K]."""
    fp8: tuple[torch.Tensor, torch.Tensor] | None
    """([T, K] float8_e4m3fn, [T] fp32)."""

    @property
    def count(self) -> int:
        """T."""
        if self.bf16 is not None:
            return self.bf16.shape[0]
        assert self.fp8 is not None
        return self.fp8[0].shape[0]


class Projection:
    """One or more weights that read the same rows; their outputs lie side by side."""

    def __init__(self, owner: GpuWeights, weights: Sequence[Any], wide: Sequence[Any] = ()) -> None:
        """`wide`: the weights that passes of many rows multiply with, where they are others."""
        self.owner, self.ops, self.weights = owner, owner.ops, list(weights)
        self.wide = list(wide or weights)
        self.dtype, self.device = owner.dtype, owner.device
        self.n = sum(weight.shape[0] for weight in weights)
        self.k = self.weights[0].shape[1]
        self.some_fp8 = any(getattr(weight, "fp8", None) is not None for weight in weights)
        self.all_fp8 = all(getattr(weight, "fp8", None) is not None for weight in weights)

    def empty_rows(self, count: int) -> Rows:
        """Where `count` rows of input go, in the forms that this projection multiplies."""
        fp8 = None
        if self._in_fp8(count):
            values = torch.empty(count, self.k, dtype=torch.float8_e4m3fn, device=self.device)
            fp8 = values, torch.empty(count, dtype=torch.float32, device=self.device)
        bf16 = None
        if fp8 is None or not self.all_fp8:
            bf16 = torch.empty(count, self.k, dtype=self.dtype, device=self.device)
        return Rows(bf16, fp8)

    def rows(self, x: torch.Tensor) -> Rows:
        """`x` [T, K] bf16 as input, quantised here when no kernel before did."""
        if not self._in_fp8(x.shape[0]):
            return Rows(x, None)
        values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=self.device)
        fp8 = values, torch.empty(x.shape[0], dtype=torch.float32, device=self.device)
        self.ops.quantise_rows(x, *fp8)
        return Rows(x, fp8)

    def __call__(self, rows: Rows, out: torch.Tensor | None = None) -> torch.Tensor:
        """[T, K] to [T, N] in the model's dtype, or into `out` when given, which may be float32."""
        weights = self.weights if rows.count <= self.ops.skinny_rows else self.wide
        if len(weights) == 1:
            return self._product(rows, weights[0], out)
        if out is None:
            out = torch.empty(rows.count, self.n, dtype=self.dtype, device=self.device)
        first = 0
        for weight in weights:
            self._product(rows, weight, out[:, first : first + weight.shape[0]])
            first += weight.shape[0]
        return out

    def _in_fp8(self, count: int) -> bool:
        return self.some_fp8 and count > self.ops.skinny_rows

    def _product(self, rows: Rows, weight: Any, out: torch.Tensor | None) -> torch.Tensor:
        fp8 = rows.fp8 if rows.fp8 is not None and getattr(weight, "fp8", None) is not None else None
        x = rows.bf16
        if x is None:
            # Only its shape is looked at.
            x = self.owner.ghost[: self.k].expand(rows.count, -1)
        # The FP8 block kernel writes whole rows.
        apart = out is not None and not out.is_contiguous() and isinstance(weight, Fp8BlockWeight)
        target = None if apart else out
        y = self.ops.linear(x, weight, self.owner.workspace, target, *(fp8 or ()))
        return y if out is None or out is target else out.copy_(y)


class GateUp:
    """Gate and up projection with SwiGLU behind them, in one kernel where the weight's format has one."""

    def __init__(self, projection: Projection, fused: Any) -> None:
        self.projection, self.fused = projection, fused

    def __call__(self, rows: Rows, out: Rows) -> None:
        """[T, K] to `out` [T, N / 2]: in each of the forms that it has."""
        projection = self.projection
        ops, owner = projection.ops, projection.owner
        many = rows.count > ops.skinny_rows and projection.wide[0] is not self.fused
        if self.fused is None or many or (out.fp8 is not None and out.bf16 is not None):
            ops.swiglu(projection(rows), out.bf16, out.fp8)
            return
        x = rows.bf16 if rows.bf16 is not None else owner.ghost[: projection.k].expand(rows.count, -1)
        values, scales = rows.fp8 or (None, None)
        ops.linear_swiglu(x, self.fused, owner.workspace, out.bf16, values, scales, fp8=out.fp8)


class GpuWeights:
    """Takes tensors from a source and brings them to the GPU."""

    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        ops: GpuOps,
        *,
        fp8_prefill: bool,
        fp8_kv: bool,
        bf16_copy: bool = False,
        fp8_head: bool = False,
    ) -> None:
        self.source, self.device, self.dtype, self.ops = source, device, dtype, ops
        self.fp8_prefill, self.fp8_kv, self.bf16_copy, self.fp8_head = fp8_prefill, fp8_kv, bf16_copy, fp8_head
        self.ghost = torch.empty(0, dtype=dtype, device=device)
        """Stands for an input that exists in FP8 alone."""
        self.workspace: Any = None
        self._prepared: list[Any] = []

    def allocate(self, rows: int) -> None:
        """Make the scratch memory of all products with up to `rows` rows; call it when all weights are there."""
        self.workspace = self.ops.make_linear_workspace(self._prepared, rows)
        self.ghost = torch.zeros(max(weight.shape[1] for weight in self._prepared), dtype=self.dtype).to(self.device)

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """A matrix in the model's dtype."""
        return aligned(self.source.get(name, shape).to(device=self.device, dtype=self.dtype))

    def fp32(self, name: str, *shape: int) -> torch.Tensor:
        """A vector kept in fp32: norm weights and decay constants."""
        return self.source.get(name, shape).to(device=self.device, dtype=torch.float32)

    def norm1(self, name: str, size: int) -> torch.Tensor:
        """A zero-centred norm weight plus one."""
        return self.fp32(name, size) + 1.0

    def parts(self, name: str, rows: int, columns: int) -> Parts:
        """A matrix as the checkpoint stores it, on the GPU."""
        stored = self.source.quantised(name, (rows, columns))
        return self.get(name, rows, columns) if stored is None else stored.to(self.device)

    def projection(self, parts: Sequence[tuple[str, int]], columns: int) -> Projection:
        """Projections of the same input, (name, rows) each, as one; neighbours of one format are one weight."""
        return self.prepared([self.parts(name, rows, columns) for name, rows in parts])

    def output_matrix(self, name: str, rows: int, columns: int) -> Projection:
        """The matrix of the logits; in FP8 with a scale for each row where that is wanted and 16 bits are stored."""
        part = self.parts(name, rows, columns)
        if not self.fp8_head or not isinstance(part, torch.Tensor):
            return self.prepared([part])
        weight = self.ops.prepare_fp8_rows([part])
        self._prepared.append(weight)
        return Projection(self, [weight])

    def attention_projection(self, config: ModelConfig, prefix: str) -> Projection:
        """Queries | keys | gates | values: q_proj interleaves query and gate by head, here they come apart."""
        heads, d, hidden = config.num_heads, config.head_dim, config.hidden_size
        q_gate = self.parts(f"{prefix}q_proj.weight", heads * 2 * d, hidden)
        key = self.parts(f"{prefix}k_proj.weight", config.num_kv_heads * d, hidden)
        value = self.parts(f"{prefix}v_proj.weight", config.num_kv_heads * d, hidden)
        order = torch.arange(heads * 2 * d, device=self.device).view(heads, 2, d)
        query, gate = (pick_rows(q_gate, order[:, side].reshape(-1)) for side in (0, 1))
        return self.prepared([query, key, gate, value])

    def kv_scales(self, config: ModelConfig) -> torch.Tensor | None:
        """[2, Hkv]: scales of keys and values in an FP8 cache. Normed keys and values lie well within e4m3's range."""
        if not self.fp8_kv:
            return None
        return torch.ones(2, config.num_kv_heads, dtype=torch.float32, device=self.device)

    def prepared(self, parts: Sequence[Parts]) -> Projection:
        """Parts in order, runs of one format stacked."""
        runs: list[list[Parts]] = []
        for part in parts:
            if runs and type(runs[-1][-1]) is type(part) and _stackable(runs[-1][-1]):
                runs[-1].append(part)
            else:
                runs.append([part])
        weights = [self._prepare(run) for run in runs]
        wide = self._wide(parts) if any(not isinstance(part, torch.Tensor) for part in parts) else []
        self._prepared += weights + wide
        return Projection(self, weights, wide)

    def _wide(self, parts: Sequence[Parts]) -> list[Any]:
        """All parts in bf16 as one weight, where there is memory for it: nothing is left to expand in a large pass."""
        if not self.bf16_copy:
            return []
        return [self.ops.prepare_bf16([p if isinstance(p, torch.Tensor) else p.dequantise(self.dtype) for p in parts])]

    def gate_up(self, gate: tuple[str, int], up: tuple[str, int], columns: int) -> GateUp:
        """The two input projections of a SwiGLU block."""
        parts = [self.parts(name, rows, columns) for name, rows in (gate, up)]
        if not all(isinstance(part, Nvfp4Parts) for part in parts) or gate[1] % 8:
            return GateUp(self.prepared(parts), None)
        weight, wide = self.ops.prepare_nvfp4(parts, gate_up=True, fp8=self.fp8_prefill), self._wide(parts)
        self._prepared += [weight, *wide]
        return GateUp(Projection(self, [weight], wide), weight)

    def _prepare(self, run: list[Parts]) -> Any:
        if isinstance(run[0], Nvfp4Parts):
            return self.ops.prepare_nvfp4(run, fp8=self.fp8_prefill)
        if isinstance(run[0], Fp8BlockParts):
            pairs = [(part.weight, part.scales) for part in run]  # type: ignore[union-attr]
            return self.ops.prepare_fp8_block(pairs, multiply_fp8=self.fp8_prefill)
        return self.ops.prepare_bf16(run)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied where it does not begin at 16 bytes: files pack tensors tightly, kernels load 16 at once."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def _stackable(part: Parts) -> bool:
    """Whether another part of its format can follow it in one weight."""
    return not isinstance(part, Fp8BlockParts) or part.shape[0] % FP8_BLOCK == 0


def pick_rows(part: Parts, rows: torch.Tensor) -> Parts:
    """Chosen rows of a matrix, in its format. FP8 blocks must be picked whole."""
    if isinstance(part, torch.Tensor):
        return part.index_select(0, rows)
    return part.pick_rows(rows)
