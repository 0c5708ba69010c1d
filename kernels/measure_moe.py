"""Check and time the mixture of experts of `sparkinfer_kernels.moe` on a GPU, at the sizes of the 35B-A3B model.

`python kernels/measure_moe.py PART...`, parts: check, few, many, library and, on Hopper, parts: the products alone with
other parameters. With SPARKINFER_NVFP4_ORDER=mma in the environment all of it is about the kernels for other cards.
Weights are random; several layers, larger together than the second-level cache, are used in turn in a graph. Bytes are
those of the touched experts' stored weights, operations those of the pairs without padding; ceilings: 4.2 TB/s, 794
(bf16) TFLOP/s.
"""

# ruff: noqa: B023 - every closure of a loop runs within its turn
from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from sparkinfer_kernels.linear import layout
from sparkinfer_kernels.moe import gpu, items, items_workspace, library
from sparkinfer_kernels.moe.items_workspace import ItemWorkspace, Pipeline
from sparkinfer_kernels.moe.weights import plain

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 512, 256, 8
CONFIG = SimpleNamespace(num_experts=EXPERTS, experts_per_token=TOP_K, hidden_size=HIDDEN, moe_intermediate_size=INNER)
EXPERT_BYTES = 3 * HIDDEN * INNER * 9 // 16
DEVICE = torch.device("cuda")
WGMMA = layout.expert_order(DEVICE) == "wgmma"


def prefer_nvfp4(always: bool) -> None:
    """Whether passes of many tokens multiply NVFP4 experts as they are."""
    gpu.NVFP4_TOKENS = items.NVFP4_TOKENS = 1 << 20 if always else 0


