"""Check and time the mixture of experts of `sparkinfer_kernels.moe` on a GPU, at the sizes of the 35B-A3B model.

`python kernels/measure_moe.py PART...`, parts: check, few, many, library. Weights are random; several layers, larger
together than the second-level cache, are used in turn in a graph. Bytes are those of the touched experts' stored
weights, operations those of the pairs without padding; ceilings: 4.2 TB/s, 794 (bf16) TFLOP/s.
"""

# ruff: noqa: B023 - every closure of a loop runs within its turn
from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from sparkinfer_kernels.moe import gpu, library
from sparkinfer_kernels.moe.weights import plain

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 512, 256, 8
CONFIG = SimpleNamespace(num_experts=EXPERTS, experts_per_token=TOP_K, hidden_size=HIDDEN, moe_intermediate_size=INNER)
EXPERT_BYTES = 3 * HIDDEN * INNER * 9 // 16
DEVICE = torch.device("cuda")


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
    gpu.NVFP4_TOKENS = 1 << 20 if wide == "nvfp4" else 0
    gpu.moe(x, weights, workspace, out)
    again = gpu.moe(x, weights, workspace)
    taken = None
    if tokens > gpu.FEW_TOKENS:
        taken = workspace.chosen.view(-1, weights.slots)[:tokens, :TOP_K]
    right, ties = expected(x, given, taken)
    error = ((out.double() - right).norm() / right.norm()).item()
    limit = 0.08 if wide == "fp8" else 6e-3
    print(f"check {wide} T={tokens}: {error:.2e}, {ties} ties, equal again {torch.equal(out, again)}", flush=True)
    if not error < limit or not torch.equal(out, again):
        raise SystemExit(f"T = {tokens}, {wide}: error {error:.2e} beyond {limit}, or two runs differ")


def few() -> None:
    """Decoding: whole block, and its kernels one by one."""
    layers = [layer("nvfp4")[0] for _ in range(3)]
    workspace = gpu.make_workspace(CONFIG, 32, DEVICE)
    for tokens in (1, 4, 8, 16, 32):
        xs = [torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16) for _ in range(12)]
        out = torch.empty_like(xs[0])
        touched = sum(len((x @ layers[0].router[:-1].t()).topk(TOP_K).indices.unique()) for x in xs) / len(xs) + 1
        us = median_us(lambda turn: gpu.moe(xs[turn % 12], layers[turn % 3], workspace, out), 36)
        routed = median_us(lambda turn: gpu.route_few(xs[turn % 12], layers[turn % 3], workspace, tokens <= 8), 36)
        rate = touched * EXPERT_BYTES / us / 1e6
        print(
            f"few T={tokens}: {us:.1f} us, {touched:.0f} experts, {rate:.2f} TB/s; router alone {routed:.1f} us",
            flush=True,
        )
        for name in ("GATE_UP", "DOWN", "DOWN_SUM"):
            if (name == "DOWN" and tokens <= 8) or (name == "DOWN_SUM" and tokens > 8):
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


def many() -> None:
    """Prompts: whole block in each form."""
    for wide in ("nvfp4", "bf16", "fp8"):
        layers = [layer(wide)[0] for _ in range(2)]
        for tokens in (48, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
            workspace = gpu.make_workspace(CONFIG, tokens, DEVICE)
            x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
            out = torch.empty_like(x)
            gpu.NVFP4_TOKENS = 1 << 20 if wide == "nvfp4" else 0
            us = median_us(lambda turn: gpu.moe(x, layers[turn % 2], workspace, out), 4, 5)
            bm = gpu.block_rows(tokens, TOP_K, EXPERTS)
            blocks = gpu.max_blocks(tokens * 9, EXPERTS + 1, bm)
            sort = median_us(lambda turn: gpu.sort(x, layers[turn % 2], workspace, bm, blocks), 4, 5)
            rate = tokens * 9 * 6 * HIDDEN * INNER / us / 1e6
            print(f"many {wide} T={tokens}: {us:.0f} us, {rate:.0f} TFLOP/s, sort {sort:.0f} us, BM {bm}", flush=True)


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
    parts = {"check": check, "few": few, "many": many, "library": compare_library}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=parts)
    torch.manual_seed(0)
    for part in parser.parse_args().parts:
        begin = time.monotonic()
        parts[part]()
        print(f"{part}: {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
