"""Time the Gated DeltaNet kernels on this GPU: one layer's time in a graph of many, each layer with its own state.

    python kernels/measure_gdn.py [decode] [prefill] [parts] [sweep]

SHARD=i/n compiles and times only every n-th variant of a sweep: n processes fill the compiler's cache for the one that
times. TUNING="sm_120" (say) takes that entry of `tuned.json` instead of the architecture's own.

Prints microseconds a layer, bytes moved over that time, and for prefill the operations of the chunked form.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from sparkinfer_kernels.causal_conv1d.gpu import causal_conv1d_prefill
from sparkinfer_kernels.gated_delta_rule import prefill_kernels as parts
from sparkinfer_kernels.gated_delta_rule.gpu import (
    HEAD_DIM,
    Checkpoints,
    Heads,
    Tuning,
    gdn_decode,
    gdn_prefill,
    make_decode_workspace,
    make_prefill_workspace,
    plan_prefill,
    tuning_for,
)
from sparkinfer_kernels.gated_delta_rule.tuned import Launch, tunings

MODELS = {"27B": Heads(16, 48), "35B": Heads(16, 32)}
EPS = 1e-6
REPEATS = 15


def graph_us(body: Callable[[], None], launches: int) -> float:
    """Median time of one of `launches` equal pieces of `body`, replayed as a graph, in microseconds."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    times = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times[2:])[(REPEATS - 2) // 2] * 1000 / launches


