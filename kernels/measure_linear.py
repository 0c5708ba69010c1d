"""Check and time the projections of `sparkinfer_kernels.linear` on a GPU.

`python kernels/measure_linear.py [--out FOLDER] PART...`, parts: check, check_fp8, check_large, tune, table, large.
Weights are random and several copies of them, larger together than the second-level cache, are used in turn in a graph.
`tune` tries many launch parameters and writes those that won to FOLDER/tuned.json. With SPARKINFER_NVFP4_ORDER=wgmma in
the environment all of it is about the kernels for that order.
"""

# ruff: noqa: B023 - every closure of a loop runs within its turn
from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path

import torch
from sparkinfer_kernels.linear import dequantise, layout, skinny, weights
from sparkinfer_kernels.linear.gpu import (
    linear,
    linear_swiglu,
    make_workspace,
    prepare_nvfp4,
    quantise_rows,
)
from sparkinfer_kernels.linear.skinny import Config, WgmmaConfig

SHAPES = {
    "27B gate_up": (34816, 5120),
    "27B down": (5120, 17408),
    "27B gdn in": (16480, 5120),
    "27B gdn out": (5120, 6144),
    "27B attn in": (14336, 5120),
    "35B gdn in": (12352, 2048),
    "35B gdn out": (2048, 4096),
    "35B attn in": (9216, 2048),
}
"""Projections as (N, K)."""
ROWS = (1, 4, 8, 16, 32, 48, 64, 96, 128, 256)
WGMMA = layout.linear_order() == "wgmma"
TOKENS = skinny.WGMMA_TOKENS if WGMMA else skinny.TOKENS
TUNED_ROWS = (1, *TOKENS[1:])


