"""Products with few rows: launches the memory-bound kernels with the parameters measured for each shape.

`tuned.json` holds, by architecture, weight format ("nvfp4", "fp8", and "nvfp4_wgmma" for weights in that order) and
number of token columns, rows [N, K, parameters] of shapes; a product takes the parameters of the nearest shape. Nothing
is tuned at run time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sparkinfer_kernels.linear.skinny_fp8_kernel import fp8_skinny_kernel
from sparkinfer_kernels.linear.skinny_kernel import nvfp4_skinny_kernel
from sparkinfer_kernels.linear.weights import Fp8BlockWeight, Fp8RowWeight, Nvfp4Weight
from sparkinfer_kernels.linear.wgmma_kernel import nvfp4_wgmma_kernel

PARTIALS = {"mma": 1 << 24, "wgmma": 1 << 25}
"""fp32 elements of a workspace for partial sums, by the order of the weights."""
COUNTERS = 1 << 14
PDL = True
"""Programmatic dependent launch: the first weights are fetched while the kernel before still runs."""
TOKENS = (8, 16, 32, 64)
"""Token columns that a kernel is built for."""
WGMMA_TOKENS = (*TOKENS, 128)
"""The same for weights in that order."""


@dataclass(frozen=True, slots=True)
class Config:
    """Parameters of the kernel, see `nvfp4_skinny_kernel`."""

    wk: int
    wn: int
    rt: int
    kb: int
    stages: int
    per_sm: int
    """Programs for each multiprocessor; 0 for one program a block, however many there are."""

    @property
    def rows(self) -> int:
        """Rows of the weight that one block handles."""
        return self.wn * self.rt * 16


@dataclass(frozen=True, slots=True)
class WgmmaConfig:
    """Parameters of `nvfp4_wgmma_kernel`."""

    warps: int
    rt: int
    columns: int
    stages: int
    per_sm: int
    """Programs for each multiprocessor; 0 for one program a block."""

    @property
    def rows(self) -> int:
        """Rows of the weight that one block handles."""
        return self.warps * self.rt * 16

    def shared(self, tokens: int) -> int:
        """Bytes of the stages in shared memory."""
        return self.stages * self.columns * (self.rows * 9 // 16 + tokens * 2)


FALLBACK = Config(wk=4, wn=1, rt=1, kb=1, stages=3, per_sm=0)
SHARED = {"sm_90": 227 * 1024}
"""Bytes of shared memory for a block; 99 KiB elsewhere."""
ROW_BYTES = {"nvfp4": 72, "fp8": 128}
"""Of a row's 128 columns in shared memory."""


@cache
def _stored() -> dict[str, dict[str, dict[str, list[list[int]]]]]:
    stored: dict[str, dict[str, dict[str, list[list[int]]]]]
    stored = json.loads(Path(__file__).with_name("tuned.json").read_text())
    return stored


def _nearest(rows: Sequence[tuple[Any, ...] | list[int]], n: int, k: int) -> Any:
    """The row [N, K, ...] whose shape is nearest, by ratios of N and K."""
    return min(rows, key=lambda row: abs(math.log(n / row[0])) + abs(math.log(k / row[1])))


@cache
def _table() -> dict[str, dict[str, dict[int, list[tuple[int, int, Config]]]]]:
    return {
        arch: {
            form: {int(bm): [(n, k, Config(*values)) for n, k, *values in rows] for bm, rows in by_tokens.items()}
            for form, by_tokens in forms.items()
            if form != "nvfp4_wgmma"
        }
        for arch, forms in _stored().items()
    }


@cache
def wgmma_config(tokens: int, n: int, k: int) -> WgmmaConfig:
    """Parameters of the nearest shape in the table."""
    rows = _stored()["sm_90"]["nvfp4_wgmma"][str(tokens)]
    return WgmmaConfig(*_nearest(rows, n, k)[2:])


