"""Check and time the attention and row kernels on a GPU: `python kernels/measure_attention.py [PART ...]`.

Every line shows a shape, the error against fp64 or fp32 torch, the median time of a graph replay and the rate reached.
Layers rotate through caches larger than the second-level cache, so that KV comes from memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from sparkinfer_kernels.attention import gpu as attention
from sparkinfer_kernels.attention.configs import TileConfig
from sparkinfer_kernels.moe.reference import swiglu
from sparkinfer_kernels.rms_norm import gpu as norm
from sparkinfer_kernels.rms_norm import reference as norm_reference
from sparkinfer_kernels.rotary import gpu as rotary
from sparkinfer_kernels.rotary import reference as rotary_reference

DEVICE = torch.device("cuda")
D = 256
SHAPES = {"27B": (24, 4), "35B": (16, 2), "tiny": (2, 1)}


def timed(calls: list[Callable[[], object]], repeat: int = 9) -> float:
    """Microseconds per call: median over replays of a graph that holds all `calls`."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return sorted(times)[len(times) // 2]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the Euclidean norm; infinite where a value is not finite."""
    got, expected = got.double(), expected.double()
    value = ((got - expected).norm() / expected.norm()).item()
    return value if value == value else float("inf")


def oracle(
    q: torch.Tensor, gate: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, chunk: int = 512
) -> torch.Tensor:
    """Gated causal attention of one sequence in fp32 (tf32 off): q, gate [L, Hq, D], k, v [C, Hkv, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    parts = []
    at = torch.arange(k.shape[0], device=k.device)
    for lo in range(0, q.shape[0], chunk):
        part = q[lo : lo + chunk].float()
        scores = torch.einsum("lhd,chd->hlc", part, k) * D**-0.5
        own = start + lo + torch.arange(part.shape[0], device=k.device)
        scores.masked_fill_(at > own[:, None], -torch.inf)
        parts.append(torch.einsum("hlc,chd->lhd", scores.softmax(-1), v))
    return torch.cat(parts) * torch.sigmoid(gate.float())


class Pool:
    """Caches of several layers with random contents and shuffled block tables."""

    def __init__(self, lengths: list[int], kv_heads: int, layers: int, dtype: torch.dtype) -> None:
        needed = [-(-length // 16) for length in lengths]
        blocks = sum(needed) + 1
        self.kv_scales = None
        self.kv = torch.randn(layers, 2, blocks, 16, kv_heads, D, device=DEVICE, dtype=torch.bfloat16)
        if dtype == torch.float8_e4m3fn:
            self.kv_scales = torch.rand(2, kv_heads, device=DEVICE) * 0.02 + 0.01
            scales = self.kv_scales.view(1, 2, 1, 1, kv_heads, 1)
            self.kv = (self.kv.float() / scales).clamp(-448, 448).to(dtype)
        order = torch.randperm(blocks - 1, device=DEVICE, dtype=torch.int32)
        self.table = torch.full((len(lengths), max(needed) + 3), 2**28, device=DEVICE, dtype=torch.int32)
        used = 0
        for row, count in enumerate(needed):
            self.table[row, :count] = order[used : used + count]
            used += count

    def tokens(self, layer: int, row: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a row's first tokens, as fp32 numbers."""
        at = torch.arange(count, device=DEVICE)
        place = self.table[row, at // 16].long() * 16 + at % 16
        pair = self.kv[layer].flatten(1, 2)[:, place].float()
        if self.kv_scales is not None:
            pair = pair * self.kv_scales[:, None, :, None]
        return pair[0], pair[1]


def queries(count: int, heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random queries and gates; the gates lie inside projection rows."""
    proj = torch.randn(count, 2 * (heads + kv_heads) * D, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(count, heads, D, device=DEVICE, dtype=torch.bfloat16)
    return q, rotary.gate_view(proj, heads, kv_heads, D)


def decode(
    model: str,
    lengths: list[int],
    layers: int,
    config: TileConfig | None = None,
    dtype: torch.dtype = torch.bfloat16,
    independent: bool = False,
) -> None:
    """Check and time decode rows of the given context lengths; `independent` as in `make_workspace`."""
    heads, kv_heads = SHAPES[model]
    n = len(lengths)
    pool = Pool(lengths, kv_heads, layers, dtype)
    q, gate = queries(n, heads, kv_heads)
    out = torch.full((n, heads, D), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    work = attention.make_workspace(
        n, 0, 0, heads, kv_heads, D, DEVICE, decode_config=config, fp8_cache=dtype == torch.float8_e4m3fn,
        independent=independent,
    )  # fmt: skip
    positions = torch.tensor(lengths, device=DEVICE, dtype=torch.int32) - 1
    attention.plan(work, positions)

    def call(layer: int) -> None:
        k_cache, v_cache = pool.kv[layer]
        attention.attention_decode(q, gate, k_cache, v_cache, pool.table, positions, D**-0.5, work, out, pool.kv_scales)

    call(0)
    first = out.clone()
    worst = 0.0
    for row, length in list(enumerate(lengths))[:12]:
        expected = oracle(q[row : row + 1], gate[row : row + 1], *pool.tokens(0, row, length), length - 1)
        worst = max(worst, error(out[row : row + 1], expected))
    same = True
    for _ in range(5):
        call(0)
        same &= torch.equal(first, out)
    us = timed([lambda layer=layer: call(layer) for layer in range(layers)])
    plan_us = timed([lambda: attention.plan(work, positions)] * 8)
    size = 2 * sum(lengths) * kv_heads * D * pool.kv.element_size()
    shape = f"{n} x {lengths[0]}" if len(set(lengths)) == 1 else f"{n} ragged, {sum(lengths)} tokens"
    used = work.decode_config
    print(
        f"decode {model} {shape} {str(dtype)[6:]}{' independent' if independent else ''} "
        f"tile {used.tokens} warps {used.warps} stages {used.stages} "
        f"programs {used.programs}: error {worst:.1e}{'' if same else ' NOT REPEATABLE'}, {us:.1f} us, "
        f"{size / us / 1e6:.2f} TB/s, plan {plan_us:.1f} us",
        flush=True,
    )


def prefill(
    model: str,
    spans: list[tuple[int, int]],
    config: TileConfig | None = None,
    dtype: torch.dtype = torch.bfloat16,
    padding: int = 0,
) -> None:
    """Check and time prompts given as (cached, new) tokens."""
    heads, kv_heads = SHAPES[model]
    lengths = [start + new for start, new in spans]
    pool = Pool(lengths, kv_heads, 2, dtype)
    total = sum(new for _, new in spans)
    q, gate = queries(total + padding, heads, kv_heads)
    out = torch.full((total + padding, heads, D), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    ends = torch.tensor([0] + [new for _, new in spans]).cumsum(0).to(DEVICE, torch.int32)
    starts = torch.tensor([start for start, _ in spans], device=DEVICE, dtype=torch.int32)
    work = attention.make_workspace(0, total + padding, len(spans), heads, kv_heads, D, DEVICE, prefill_config=config)
    attention.plan(work, cu_seqlens=ends, starts=starts)

    def call(layer: int) -> None:
        k_cache, v_cache = pool.kv[layer]
        attention.attention_prefill(
            q, gate, k_cache, v_cache, pool.table, ends, starts, D**-0.5, work, out, pool.kv_scales
        )

    call(0)
    worst = 0.0
    for row, (start, new) in enumerate(spans[:8]):
        if new:
            mine = slice(int(ends[row]), int(ends[row + 1]))
            expected = oracle(q[mine], gate[mine], *pool.tokens(0, row, start + new), start)
            worst = max(worst, error(out[mine], expected))
    if padding and not out[total:].isnan().all():
        raise SystemExit("padding was written")
    us = timed([lambda layer=layer: call(layer) for layer in (0, 1)], repeat=5)
    pairs = sum(start * new + new * (new + 1) / 2 for start, new in spans)
    used = work.prefill_config
    shape = " ".join(f"{start}+{new}" for start, new in spans[:3]) + (f" .. ({len(spans)})" if len(spans) > 3 else "")
    print(
        f"prefill {model} {shape} {str(dtype)[6:]} tile {used.rows}x{used.tokens} warps {used.warps} "
        f"stages {used.stages}: error {worst:.1e}, {us:.1f} us, {4 * pairs * heads * D / us / 1e6:.0f} TFLOP/s",
        flush=True,
    )


def sdpa(model: str, count: int) -> None:
    """torch's cuDNN and flash attention on one fresh prompt, keys shared by heads."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads, kv_heads = SHAPES[model]
    q = torch.randn(1, heads, count, D, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(1, kv_heads, count, D, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            call = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
            us = timed([call, call], repeat=5)
        rate = 2 * count * (count + 1) * heads * D / us / 1e6
        print(f"sdpa {backend.name} {model} {count}: {us:.1f} us, {rate:.0f} TFLOP/s", flush=True)


def fresh(model: str, count: int, padding: int = 0) -> None:
    """Check and time one fresh prompt through cuDNN and the gate kernel."""
    heads, kv_heads = SHAPES[model]
    proj = torch.randn(count + padding, 2 * (heads + kv_heads) * D, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(count + padding, heads, D, device=DEVICE, dtype=torch.bfloat16)
    k = torch.randn(count + padding, kv_heads, D, device=DEVICE, dtype=torch.bfloat16)
    gate, v = (view(proj, heads, kv_heads, D) for view in (rotary.gate_view, rotary.value_view))
    out = torch.full_like(q, torch.nan)
    call = lambda: attention.attention_prefill_fresh(q, k, v, gate, D**-0.5, out)  # noqa: E731
    call()
    worst = error(out[:count], oracle(q[:count], gate[:count], k[:count], v[:count], 0))
    us = timed([call, call], repeat=5)
    rate = 2 * count * (count + 1) * heads * D / us / 1e6
    print(f"fresh {model} {count}+{padding}: error {worst:.1e}, {us:.1f} us, {rate:.0f} TFLOP/s", flush=True)


def rows(model: str, hidden: int, inner: int, count: int) -> None:
    """Norm, SwiGLU and rotary kernels: error and rate."""
    heads, kv_heads = SHAPES[model]
    sets = max(1, min(8, 2**28 // (count * hidden * 2)))
    x = torch.randn(sets, count, hidden, device=DEVICE, dtype=torch.bfloat16)
    residual = torch.randn(sets, count, hidden, device=DEVICE, dtype=torch.bfloat16)
    weight1 = torch.rand(hidden, device=DEVICE) + 0.5
    out = torch.empty(count, hidden, device=DEVICE, dtype=torch.bfloat16)
    fp8 = torch.empty(count, hidden, device=DEVICE, dtype=torch.float8_e4m3fn), torch.empty(count, device=DEVICE)
    expected, kept = norm_reference.add_rms_norm(x[0], residual[0].clone(), weight1, 1e-6)
    mine = residual[0].clone()
    norm.add_rms_norm(x[0], mine, weight1, 1e-6, out=out, fp8=fp8)
    errors = error(out, expected), error(fp8[0].float() * fp8[1][:, None], expected)
    if not torch.equal(mine, kept):
        raise SystemExit("residual differs from the reference")
    us = timed([lambda i=i: norm.add_rms_norm(x[i], residual[i], weight1, 1e-6, out=out) for i in range(sets)])
    us8 = timed([lambda i=i: norm.add_rms_norm(x[i], residual[i], weight1, 1e-6, fp8=fp8) for i in range(sets)])
    size = count * hidden * 2
    print(
        f"add_rms_norm {count} x {hidden}: error {errors[0]:.1e} fp8 {errors[1]:.1e}, {us:.1f} us "
        f"{4 * size / us / 1e6:.2f} TB/s, fp8 {us8:.1f} us {3.5 * size / us8 / 1e6:.2f} TB/s",
        flush=True,
    )
    sets = max(1, min(4, 2**29 // (count * inner * 4)))
    gate_up = torch.randn(sets, count, 2 * inner, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty(count, inner, device=DEVICE, dtype=torch.bfloat16)
    fp8 = torch.empty(count, inner, device=DEVICE, dtype=torch.float8_e4m3fn), fp8[1]
    norm.swiglu(gate_up[0], out=out, fp8=fp8)
    expected = swiglu(gate_up[0])
    errors = error(out, expected), error(fp8[0].float() * fp8[1][:, None], expected)
    us = timed([lambda i=i: norm.swiglu(gate_up[i], out=out) for i in range(sets)])
    us8 = timed([lambda i=i: norm.swiglu(gate_up[i], fp8=fp8) for i in range(sets)])
    size = count * inner * 2
    print(
        f"swiglu {count} x {inner}: error {errors[0]:.1e} fp8 {errors[1]:.1e}, {us:.1f} us "
        f"{3 * size / us / 1e6:.2f} TB/s, fp8 {us8:.1f} us {2.5 * size / us8 / 1e6:.2f} TB/s",
        flush=True,
    )
    rotary_rows(model, count, heads, kv_heads)


def rotary_rows(model: str, count: int, heads: int, kv_heads: int) -> None:
    """The q/k norm, rotation and cache write of one layer."""
    proj = torch.randn(count, 2 * (heads + kv_heads) * D, device=DEVICE, dtype=torch.bfloat16)
    positions = torch.randint(0, 9000, (count,), device=DEVICE, dtype=torch.int32)
    places = torch.randperm(count + 100, device=DEVICE)[:count].to(torch.int32)
    kv = torch.zeros(2, (count + 115) // 16, 16, kv_heads, D, device=DEVICE, dtype=torch.bfloat16)
    norms = torch.rand(2, D, device=DEVICE) + 0.5
    table = rotary_reference.rotary_table(9000, 64, 1e7, DEVICE)
    q = torch.empty(count, heads, D, device=DEVICE, dtype=torch.bfloat16)
    call = lambda: rotary.qk_norm_rotary_write(proj, positions, places, norms[0], norms[1], table, *kv, 1e-6, q)  # noqa: E731
    call()
    cos, sin = table.index_select(0, positions).unsqueeze(2).unbind(1)
    weight = torch.cat([norms[0].expand(heads, -1), norms[1].expand(kv_heads, -1)])
    qk = proj[:, : (heads + kv_heads) * D].unflatten(-1, (-1, D))
    expected = rotary_reference.qk_norm_rotary(qk, weight, cos, sin, 1e-6)
    written = kv.flatten(1, 2)[:, places.long()]
    errors = error(q, expected[:, :heads]), error(written[0], expected[:, heads:])
    if not torch.equal(written[1], rotary.value_view(proj, heads, kv_heads, D)):
        raise SystemExit("values differ")
    us = timed([call] * 4)
    size = count * (2 * heads + 4 * kv_heads) * D * 2
    print(
        f"rotary {model} {count}: errors {errors[0]:.1e} {errors[1]:.1e}, {us:.1f} us {size / us / 1e6:.2f} TB/s",
        flush=True,
    )


RAGGED = [1, 2, 15, 16, 17, 100, 300, 1000, 5000, 1, 1, 64]
SWEEP = [TileConfig(64, 8, 3), TileConfig(64, 4, 3, programs=1), TileConfig(32, 4, 3), TileConfig(64, 8, 3, programs=1)]


def main(parts: list[str]) -> None:
    """Run the named parts: decode, sweep (tile sizes of decode), prefill, rows; without names decode, prefill, rows."""
    grid = [(1, 1200), (1, 8192), (4, 1200), (16, 1200), (32, 1200), (32, 8192)]
    for part in parts or ["decode", "prefill", "rows"]:
        for model, hidden, inner in (("27B", 5120, 17408), ("35B", 2048, 512)):
            if part == "decode":
                decode(model, RAGGED, 4)
                decode(model, RAGGED, 4, dtype=torch.float8_e4m3fn)
            if part in ("decode", "sweep"):
                for n, length in grid:
                    for config in SWEEP if part == "sweep" else [None]:
                        decode(model, [length] * n, max(2, min(16, 32 // n)), config)
            if part == "prefill":
                prefill(model, [(0, 17), (15, 1), (16, 100), (0, 0), (33, 16), (1000, 2), (0, 1000)], padding=9)
                for spans in ([(0, 1024)], [(0, 8192)], [(4096, 2048)], [(0, 1024)] * 8, [(8192, 64)], [(8192, 256)]):
                    prefill(model, spans)
                fresh(model, 1024, 16)
                fresh(model, 8192, 16)
            if part == "rows":
                for count in (1, 32, 1024, 8192):
                    rows(model, hidden, inner, count)


if __name__ == "__main__":
    main(sys.argv[1:])