class Parts:
    """A random NVFP4 matrix."""

    def __init__(self, n: int, k: int, factor: float = 2e-4) -> None:
        self.packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        self.scales = torch.randint(0x30, 0x70, (n, k // 16), dtype=torch.uint8, device="cuda").view(weights.FP8)
        self.global_scale = torch.tensor(factor, device="cuda")

    def plain(self) -> torch.Tensor:
        """[N, K] fp32."""
        table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")
        table = torch.cat([table, -table])
        codes = torch.stack([self.packed & 15, self.packed >> 4], -1).flatten(-2)
        rows = table[codes.int()].unflatten(-1, (-1, 16)) * self.scales.float().unsqueeze(-1)
        return rows.flatten(-2) * self.global_scale


def graph_time(run: Callable[[int], object], calls: int, replays: int = 4) -> float:
    """Microseconds per call of `run(0) ... run(calls - 1)` as one CUDA graph, the least of several replays."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            run(index)
    times = []
    for _ in range(replays):
        begin, end = (
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(enable_timing=True),
        )
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return min(times[1:])


def weight_bytes(n: int, k: int) -> int:
    """Stored bytes of an NVFP4 matrix."""
    return n * k // 2 + n * k // 16


def copies(n: int, k: int) -> list[weights.Nvfp4Weight]:
    """The same weight several times, past the second-level cache."""
    one = prepare_nvfp4([Parts(n, k)])
    count = max(2, -(-300_000_000 // weight_bytes(n, k)))
    more = [replace(one, codes=one.codes.clone(), scales=one.scales.clone()) for _ in range(count - 1)]
    return [one, *more]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference by the norm of the expected."""
    return ((got.double() - expected).norm() / expected.norm()).item()


def check() -> None:
    """Against fp64, for ragged shapes and many parameters."""
    build_all()
    worst = 0.0
    for (n, k), m in itertools.product(
        [(48, 208), (1544, 256), (2064, 640), (5120, 6144)],
        (1, 8, 15, 32, 64, 150),
    ):
        parts = Parts(n, k)
        weight = prepare_nvfp4([parts])
        workspace = make_workspace([weight], 150)
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        expected = x.double() @ parts.plain().double().T
        tokens = next((bm for bm in TOKENS if bm >= m), TOKENS[-1])
        for config in itertools.chain(*((replace(one, per_sm=0), one) for one in kernels(tokens)[::2])):
            if not WGMMA and -(-k // 128) < config.kb:
                continue
            out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
            skinny.product(x, weight, workspace.partials, workspace.counters, out, config=config)
            off = error(out, expected)
            worst = max(worst, off)
            if not off < 4e-3:
                print(f"WRONG {n} x {k}, M {m}, {config}: {off:.2e}")
    print(f"check: worst relative error {worst:.2e} (bf16 output)")


TRIED = {
    8: "14214 14223 14413 24213 18214 18223 42213 41214 22214 12414",
    16: "14214 14223 14413 24213 18214 18222 18413 22214 18114",
    32: "14214 14414 18213 18414 1g214 1g113 24213 18114",
    64: "18114 18213 1g113 14213 14114 1g213",
}
"""(WK, WN, RT, KB, stages), a digit each (g: 16), by token columns."""


WGMMA_TRIED = {
    8: "4123 4214 4223 4116 8114 8123 8214 8222 4413",
    16: "4123 4214 4223 8114 8123 8214 8222",
    32: "4115 4214 8114 8123 8213 8214 4413",
    64: "4114 4214 8114 8213 8214 8412",
    128: "4113 4213 8113 8114 8213 8214",
}
"""(warps, RT, columns / 128, stages)."""


def kernels(tokens: int) -> list[Config | WgmmaConfig]:
    """Those of the kernel that the order of the weights takes, one program a multiprocessor."""
    words = (WGMMA_TRIED if WGMMA else TRIED)[tokens].split()
    values = [tuple(int(digit, 17) for digit in word) for word in words]
    if not WGMMA:
        return [Config(*one, 1) for one in values]
    return [WgmmaConfig(warps, rt, columns * 128, stages, 1) for warps, rt, columns, stages in values]


def candidates(tokens: int) -> list[Config | WgmmaConfig]:
    """Launch parameters worth trying: as many programs a multiprocessor as fit, and fewer."""
    found: list[Config | WgmmaConfig] = []
    for one in kernels(tokens):
        if isinstance(one, WgmmaConfig):
            size, warps = one.shared(tokens), one.warps
        else:
            size, warps = one.stages * one.wk * one.kb * (one.rows * 72 + tokens * 256), one.wk * one.wn
        fit = min(227 * 1024 // (size + 1024), (32 if WGMMA else 48) // warps, 6)
        found += [replace(one, per_sm=per_sm) for per_sm in {fit, max(1, fit * 2 // 3), max(1, fit // 2)} if fit]
    return found


def _build(job: tuple[int, Sequence[Config | WgmmaConfig]]) -> None:
    tokens, configs = job
    for k in (8192,) if WGMMA else (8192, 8320):
        weight = prepare_nvfp4([Parts(1024, k)])
        workspace = make_workspace([weight], 64)
        x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(tokens, 1024, device="cuda", dtype=torch.bfloat16)
        for config in configs:
            skinny.product(x, weight, workspace.partials, workspace.counters, out, config=config)
    torch.cuda.synchronize()


def build_all() -> None:
    """Compile every kernel that will be checked or timed, in several processes."""
    jobs = []
    for tokens in TOKENS:
        every = {replace(config, per_sm=1) for config in candidates(tokens)}
        ordered = sorted(every, key=str)
        jobs += [(tokens, ordered[start::4]) for start in range(4)]
    with multiprocessing.get_context("spawn").Pool(min(15, os.cpu_count() or 1)) as pool:
        pool.map(_build, jobs, chunksize=1)


def tune(out: Path) -> None:
    """Time all candidates, print the winners and write them to tuned.json."""
    start = time.perf_counter()
    build_all()
    print(f"built in {time.perf_counter() - start:.1f} s", flush=True)
    chosen: dict[str, list[list[int]]] = {}
    every = []
    for name, (n, k) in SHAPES.items():
        stack = copies(n, k)
        workspace = make_workspace(stack[:1], 64)
        for m in TUNED_ROWS:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            tokens = next(bm for bm in TOKENS if bm >= m)
            results = []
            for config in candidates(tokens):

                def run(index: int, config: Config | WgmmaConfig = config) -> None:
                    weight = stack[index % len(stack)]
                    skinny.product(
                        x,
                        weight,
                        workspace.partials,
                        workspace.counters,
                        y,
                        config=config,
                    )

                results.append((graph_time(run, 2 * len(stack)), config))
            results.sort(key=lambda one: one[0])
            every += [[name, m, round(us, 2), *_values(config)] for us, config in results]
            us, config = results[0]
            rate = weight_bytes(n, k) / us / 1e6
            second = f"{results[1][0]:.1f} {_values(results[1][1])}" if len(results) > 1 else ""
            line = f"{name:12} M {m:2}: {us:6.1f} us {rate:.2f} TB/s {_values(config)}"
            print(f"{line}; then {second}", flush=True)
            chosen.setdefault(str(tokens), []).append([n, k, *_values(config)])
    (out / "tuned.json").write_text(json.dumps({skinny.architecture(0): {"nvfp4_wgmma" if WGMMA else "nvfp4": chosen}}))
    (out / "every.json").write_text(json.dumps(every))


def _values(config: Config | WgmmaConfig) -> list[int]:
    return list(astuple(config))


def table() -> None:
    """The tuned parameters at every number of rows; beyond `ops.SLICED_ROWS` dequantised first."""
    for name, (n, k) in SHAPES.items():
        stack = copies(n, k)
        workspace = make_workspace(stack[:1], max(ROWS))
        cells = []
        for m in ROWS:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            us = graph_time(lambda i: linear(x, stack[i % len(stack)], workspace, y), 4 * len(stack))
            cells.append(f"{us:6.1f} {weight_bytes(n, k) / us / 1e6:.2f}")
        print(f"{name:12} us, TB/s at M = {ROWS}: " + " | ".join(cells), flush=True)


def large() -> None:
    """Many rows: exact and FP8."""
    for name, (n, k) in SHAPES.items():
        parts = Parts(n, k)
        exact, fast = prepare_nvfp4([parts]), prepare_nvfp4([parts], fp8=True)
        workspace = make_workspace([exact, fast], 8192)
        plain = torch.empty(n, k, device="cuda", dtype=torch.bfloat16)
        us = graph_time(lambda i: dequantise.nvfp4_to_bf16(exact, plain), 4)
        moved = weight_bytes(n, k) + 2 * n * k
        off = error(plain, parts.plain().double())
        line = f"{name:12} dequantise {us:5.0f} us {moved / us / 1e6:.2f} TB/s, error {off:.1e};"
        for m in (128, 256, 1024, 8192):
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            x8, scale = (
                torch.empty(m, k, device="cuda", dtype=weights.FP8),
                torch.empty(m, device="cuda"),
            )
            row_us = graph_time(lambda i: quantise_rows(x, x8, scale), 4)
            a = graph_time(lambda i: linear(x, exact, workspace, y), 4)
            b = graph_time(lambda i: linear(x, fast, workspace, y, x8, scale), 4)
            flops = 2e-6 * m * n * k
            line += f" M {m}: exact {flops / a:.0f}, fp8 {flops / b:.0f} TFLOP/s (quantise {row_us:.0f} us);"
        print(line, flush=True)


def check_large() -> None:
    """Exact and FP8 products and SwiGLU against fp64."""
    for n, k, m in [(1536, 512, 65), (1552, 272, 1000), (2048, 1024, 333)]:
        one, two = Parts(n // 2, k), Parts(n // 2, k, 3e-4)
        plain = torch.cat([one.plain(), two.plain()]).double()
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        expected = x.double() @ plain.T
        gate, up = expected.chunk(2, 1)
        for fp8 in (False, True):
            weight = prepare_nvfp4([one, two], fp8=fp8)
            both = prepare_nvfp4([one, two], gate_up=True, fp8=fp8)
            workspace = make_workspace([weight, both], m)
            off = [
                error(linear(x, weight, workspace), expected),
                error(linear(x, both, workspace), expected),
            ]
            off.append(
                error(
                    linear_swiglu(x, both, workspace),
                    torch.nn.functional.silu(gate) * up,
                )
            )
            off += [
                error(linear(x[:20], both, workspace), expected[:20]),
                error(
                    linear_swiglu(x[:20], both, workspace),
                    (torch.nn.functional.silu(gate) * up)[:20],
                ),
            ]
            print(f"{n} x {k}, M {m}, fp8 {fp8}: errors", *(f"{one:.1e}" for one in off))
    packed = Parts(64, 256)
    assert torch.equal(
        layout.unpack_codes(layout.pack_codes(packed.packed))[:, 0],
        packed.packed[:, 0] & 15,
    )


def check_fp8() -> None:
    """FP8 weights with row and block scales at few rows against fp64, and their rate on an output matrix."""
    for n, k, m in [(1000, 272, 1), (5120, 6144, 5), (2048, 1024, 33)]:
        values = torch.randn(n, k, device="cuda").to(weights.FP8)
        scales = torch.rand(-(-n // 128), -(-k // 128), device="cuda") + 0.5
        block = weights.prepare_fp8_block([(values, scales)])
        row = weights.Fp8RowWeight(values, torch.rand(n, device="cuda") + 0.5)
        workspace = make_workspace([block, row], m)
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        full = scales.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k] * values.double()
        off = [error(linear(x, block, workspace), x.double() @ full.T)]
        off.append(error(linear(x, row, workspace), x.double() @ (values.double() * row.scales.double()[:, None]).T))
        print(f"fp8 {n} x {k}, M {m}: errors", *(f"{one:.1e}" for one in off), flush=True)
    n = 248320
    for k, m in itertools.product((5120, 2048), (1, 32)):
        row = weights.Fp8RowWeight(torch.randn(n, k, device="cuda").to(weights.FP8), torch.rand(n, device="cuda"))
        workspace = make_workspace([row], m)
        x, y = (torch.randn(m, size, device="cuda", dtype=torch.bfloat16) for size in (k, n))
        for values in [
            (1, 8, 1, 1, 4, 1),
            (1, 8, 2, 1, 3, 1),
            (1, 8, 2, 1, 4, 1),
            (1, 8, 4, 1, 2, 1),
            (1, 4, 2, 1, 3, 2),
        ]:
            config = Config(*values)

            def run(index: int, config: Config = config) -> None:
                skinny.product(x, row, workspace.partials, workspace.counters, y, config=config)

            us = graph_time(run, 3)
            print(f"fp8 head K {k} M {m}: {us:.0f} us {n * k / us / 1e6:.2f} TB/s {values}", flush=True)


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=["check", "check_fp8", "check_large", "tune", "table", "large"])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("JOB_OUT", ".")))
    options = parser.parse_args()
    for part in options.parts:
        start = time.perf_counter()
        if part == "tune":
            tune(options.out)
        else:
            {
                "check": check,
                "check_fp8": check_fp8,
                "check_large": check_large,
                "table": table,
                "large": large,
            }[part]()
        print(f"-- {part}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
