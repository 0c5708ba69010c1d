"""Measure what bounds the kernels on this GPU: memory and matrix rates, library kernels, a kernel boundary's cost.

`python kernels/measure_ceilings.py [--only PART,...]` prints one table per part; figures are medians of repeated,
event-timed runs over random data. Each part stands alone: one that this torch lacks is named and the others go on.
"""

# ruff: noqa: B023 - every closure of a loop runs within its turn
from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

FP8 = torch.float8_e4m3fn
DEVICE = "cuda"
SHAPES = {
    "27B gate_up": (34816, 5120),
    "27B down": (5120, 17408),
    "27B gdn in": (16384, 5120),
    "27B gdn out": (5120, 6144),
    "27B attn in": (14336, 5120),
    "35B gdn in": (12288, 2048),
    "35B gdn out": (2048, 4096),
    "35B attn in": (9216, 2048),
}
"""Projections as (N, K)."""


def timed(run: Callable[[], object], repeats: int = 9) -> float:
    """Median milliseconds of one call."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """`run` as a CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def machine() -> None:
    """What is here."""
    p = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    print(f"{p.name}, {p.multi_processor_count} multiprocessors, L2 {p.L2_cache_size >> 20} MiB, free {free >> 20} MiB")
    print(f"of {total >> 20}; torch {torch.__version__}, triton {triton.__version__}", end="")
    print(f", cuDNN {torch.backends.cudnn.version()}")
    names = "starlette uvicorn httptools uvloop pydantic zmq msgspec prometheus_client jinja2 aiohttp psutil pyarrow"
    names += " safetensors tokenizers transformers ninja cupy flash_attn flashinfer cutlass aiperf vllm jsonschema"
    missing = [name for name in names.split() if importlib.util.find_spec(name) is None]
    print("packages missing of", names, ":", *missing)
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    print("host memory", memory["MemTotal"].strip(), "free", memory["MemAvailable"].strip())


def memory() -> None:
    """Copy, read and host transfers."""
    a = torch.empty(1 << 32, dtype=torch.uint8, device=DEVICE).random_()
    b = torch.empty_like(a)
    print(f"copy 4 GiB: {2 * a.numel() / timed(lambda: b.copy_(a)) / 1e9:.2f} TB/s read + written")
    words = a.view(torch.float32)
    out = torch.empty((), device=DEVICE)
    print(f"sum of 4 GiB: {a.numel() / timed(lambda: torch.sum(words, out=out, dim=None)) / 1e9:.2f} TB/s read")
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 28):
        start = time.perf_counter()
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        made = time.perf_counter() - start
        up, down = (
            timed(lambda: a[:size].copy_(host, non_blocking=True)),
            timed(lambda: host.copy_(a[:size], non_blocking=True)),
        )
        print(f"pinned {size >> 10:7d} KiB: H2D {up * 1e3:.1f}, D2H {down * 1e3:.1f} us, made in {made * 1e3:.1f} ms")


def matrix() -> None:
    """bf16 and FP8 products of the projections."""
    print(f"{'projection':14} {'M':>5} {'bf16':>6} {'row':>6} {'row,slow':>8} {'tensor':>7}  TFLOP/s; ms of row")
    for name, (n, k) in SHAPES.items():
        w = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16)
        w8 = w.to(FP8)
        for m in (64, 1024, 2048, 8192):
            x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
            x8 = x.to(FP8)
            sa, sb, one = (torch.ones(s, device=DEVICE) for s in ((m, 1), (1, n), ()))
            flops = 2e-9 * m * n * k
            cells = [timed(lambda: F.linear(x, w))]
            for scales, fast in (((sa, sb), True), ((sa, sb), False), ((one, one), True)):
                cells.append(
                    timed(lambda: torch._scaled_mm(x8, w8.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=fast))
                )
            rates = [flops / t for t in cells]
            print(f"{name:14} {m:5d} {rates[0]:6.0f} {rates[1]:6.0f} {rates[2]:8.0f} {rates[3]:7.0f}  {cells[1]:.3f}")


def head() -> None:
    """The output matrix at few rows."""
    for k in (5120, 2048):
        w = torch.randn(248320, k, device=DEVICE, dtype=torch.bfloat16)
        w8 = w.to(FP8)
        for m in (1, 4, 16, 32):
            x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
            rows = max(16, m)
            x8 = torch.randn(rows, k, device=DEVICE).to(FP8)
            sa, sb = torch.ones(rows, 1, device=DEVICE), torch.ones(1, 248320, device=DEVICE)
            t = timed(lambda: F.linear(x, w))
            t8 = timed(lambda: torch._scaled_mm(x8, w8.t(), sa, sb, out_dtype=torch.bfloat16, use_fast_accum=True))
            rate, rate8 = w.nbytes / t / 1e9, w8.nbytes / t8 / 1e9
            print(f"lm_head K {k} M {m}: bf16 {t:.3f} ms {rate:.2f} TB/s; fp8 {t8:.3f} ms {rate8:.2f} TB/s")