class Parts:
    """A random NVFP4 matrix [N, K] whose values have about the deviation K**-0.5."""

    def __init__(self, n: int, k: int) -> None:
        self.packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(0x30, 0x48, (n, k // 16), dtype=torch.uint8, device="cuda")
        self.scales = scales.view(torch.float8_e4m3fn)
        self.global_scale = torch.tensor(0.25 * k**-0.5, device="cuda")


def layer(wide: str) -> tuple[gpu.MoeWeights, list[object]]:
    """Prepared weights, and what they were made of."""
    router = (torch.randn(EXPERTS + 1, HIDDEN, device="cuda") * HIDDEN**-0.5).to(torch.bfloat16)
    gate_up = [Parts(INNER, HIDDEN) for _ in range(2 * EXPERTS)]
    down = [Parts(HIDDEN, INNER) for _ in range(EXPERTS)]
    shared = [Parts(INNER, HIDDEN), Parts(INNER, HIDDEN)], [Parts(HIDDEN, INNER)]
    return gpu.prepare_moe(router, gate_up, down, *shared, TOP_K, wide), [router, gate_up, down, *shared]


TIE = 1e-4
"""Logits closer than this may be ordered either way: sums of 2048 products in fp32."""


def expected(x: torch.Tensor, given: list[object], taken: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """The block in fp64, and how many tokens' experts differ from fp64's by a tie.

    Args:
        x: [T, H].
        given: what `layer` returned.
        taken: [T, TOP_K] experts that the kernels chose, if known: they are used if within `TIE` of fp64's choice.
    """
    router, gate_up, down, shared_gate_up, shared_down = given
    assert isinstance(router, torch.Tensor)
    logits = x.double() @ router.double().t()
    chosen = logits[:, :-1].topk(TOP_K, -1).indices
    ties = 0
    if taken is not None:
        least, best = (logits.gather(1, which.long()).sort(-1).values for which in (taken, chosen))
        if not ((best - least).abs() < TIE).all():
            raise SystemExit("the router chose other experts than fp64 does")
        ties = int((taken.long().sort(-1).values != chosen.sort(-1).values).any(-1).sum())
        chosen = taken.long()
    share = torch.softmax(logits.gather(1, chosen), -1)

    def expert(rows: torch.Tensor, first: list[Parts], second: list[Parts]) -> torch.Tensor:
        gate, up = (rows.double() @ plain(first).double().t()).chunk(2, -1)
        return (F.silu(gate) * up) @ plain(second).double().t()

    total = torch.sigmoid(logits[:, -1:]) * expert(x, shared_gate_up, shared_down)  # type: ignore[arg-type]
    for index in chosen.unique().tolist():
        token, slot = (chosen == index).nonzero(as_tuple=True)
        y = expert(x[token], gate_up[2 * index : 2 * index + 2], down[index : index + 1])  # type: ignore[index]
        total.index_add_(0, token, y * share[token, slot].unsqueeze(1))
    return total, ties


def median_us(call: Callable[[int], object], turns: int, repeats: int = 9) -> float:
    """Microseconds of one call, `turns` of them in a graph, median of replays."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(turns):
            call(turn)
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / turns)
    return sorted(times)[repeats // 2]


def check() -> None:
    for wide in ("nvfp4", "bf16", "fp8"):
        weights, given = layer(wide)
        for tokens in (1, 3, 8, 9, 31, 32) if wide == "nvfp4" else ():
            one_check(tokens, weights, given, wide)
        for tokens in (33, 64, 300, 1000, 4000):
            one_check(tokens, weights, given, wide)


def one_check(tokens: int, weights: gpu.MoeWeights, given: list[object], wide: str) -> None:
    """Error against fp64, and equality of two runs; the output is poisoned before."""
    workspace = gpu.make_workspace(CONFIG, tokens, DEVICE)
    x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
    out = torch.full_like(x, float("nan"))
    prefer_nvfp4(wide == "nvfp4")
    gpu.moe(x, weights, workspace, out)
    again = gpu.moe(x, weights, workspace)
    taken = None
    if WGMMA or tokens > gpu.FEW_TOKENS:
        taken = workspace.chosen.view(-1, weights.slots)[:tokens, :TOP_K]
    right, ties = expected(x, given, taken)
    error = ((out.double() - right).norm() / right.norm()).item()
    limit = 0.08 if wide == "fp8" else 6e-3
    print(f"check {wide} T={tokens}: {error:.2e}, {ties} ties, equal again {torch.equal(out, again)}", flush=True)
    if not error < limit or not torch.equal(out, again):
        raise SystemExit(f"T = {tokens}, {wide}: error {error:.2e} beyond {limit}, or two runs differ")


def router(x: torch.Tensor, weights: gpu.MoeWeights, workspace: Any) -> None:
    """Shares and lists alone."""
    tokens = x.shape[0]
    if WGMMA:
        items.route(x, weights, workspace, *items.item_sizes(tokens, weights))
    elif tokens <= gpu.FEW_TOKENS:
        gpu.route_few(x, weights, workspace, tokens <= gpu.BY_TOKEN)
    else:
        bm = gpu.block_rows(tokens, TOP_K, EXPERTS)
        gpu.sort(x, weights, workspace, bm, gpu.max_blocks(tokens * weights.slots, EXPERTS + 1, bm))


def few() -> None:
    """Decoding: whole block, and its kernels one by one."""
    layers = [layer("nvfp4")[0] for _ in range(3)]
    workspace = gpu.make_workspace(CONFIG, 32, DEVICE)
    for tokens in (1, 4, 8, 16, 32):
        xs = [torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16) for _ in range(12)]
        out = torch.empty_like(xs[0])
        touched = sum(len((x @ layers[0].router[:-1].t()).topk(TOP_K).indices.unique()) for x in xs) / len(xs) + 1
        us = median_us(lambda turn: gpu.moe(xs[turn % 12], layers[turn % 3], workspace, out), 36)
        routed = median_us(lambda turn: router(xs[turn % 12], layers[turn % 3], workspace), 36)
        rate = touched * EXPERT_BYTES / us / 1e6
        print(
            f"few T={tokens}: {us:.1f} us, {touched:.0f} experts, {rate:.2f} TB/s; router alone {routed:.1f} us",
            flush=True,
        )
        for name in () if WGMMA else ("GATE_UP", "DOWN", "DOWN_SUM"):
            if name == ("DOWN" if tokens <= gpu.BY_TOKEN else "DOWN_SUM"):
                continue
            kept = getattr(gpu, name)
            for values in TRIED[name] if tokens in (1, 8, 32) else ():
                setattr(gpu, name, gpu.Pipeline(*values))
                us = median_us(lambda turn: gpu.moe(xs[turn % 12], layers[turn % 3], workspace, out), 36, 5)
                print(f"  {name} {values}: {us:.1f} us", flush=True)
            setattr(gpu, name, kept)


TRIED = {
    "GATE_UP": [(4, 1, 1, 1, 5, 4), (4, 1, 2, 1, 3, 4), (2, 2, 2, 1, 5, 3), (4, 1, 4, 1, 4, 2), (4, 1, 2, 2, 3, 2)],
    "DOWN": [(4, 1, 1, 1, 5, 4), (2, 2, 2, 1, 5, 3), (4, 1, 4, 1, 4, 2)],
    "DOWN_SUM": [(4, 1, 1, 1, 4, 1), (4, 1, 1, 1, 15, 1), (2, 1, 1, 2, 7, 1)],
}
"""Other parameters of the pipelines: wk, wn, rt, kb, stages, programs for each multiprocessor."""


def _build(job: tuple[str, int, bool, tuple[int, ...]]) -> None:
    """Compile the product with these parameters: there are no items."""
    items_workspace.FEWEST_ITEMS = 0
    wide, bm, gate_up, values = job
    table = items_workspace.GATE_UP if gate_up else items_workspace.DOWN
    table[wide, bm] = Pipeline(*values)
    one = torch.ones(1 << 20, device="cuda")
    n, k = (2 * INNER, HIDDEN) if gate_up else (HIDDEN, INNER)
    kind = {"nvfp4": torch.int32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[wide]
    stored = one.view(kind), one.view(torch.int32) if wide == "nvfp4" else None, None if wide == "bf16" else one
    matrices = SimpleNamespace(shape=(1, n, k), stored=lambda form: stored)
    weights = SimpleNamespace(gate_up=matrices, down=matrices, slots=TOP_K + 1)
    numbers = torch.zeros(1024, dtype=torch.int32, device="cuda")
    lists = SimpleNamespace(block_expert=numbers, pairs=numbers, items=numbers)
    x = torch.ones(64, k, device="cuda").to(torch.float8_e4m3fn if wide == "fp8" else torch.bfloat16)
    out = torch.ones(64, HIDDEN, device="cuda").to(torch.bfloat16)
    items._product(x, weights, lists, out, wide, bm, 4, gate_up, one if wide == "fp8" else None)  # type: ignore[arg-type]
    torch.cuda.synchronize()


def build_all(forms: list[tuple[str, int]]) -> None:
    """Compile all tried sets of parameters in several processes."""
    jobs = {
        (*form, gate_up, (*values[:4], 1))
        for form in forms
        for gate_up in (True, False)
        for values in [*ITEMS_TRIED[form], dataclasses.astuple(items_workspace.DOWN[form])]
    }  # fmt: skip
    with multiprocessing.get_context("spawn").Pool(min(15, os.cpu_count() or 1)) as pool:
        pool.map(_build, sorted(jobs), chunksize=1)


def parts(tokens: int, wide: str, layers: list[gpu.MoeWeights]) -> None:
    """The products alone with every tried set of parameters; lists and inputs are those of a whole block before."""
    workspace = gpu.make_workspace(CONFIG, tokens, DEVICE)
    x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
    prefer_nvfp4(wide == "nvfp4")
    assert isinstance(workspace, ItemWorkspace)
    items.pairs_output(x, layers[0], workspace)
    bm, most = items.item_sizes(tokens, layers[0])
    touched = len(workspace.block_expert[: int(workspace.items)].unique())
    width = {"nvfp4": 9 / 16, "bf16": 2.0, "fp8": 1.0}[wide]
    for gate_up, table, n, k in (
        (True, items_workspace.GATE_UP, 2 * INNER, HIDDEN),
        (False, items_workspace.DOWN, HIDDEN, INNER),
    ):
        source, target = (x, workspace.inner) if gate_up else (workspace.inner, workspace.y)
        scales = None
        if wide == "fp8":
            source, scales = source.to(torch.float8_e4m3fn), torch.ones(source.shape[0], device="cuda")
        kept, cells = table[wide, bm], []
        for values in ITEMS_TRIED[wide, bm]:
            table[wide, bm] = Pipeline(*values)
            us = median_us(
                lambda turn: items._product(
                    source, layers[turn % len(layers)], workspace, target, wide, bm, most, gate_up, scales
                ),
                12,
                5,
            )
            cells.append((us, values))
        table[wide, bm] = kept
        cells.sort()
        us, values = cells[0]
        print(
            f"{wide} T={tokens} BM {bm} {'gate_up' if gate_up else 'down'}: {us:.1f} us,"
            f" {touched * n * k * width / us / 1e6:.2f} TB/s, {tokens * 18 * n * k / us / 1e6:.0f} TFLOP/s {values}; "
            + ", ".join(f"{other:.1f} {tried}" for other, tried in cells[1:6]),
            flush=True,
        )


ITEMS_TRIED = {
    ("nvfp4", 8): [
        (4, 1, 128, 4, 6), (4, 1, 128, 4, 4), (4, 1, 128, 4, 3), (4, 2, 128, 4, 4), (4, 2, 128, 4, 3),
        (4, 2, 128, 4, 2), (4, 1, 256, 4, 4), (4, 1, 256, 2, 6), (4, 2, 128, 2, 6), (8, 1, 128, 4, 3),
        (4, 1, 256, 2, 4), (4, 1, 128, 2, 8), (4, 2, 256, 2, 3), (4, 2, 256, 4, 2), (4, 4, 128, 2, 3),
        (8, 1, 256, 2, 3),
    ],
    ("nvfp4", 16): [
        (4, 1, 128, 4, 4), (4, 2, 128, 4, 3), (4, 2, 128, 4, 2), (8, 1, 128, 4, 2), (8, 2, 128, 4, 1),
        (4, 1, 256, 2, 4), (4, 2, 256, 2, 2),
    ],
    ("nvfp4", 32): [(4, 2, 128, 4, 2), (4, 1, 128, 4, 3), (8, 1, 128, 4, 2), (4, 1, 256, 2, 3), (4, 2, 256, 2, 2)],
    ("nvfp4", 64): [(4, 2, 128, 4, 2), (8, 1, 128, 4, 2), (8, 1, 128, 2, 2), (8, 2, 128, 4, 1), (4, 1, 128, 4, 2)],
    ("nvfp4", 128): [(8, 1, 128, 4, 1), (8, 1, 128, 2, 2), (8, 2, 128, 4, 1), (8, 2, 128, 2, 1)],
    ("bf16", 16): [(4, 2, 64, 4, 3), (4, 2, 64, 4, 2), (4, 2, 128, 2, 3), (8, 1, 128, 4, 1), (8, 1, 64, 4, 2)],
    ("bf16", 64): [(4, 2, 64, 4, 2), (8, 1, 64, 4, 2), (8, 1, 128, 2, 2), (8, 2, 64, 4, 1)],
    ("bf16", 128): [(8, 1, 64, 3, 2), (8, 1, 64, 4, 1), (8, 1, 128, 2, 1), (8, 2, 64, 4, 1), (4, 2, 64, 2, 3)],
    ("fp8", 32): [(4, 2, 128, 4, 2), (8, 1, 128, 4, 2), (4, 1, 128, 4, 3), (4, 2, 256, 2, 2)],
    ("fp8", 64): [(4, 2, 128, 4, 2), (8, 1, 128, 4, 2), (8, 2, 128, 4, 1)],
    ("fp8", 128): [(8, 1, 128, 3, 2), (8, 1, 128, 2, 3), (8, 2, 128, 4, 1), (4, 2, 128, 2, 3)],
}  # fmt: skip
"""Parameters of the products by form and pairs of an item: warps, rt, columns, stages, programs a multiprocessor."""


def all_parts(forms: list[str]) -> None:
    """Products of few and of many tokens."""
    items_workspace.FEWEST_ITEMS = 0
    build_all([tried for tried in ITEMS_TRIED if tried[0] in forms])
    for wide, sizes in (
        ("nvfp4", (1, 8, 32, 128, 512, 1024, 2048, 4096)),
        ("bf16", (2048, 8192)),
        ("fp8", (512, 1024, 8192)),
    ):
        if wide not in forms:
            continue
        layers = [layer(wide)[0] for _ in range(3 if wide == "nvfp4" else 2)]
        for tokens in sizes:
            parts(tokens, wide, layers)


def many() -> None:
    """Prompts: whole block in each form."""
    for wide in ("nvfp4", "bf16", "fp8"):
        layers = [layer(wide)[0] for _ in range(2)]
        for tokens in (48, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
            workspace = gpu.make_workspace(CONFIG, tokens, DEVICE)
            x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
            out = torch.empty_like(x)
            prefer_nvfp4(wide == "nvfp4")
            us = median_us(lambda turn: gpu.moe(x, layers[turn % 2], workspace, out), 4, 5)
            sort = median_us(lambda turn: router(x, layers[turn % 2], workspace), 4, 5)
            rate = tokens * 9 * 6 * HIDDEN * INNER / us / 1e6
            print(
                f"many {wide} T={tokens}: {us:.0f} us, {rate:.0f} TFLOP/s, router and lists {sort:.0f} us", flush=True
            )


def compare_library() -> None:
    """torch's operations on bf16 experts."""
    weights = library.LibraryMoe(
        *(
            (torch.randn(*shape, device="cuda") * 0.03).to(torch.bfloat16)
            for shape in (
                (EXPERTS + 1, HIDDEN), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER), (2 * INNER, HIDDEN),
                (HIDDEN, INNER),
            )
        ),
        TOP_K,
    )  # fmt: skip
    for tokens in (1, 8, 32, 64, 256, 1024, 2048, 8192):
        x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
        us = median_us(lambda turn: library.moe(x, weights, None), 4, 5)
        print(f"library T={tokens}: {us:.0f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=("check", "few", "many", "library", "parts"))
    parser.add_argument("--forms", nargs="+", default=["nvfp4", "bf16", "fp8"], help="of `parts` (default: all)")
    options = parser.parse_args()
    given: dict[str, Callable[[], object]] = {"check": check, "few": few, "many": many, "library": compare_library}
    given["parts"] = lambda: all_parts(options.forms)
    torch.manual_seed(0)
    for part in options.parts:
        begin = time.monotonic()
        given[part]()
        print(f"{part}: {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