@cache
def config_for(arch: str, form: str, tokens: int, n: int, k: int) -> Config:
    """Parameters of the nearest measured shape (by ratios of N and K), with as many stages as the memory holds.

    Architectures without entries of their own take those of sm_90.
    """
    table = _table()
    rows = table.get(arch, table.get("sm_90", {})).get(form, {}).get(tokens, [])
    best: Config = _nearest(rows, n, k)[2] if rows else FALLBACK
    if -(-k // 128) < best.kb:
        best = replace(best, kb=1)
    stage = best.wk * best.kb * (best.rows * ROW_BYTES[form] + tokens * 256)
    return replace(best, stages=max(2, min(best.stages, (SHARED.get(arch, 99 * 1024) - 2048) // stage)))


@cache
def architecture(index: int) -> str:
    """E.g. "sm_90"."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


@cache
def multiprocessors(index: int) -> int:
    """Of the device."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def product(
    x: torch.Tensor,
    weight: Nvfp4Weight | Fp8RowWeight | Fp8BlockWeight,
    partials: torch.Tensor,
    counters: torch.Tensor,
    out: torch.Tensor,
    activate: bool = False,
    config: Config | WgmmaConfig | None = None,
) -> None:
    """x @ weight.T, reading the weight once for every 64 rows; SwiGLU of the two halves with `activate`.

    Args:
        x: [M, K] bf16, rows contiguous and their stride a multiple of 8.
        weight: [N, K].
        partials, counters: of a workspace.
        out: [M, N] bf16 or fp32, [M, N / 2] bf16 with `activate`; rows contiguous, their stride free.
        config: other parameters than the tuned ones (for measuring).
    """
    m, (n, k) = x.shape[0], weight.shape
    index = torch.cuda.current_device() if x.device.index is None else x.device.index
    if isinstance(weight, Nvfp4Weight) and weight.order == "wgmma":
        assert config is None or isinstance(config, WgmmaConfig)
        _product_wgmma(x, weight, partials, counters, out, activate, config, index)
        return
    assert config is None or isinstance(config, Config)
    tokens = next((bm for bm in TOKENS if bm >= m), TOKENS[-1])
    token_blocks = -(-m // tokens)
    form = "nvfp4" if isinstance(weight, Nvfp4Weight) else "fp8"
    chosen = config or config_for(architecture(index), form, tokens, n, k)
    row_tiles = -(-n // 16)
    blocks = -(-row_tiles * 16 // chosen.rows)
    columns = -(-k // 128)
    pieces = blocks * -(-columns // (chosen.wk * chosen.kb))
    programs = min(pieces, chosen.per_sm * multiprocessors(index) or blocks)
    _check_workspace(partials, counters, token_blocks, programs, blocks, chosen.rows * tokens, n)
    shared = (out, out.stride(0), partials, counters, m, n, k)
    parameters: dict[str, Any] = {
        "BM": tokens,
        "WK": chosen.wk,
        "WN": chosen.wn,
        "RT": chosen.rt,
        "KB": chosen.kb,
        "STAGES": chosen.stages,
        "PDL": PDL,
        "launch_pdl": PDL,
        "num_warps": chosen.wk * chosen.wn,
    }
    grid = (token_blocks, programs)
    if isinstance(weight, Nvfp4Weight):
        nvfp4_skinny_kernel[grid](
            x,
            x.stride(0),
            weight.codes.view(torch.int32),
            weight.scales.view(torch.int32),
            weight.row_scales,
            *shared,
            row_tiles,
            EVEN=columns % (chosen.wk * chosen.kb) == 0,
            GATE_UP=weight.gate_up,
            ACTIVATE=activate,
            **parameters,
        )
        return
    if k % 16:
        raise ValueError(f"an FP8 weight needs a K that is a multiple of 16, not {k}")
    by_block = isinstance(weight, Fp8BlockWeight)
    fp8_skinny_kernel[grid](
        x,
        x.stride(0),
        weight.values.view(torch.int32),
        None if by_block else weight.scales,
        weight.scales if by_block else None,
        *shared,
        BLOCKS=by_block,
        **parameters,
    )


def _check_workspace(
    partials: torch.Tensor, counters: torch.Tensor, token_blocks: int, programs: int, blocks: int, tile: int, n: int
) -> None:
    needed = token_blocks * programs * 2 * tile
    if programs != blocks and (needed > partials.numel() or token_blocks * blocks > counters.numel()):
        raise ValueError(
            f"partial sums of {needed} elements in {blocks} blocks exceed the workspace ({partials.numel()},"
            f" {counters.numel()}): fewer programs for N = {n} are needed in tuned.json"
        )


def _product_wgmma(
    x: torch.Tensor,
    weight: Nvfp4Weight,
    partials: torch.Tensor,
    counters: torch.Tensor,
    out: torch.Tensor,
    activate: bool,
    config: WgmmaConfig | None,
    index: int,
) -> None:
    if architecture(index) != "sm_90":
        raise ValueError(
            f"weights in the order of wgmma need an sm_90 GPU, not {architecture(index)}: unset SPARKINFER_NVFP4_ORDER"
        )
    m, (n, k) = x.shape[0], weight.shape
    tokens = next((bm for bm in WGMMA_TOKENS if bm >= m), WGMMA_TOKENS[-1])
    token_blocks = -(-m // tokens)
    chosen = config or wgmma_config(tokens, n, k)
    blocks = -(-n // chosen.rows)
    pieces = blocks * -(-k // chosen.columns)
    programs = min(pieces, chosen.per_sm * multiprocessors(index) or blocks)
    _check_workspace(partials, counters, token_blocks, programs, blocks, chosen.rows * tokens, n)
    nvfp4_wgmma_kernel[(token_blocks, programs)](
        x,
        x.stride(0),
        weight.codes.view(torch.int32),
        weight.scales.view(torch.int32),
        weight.row_scales,
        out,
        out.stride(0),
        partials,
        counters,
        m,
        n,
        k,
        BM=tokens,
        WARPS=chosen.warps,
        RT=chosen.rt,
        COLUMNS=chosen.columns,
        STAGES=chosen.stages,
        GATE_UP=weight.gate_up,
        ACTIVATE=activate,
        PDL=PDL,
        launch_pdl=PDL,
        num_warps=chosen.warps,
    )