def grouped() -> None:
    """Grouped products of the routed experts."""
    print("experts 256, grouped product, TFLOP/s and TB/s of weights: rows per expert, (N, K)")
    for n, k in ((1024, 2048), (2048, 512)):
        w = torch.randn(256, n, k, device=DEVICE, dtype=torch.bfloat16)
        w8 = w.to(FP8)
        for rows in (32, 128, 256):
            m = 256 * rows
            x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
            x8 = x.to(FP8)
            offs = torch.arange(1, 257, device=DEVICE, dtype=torch.int32) * rows
            sa, sb = torch.ones(m, device=DEVICE), torch.ones(256, n, device=DEVICE)
            flops = 2e-9 * m * n * k
            t = timed(lambda: torch._grouped_mm(x, w.transpose(-1, -2), offs=offs))
            t8 = timed(
                lambda: torch._scaled_grouped_mm(
                    x8, w8.transpose(-1, -2), sa, sb, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True
                )
            )
            print(f"{rows:4d} {(n, k)}: bf16 {flops / t:.0f}, fp8 {flops / t8:.0f}; {t:.3f}, {t8:.3f} ms;", end=" ")
            print(f"{w8.nbytes / t8 / 1e9:.2f} TB/s")


def attention() -> None:
    """Causal attention of one sequence, head_dim 256."""
    for heads, kv in ((24, 4), (16, 2)):
        for s in (1024, 2048, 8192):
            q = torch.randn(1, heads, s, 256, device=DEVICE, dtype=torch.bfloat16)
            k, v = (torch.randn(1, kv, s, 256, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
            flops = 2 * 2e-9 * heads * s * s * 256 / 2
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
                try:
                    with sdpa_kernel(backend):
                        t = timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
                    print(f"attention {heads}/{kv} S {s} {backend.name}: {t:.3f} ms {flops / t:.0f} TFLOP/s")
                except RuntimeError as error:
                    print(f"attention {heads}/{kv} S {s} {backend.name}: {str(error)[:120]}")


@triton.jit
def _link(source, target, size, EARLY: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """target = source + 1 for one block of each program."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(source + at, mask=at < size)
    tl.store(target + at, x + 1.0, mask=at < size)
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()


def boundary() -> None:
    """A graph of dependent kernels: microseconds a kernel."""
    for programs in (1, 132, 1056):
        a = torch.zeros(programs * 1024, device=DEVICE)
        b = torch.zeros_like(a)
        cells = []
        for pdl, early in ((False, False), (True, False), (True, True)):

            def chain(pdl: bool = pdl, early: bool = early) -> None:
                for _ in range(250):
                    _link[(programs,)](a, b, a.numel(), early, pdl, BLOCK=1024, launch_pdl=pdl)
                    _link[(programs,)](b, a, a.numel(), early, pdl, BLOCK=1024, launch_pdl=pdl)

            a.zero_()
            replay = captured(chain)
            a.zero_()
            replay()
            right = bool((a == 500).all())
            cells.append(f"{timed(replay) * 2:.2f}{'' if right else ' WRONG'}")
        print(f"boundary, {programs} programs: plain, pdl late trigger, pdl early trigger: {', '.join(cells)} us")
    x = torch.zeros(64, device=DEVICE)
    start = time.perf_counter()
    for _ in range(1000):
        x.add_(1)
    host = (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        _link[(1,)](x, x, 64, False, False, BLOCK=1024)
    triton_host = (time.perf_counter() - start) * 5e3
    torch.cuda.synchronize()
    print(f"host: a torch operation {host:.1f} us, a Triton launch {triton_host:.1f} us")


def disk() -> None:
    """Sequential write and read of the working disk."""
    path = Path("measure_ceilings.tmp")
    data = torch.empty(1 << 30, dtype=torch.uint8).random_().numpy()
    start = time.perf_counter()
    path.write_bytes(data.data)
    wrote = time.perf_counter() - start
    start = time.perf_counter()
    size = len(path.read_bytes())
    print(f"disk: write {1 / wrote:.2f} GiB/s, read (cached) {size / 2**30 / (time.perf_counter() - start):.2f} GiB/s")
    path.unlink()


PARTS = (machine, boundary, matrix, grouped, attention, head, memory, disk)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(part.__name__ for part in PARTS), metavar="PART,...")
    wanted = parser.parse_args().only.split(",")
    torch.manual_seed(0)
    for part in PARTS:
        if part.__name__ in wanted:
            start = time.perf_counter()
            try:
                part()
            except (RuntimeError, AttributeError, TypeError) as error:
                print(f"{part.__name__}: {type(error).__name__}: {str(error)[:300]}")
            print(f"-- {part.__name__}: {time.perf_counter() - start:.1f} s")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