class Model:
    """Random weights of one layer, caches of several."""

    def __init__(self, heads: Heads, slots: int, layers: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        device, channels = "cuda", heads.channels
        self.heads, self.layers = heads, layers
        self.state = torch.randn(layers, slots + 1, heads.value, HEAD_DIM, HEAD_DIM, device=device).mul_(0.1).to(dtype)
        self.window = torch.randn(layers, slots + 1, 3, channels, device=device).bfloat16()
        self.weights = (
            torch.randn(4, channels, device=device) * 0.5,
            -torch.logspace(-3, 1, heads.value, device=device),
            torch.randn(heads.value, device=device),
            torch.ones(HEAD_DIM, device=device),
        )

    def proj(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, self.heads.row, device="cuda").bfloat16()


def decode_us(heads: Heads, rows: int, tuning: Tuning, dtype: torch.dtype = torch.float32, padding: int = 0) -> float:
    layers = 48 if rows <= 4 else 8
    model = Model(heads, rows, layers, dtype)
    projections = model.proj(rows + padding)
    slots = torch.cat([torch.randperm(rows), torch.full((padding,), rows)]).int().cuda()
    workspace = make_decode_workspace(rows + padding, heads.key, "cuda")
    out = torch.empty(rows + padding, heads.value * HEAD_DIM, dtype=torch.bfloat16, device="cuda")

    def body() -> None:
        for layer in range(layers):
            gdn_decode(
                projections, model.window[layer], model.state[layer], slots, *model.weights, EPS, out,
                workspace=workspace, tuning=tuning,
            )  # fmt: skip

    return graph_us(body, layers)


def measure_decode() -> None:
    default = chosen_tuning()
    print("decode: model rows state us TB/s")
    for name, heads in MODELS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for rows in (1, 4, 16, 32):
                us = decode_us(heads, rows, default, dtype)
                print(
                    f"{name} {rows:3d} {str(dtype)[6:]:9s} {us:8.2f} {state_bytes(heads, rows, dtype) / us / 1e6:6.2f}"
                )


def chosen_tuning() -> Tuning:
    """The entry that TUNING names, or the device's own."""
    name = os.environ.get("TUNING")
    return tunings()[name] if name else tuning_for(torch.device("cuda"))


def state_bytes(heads: Heads, rows: int, dtype: torch.dtype) -> int:
    """Bytes of state that a step reads and writes."""
    return rows * heads.value * HEAD_DIM * HEAD_DIM * dtype.itemsize * 2


def shard(variants: list[Launch]) -> list[Launch]:
    number, count = (int(x) for x in os.environ.get("SHARD", "0/1").split("/"))
    return variants[number::count]


def sweep_decode() -> None:
    default = tuning_for(torch.device("cuda"))
    variants = [Launch(4, block=128), Launch(4, block=64), Launch(2, block=64), Launch(4, block=128, maxnreg=255)]
    heads = MODELS["27B"]
    print("sweep decode 27B: variant, us at rows 1 4 16 32 fp32, 1 32 bf16; TB/s at 32 fp32")
    for launch in shard(variants):
        tuning = replace(default, decode=launch, decode_many=launch)
        times = [decode_us(heads, rows, tuning) for rows in (1, 4, 16, 32)]
        low = [decode_us(heads, rows, tuning, torch.bfloat16) for rows in (1, 32)]
        rate = state_bytes(heads, 32, torch.float32) / times[-1] / 1e6
        print(launch, " ".join(f"{us:.2f}" for us in times + low), f"{rate:.2f}", flush=True)


def sweep_prefill() -> None:
    default = tuning_for(torch.device("cuda"))
    pipelines = ((1, 2), (2, 1), (2, 2), (3, 1))
    sweeps = {
        "conv": [Launch(warps, block=block) for block in (4, 8, 16) for warps in (4, 8)],
        "transform": [Launch(4, maxnreg=168), Launch(4, maxnreg=128)],
        "output": [Launch(warps, stages, programs=n) for warps in (4, 8) for stages, n in pipelines],
        "scan": [Launch(4, stages, block) for block, stages in ((32, 3), (32, 4), (64, 3), (64, 4), (64, 5), (128, 3))],
    }
    long, many, short = (Pass(MODELS["27B"], *SHAPES[shape]) for shape in ("1x8192", "8x1024", "1x1024"))
    print("sweep prefill 27B: kernel, variant, us at 1x8192 8x1024 1x1024")
    for name, variants in sweeps.items():
        for launch in shard(variants):
            tuning = replace(default, **{name: launch})  # type: ignore[arg-type]
            times = [one.part_us(tuning, name)[name] for one in (long, many, short)]
            print(name, launch, " ".join(f"{us:.1f}" for us in times), flush=True)


class Pass:
    """A prefill pass of equal sequences."""

    def __init__(self, heads: Heads, lengths: list[int], tokens: int, sequences: int, checkpoints: int = 0) -> None:
        layers = 4
        self.model = model = Model(heads, len(lengths), layers)
        self.heads, self.sequences, self.tokens = heads, sequences, tokens
        empty = sequences - len(lengths)
        edges = torch.tensor([0, *lengths, *([0] * empty)]).cumsum(0)
        self.edges = edges.int().cuda()
        self.starts = torch.zeros(sequences, dtype=torch.int32, device="cuda")
        self.slots = torch.tensor([*range(len(lengths)), *([len(lengths)] * empty)]).int().cuda()
        self.proj = model.proj(tokens)
        self.out = torch.empty(tokens, heads.value * HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self.workspace = make_prefill_workspace(tokens, sequences, heads, "cuda")
        self.checkpoints = None
        if checkpoints:
            self.checkpoints = Checkpoints(
                torch.arange(checkpoints, device="cuda").int() % len(lengths),
                torch.full((checkpoints,), lengths[0] - 5, device="cuda").int(),
                torch.empty(checkpoints, *model.state.shape[2:], device="cuda"),
                torch.empty(checkpoints, *model.window.shape[2:], device="cuda").bfloat16(),
            )
        plan_prefill(self.workspace, self.edges, self.starts, tokens, self.checkpoints)

    def run(self, tuning: Tuning, layer: int) -> None:
        model = self.model
        gdn_prefill(
            self.proj, model.window[layer], model.state[layer], self.slots, self.edges, self.starts, *model.weights,
            EPS, self.out, workspace=self.workspace, checkpoints=self.checkpoints, tuning=tuning,
        )  # fmt: skip

    def us(self, tuning: Tuning) -> float:
        def body() -> None:
            for layer in range(4):
                self.run(tuning, layer)

        return graph_us(body, 4)

    def part_us(self, tuning: Tuning, only: str = "") -> dict[str, float]:
        """Time of each kernel, repeated on its own."""
        model, space, heads = self.model, self.workspace, self.heads
        window, state = model.window[0], model.state[0]
        conv, decay, bias, norm = model.weights
        where = (self.slots, self.edges, self.starts)
        bodies = {
            "plan": lambda: plan_prefill(space, self.edges, self.starts, self.tokens, self.checkpoints),
            "conv": lambda: causal_conv1d_prefill(
                self.proj, window, *where, conv, space, heads, self.checkpoints, tuning.conv
            ),
            "transform": lambda: parts.transform_chunks(
                self.proj, window, *where, decay, bias, space, heads, tuning.transform
            ),
            "scan": lambda: parts.scan_states(state, *where, space, heads, self.checkpoints, tuning.scan),
            "output": lambda: parts.write_outputs(
                self.proj, norm, EPS, self.out, space, heads, self.sequences, tuning.output
            ),
        }
        return {name: graph_us(eight(body), 8) for name, body in bodies.items() if only in name}


def eight(body: Callable[[], None]) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(8):
            body()

    return repeated


def operations(heads: Heads, tokens: int) -> float:
    """Of the chunked form: five products of 64 x 64 x 128 and three of 64 x 128 x 128 a chunk and value head."""
    return tokens / 64 * heads.value * 2 * (5 * 64 * 64 * 128 + 3 * 64 * 128 * 128)


SHAPES = {
    "1x8192": ([8192], 8192, 1),
    "1x1024": ([1024], 1024, 1),
    "8x1024": ([1024] * 8, 8192, 8),
    "8x1024/32": ([1024] * 8, 8192, 32),
    "1x1024/32": ([1024], 1024, 32),
    "8x128": ([128] * 8, 1024, 8),
    "1x128": ([128], 128, 1),
}


def measure_prefill(detailed: bool) -> None:
    tuning = chosen_tuning()
    print("prefill: model shape us TFLOP/s [us of each kernel]")
    for name, heads in MODELS.items():
        for shape, (lengths, tokens, sequences) in SHAPES.items():
            one = Pass(heads, lengths, tokens, sequences)
            us = one.us(tuning)
            line = f"{name} {shape:10s} {us:8.1f} {operations(heads, tokens) / us / 1e6:6.1f}"
            if detailed:
                line += "  " + " ".join(f"{part}={value:.1f}" for part, value in one.part_us(tuning).items())
            print(line)
            del one
    marked = Pass(MODELS["27B"], [1024] * 8, 8192, 8, 8)
    print(f"27B 8x1024 with 8 checkpoints {marked.us(tuning):8.1f}")


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["decode", "prefill"]
    if "decode" in wanted:
        measure_decode()
    if "sweep" in wanted:
        sweep_decode()
        sweep_prefill()
    if "prefill" in wanted or "parts" in wanted:
        measure_prefill("parts" in wanted)
