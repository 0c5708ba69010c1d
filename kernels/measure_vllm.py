"""Time vLLM 0.30's kernels alone, each beside ours, where vLLM's can be called without its engine.

`python kernels/measure_vllm.py [PART ...]` where vLLM for CUDA is installed, with `kernels` on PYTHONPATH; parts:
linear, experts, attention, gdn, scan. The kernels are those that vLLM's log names for these models on an H200 (Marlin
for NVFP4 projections and experts, FlashAttention 3, FlashInfer's scan, its own recurrent step). Random weights, several
copies in turn, larger together than the second-level cache, in a CUDA graph; microseconds a call. Where the two do
not cover the same work the line says what each has in it. Marlin's results are compared with fp64 first.
"""

# ruff: noqa: B023 - every closure of a loop runs within its turn
from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parent))

import measure_gdn
import measure_linear
import measure_moe
from measure_attention import SHAPES as HEADS
from measure_attention import D, Pool, queries, timed
from measure_linear import SHAPES, Parts, copies, weight_bytes
from sparkinfer_kernels.attention import gpu as attention
from sparkinfer_kernels.linear.gpu import linear, make_workspace

BF16 = torch.bfloat16
DEVICE = torch.device("cuda")
PAGE = 1056
"""Tokens of a KV page that vLLM chooses for 35B-A3B (its log)."""


def marlin(parts: Parts, n: int, k: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """vLLM's product with an NVFP4 matrix [N, K]."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as fp4

    layer = SimpleNamespace(
        weight=parts.packed, weight_scale=parts.scales, weight_global_scale=parts.global_scale,
        output_size_per_partition=n, input_size_per_partition=k, params_dtype=BF16,
    )  # fmt: skip
    fp4.prepare_fp4_layer_for_marlin(layer)

    def run(x: torch.Tensor) -> torch.Tensor:
        return fp4.apply_fp4_marlin_linear(
            x, layer.weight, layer.weight_scale, layer.weight_global_scale, layer.workspace, n, k
        )

    return run


def measure_projections() -> None:
    """Marlin against ours: the NVFP4 kernel up to 64 rows, cuBLAS on the bf16 copy above."""
    for name, (n, k) in SHAPES.items():
        parts = Parts(n, k)
        stack = copies(n, k)
        theirs = [marlin(parts if i == 0 else Parts(n, k), n, k) for i in range(len(stack))]
        plain = parts.plain()
        workspace = make_workspace(stack[:1], 64)
        cells = []
        for m in (1, 4, 16, 32, 64, 1024, 8192):
            x, y = torch.randn(m, k, device=DEVICE, dtype=BF16), torch.empty(m, n, device=DEVICE, dtype=BF16)
            if m == 16:
                off = measure_linear.error(theirs[0](x), x.double() @ plain.double().t())
                assert off < 1e-2, f"Marlin's result is off by {off:.1e}: it was not called as it should be"
            turns = 2 * len(stack) if m <= 64 else 4
            its = timed([lambda i=i, x=x: theirs[i % len(stack)](x) for i in range(turns)])
            if m <= 64:
                mine = timed(
                    [lambda i=i, x=x, y=y: linear(x, stack[i % len(stack)], workspace, y) for i in range(turns)]
                )
                rates = [f"{weight_bytes(n, k) / us / 1e6:.2f}" for us in (its, mine)]
            else:
                copy = plain.to(BF16)
                mine = timed([lambda x=x, y=y, copy=copy: torch.mm(x, copy.t(), out=y)] * 4)
                rates = [f"{2e-6 * m * n * k / us:.0f}" for us in (its, mine)]
            cells.append(f"M {m}: {its:.1f} / {mine:.1f} us, {' / '.join(rates)}")
        print(f"linear {name} vLLM / ours (TB/s to 64 rows, TFLOP/s above): " + "; ".join(cells), flush=True)
        torch.cuda.empty_cache()


def marlin_experts() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """vLLM's routed experts of one layer: call with x [T, H], shares [T, 8] fp32, experts [T, 8] int32."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as fp4
    from vllm.scalar_type import scalar_types

    hidden, inner, experts = measure_moe.HIDDEN, measure_moe.INNER, measure_moe.EXPERTS

    def matrices(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        packed = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device=DEVICE)
        scales = torch.randint(0x30, 0x48, (experts, n, k // 16), dtype=torch.uint8, device=DEVICE)
        return packed, scales.view(torch.float8_e4m3fn), torch.full((experts,), 0.25 * k**-0.5, device=DEVICE)

    layer = SimpleNamespace(
        num_experts=experts, hidden_size=hidden, intermediate_size_per_partition=inner, params_dtype=BF16
    )
    first, second = matrices(2 * inner, hidden), matrices(hidden, inner)
    w13, s13, g13, w2, s2, g2 = fp4.prepare_nvfp4_moe_layer_for_marlin(layer, *first, *second, True)  # type: ignore[arg-type]

    def run(x: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return fused_marlin_moe(
            x, w13, w2, None, None, s13, s2, shares, chosen, scalar_types.float4_e2m1f.id,
            global_num_experts=experts, global_scale1=g13, global_scale2=g2, workspace=layer.workspace,
        )  # fmt: skip

    return run


def measure_experts() -> None:
    """Routed experts by Marlin (choice given) against our whole block: router, list, routed and shared expert, sum."""
    layers = [marlin_experts() for _ in range(3)]
    mine = [measure_moe.layer("bf16")[0] for _ in range(3)]
    for tokens in (1, 4, 8, 16, 32, 128, 1024, 2048, 4096, 8192):
        turns = 36 if tokens <= 128 else 6
        xs = [torch.randn(tokens, measure_moe.HIDDEN, device=DEVICE).to(BF16) for _ in range(turns)]
        routes = []
        for x, ours in zip(xs, mine * turns, strict=False):
            best = (x @ ours.router[:-1].t()).float().topk(measure_moe.TOP_K)
            routes.append((torch.softmax(best.values, -1), best.indices.int()))
        its = timed([lambda i=i: layers[i % 3](xs[i], *routes[i]) for i in range(turns)])
        workspace, out = measure_moe.gpu.make_workspace(measure_moe.CONFIG, tokens, DEVICE), torch.empty_like(xs[0])
        ours_us = timed([lambda i=i: measure_moe.gpu.moe(xs[i], mine[i % 3], workspace, out) for i in range(turns)])
        router = timed([lambda i=i: measure_moe.router(xs[i], mine[i % 3], workspace) for i in range(turns)])
        print(
            f"experts T {tokens}: vLLM routed {its:.1f} us, ours {ours_us:.1f} with router and list ({router:.1f}) and "
            "shared expert",
            flush=True,
        )
        torch.cuda.empty_cache()


def flash(heads: int, kv_heads: int, spans: list[tuple[int, int]], layers: int) -> float:
    """Microseconds of FlashAttention 3 for (cached, new) tokens on pages of `PAGE`."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    lengths = [start + new for start, new in spans]
    pages = [math.ceil(length / PAGE) for length in lengths]
    cache = torch.randn(layers, 2, sum(pages), PAGE, kv_heads, D, device=DEVICE, dtype=BF16)
    table = torch.zeros(len(spans), max(pages), dtype=torch.int32, device=DEVICE)
    used = 0
    for row, count in enumerate(pages):
        table[row, :count] = torch.arange(used, used + count)
        used += count
    total = sum(new for _, new in spans)
    q = torch.randn(total, heads, D, device=DEVICE, dtype=BF16)
    ends = torch.tensor([0] + [new for _, new in spans]).cumsum(0).to(DEVICE, torch.int32)
    have = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(q)

    def call(layer: int) -> None:
        flash_attn_varlen_func(
            q, cache[layer, 0], cache[layer, 1], max(new for _, new in spans), ends, max(lengths), seqused_k=have,
            softmax_scale=D**-0.5, causal=True, block_table=table, out=out, fa_version=3,
        )  # fmt: skip

    return timed([lambda layer=layer: call(layer) for layer in range(layers)], repeat=5)


def ours(heads: int, kv_heads: int, spans: list[tuple[int, int]], layers: int) -> float:
    """Microseconds of our attention, its sigmoid gate included."""
    decode = all(new == 1 for _, new in spans)
    pool = Pool([start + new for start, new in spans], kv_heads, layers, BF16)
    total = sum(new for _, new in spans)
    q, gate = queries(total, heads, kv_heads)
    out = torch.empty_like(q)
    starts = torch.tensor([start for start, _ in spans], device=DEVICE, dtype=torch.int32)
    ends = torch.tensor([0] + [new for _, new in spans]).cumsum(0).to(DEVICE, torch.int32)
    rows = (total, 0, 0) if decode else (0, total, len(spans))
    work = attention.make_workspace(*rows, heads, kv_heads, D, DEVICE)
    if decode:
        attention.plan(work, starts)
    else:
        attention.plan(work, cu_seqlens=ends, starts=starts)

    def call(layer: int) -> None:
        if decode:
            attention.attention_decode(q, gate, *pool.kv[layer], pool.table, starts, D**-0.5, work, out, None)
        else:
            attention.attention_prefill(q, gate, *pool.kv[layer], pool.table, ends, starts, D**-0.5, work, out, None)

    return timed([lambda layer=layer: call(layer) for layer in range(layers)], repeat=5)


def measure_attention_kernels() -> None:
    """FlashAttention 3 (without the gate) against ours (with it)."""
    cases = {
        "decode 1 x 1k": [(1023, 1)],
        "decode 16 x 1k": [(1023, 1)] * 16,
        "decode 32 x 1k": [(1023, 1)] * 32,
        "decode 1 x 8k": [(8191, 1)],
        "decode 32 x 8k": [(8191, 1)] * 32,
        "prefill 1024": [(0, 1024)],
        "prefill 8 x 1024": [(0, 1024)] * 8,
        "prefill 8192": [(0, 8192)],
        "prefill 1024 behind 7168": [(7168, 1024)],
    }
    for model in ("27B", "35B"):
        heads, kv_heads = HEADS[model]
        for name, spans in cases.items():
            layers = 8 if spans[0][1] == 1 else 2
            its, mine = flash(heads, kv_heads, spans, layers), ours(heads, kv_heads, spans, layers)
            print(f"attention {model} {name}: vLLM {its:.1f} us, ours {mine:.1f}", flush=True)
            torch.cuda.empty_cache()


def recurrent_step(heads: measure_gdn.Heads, rows: int, dtype: torch.dtype) -> float:
    """Microseconds of vLLM's convolution and recurrent step for decoding; its gated norm is a kernel more."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent_gated_delta_rule_packed_decode as step

    layers, size = (48 if rows <= 4 else 8), measure_gdn.HEAD_DIM
    state = (torch.randn(layers, rows + 1, heads.value, size, size, device=DEVICE) * 0.1).to(dtype)
    window = torch.randn(layers, rows + 1, 3, heads.channels, device=DEVICE).to(BF16).transpose(-1, -2)
    weight = torch.randn(heads.channels, 4, device=DEVICE).to(BF16)
    x = torch.randn(rows, heads.channels, device=DEVICE).to(BF16)
    mixed = torch.empty_like(x)
    a, b = (torch.randn(rows, heads.value, device=DEVICE).to(BF16) for _ in range(2))
    a_log, bias = torch.randn(heads.value, device=DEVICE), torch.randn(heads.value, device=DEVICE)
    slots = torch.arange(1, rows + 1, dtype=torch.int32, device=DEVICE)
    out = torch.empty(rows, 1, heads.value, size, dtype=BF16, device=DEVICE)

    def call(layer: int) -> None:
        causal_conv1d_update(
            x, window[layer], weight, None, "silu", conv_state_indices=slots, validate_data=False, out=mixed
        )
        step(mixed, a, b, a_log, bias, size**-0.5, state[layer], out, slots, use_qk_l2norm_in_kernel=True)

    return timed([lambda layer=layer: call(layer) for layer in range(layers)])


def measure_recurrent() -> None:
    """Decoding: vLLM's convolution and step against our part of the layer, gated norm included."""
    for model, heads in measure_gdn.MODELS.items():
        for rows in (1, 4, 16, 32):
            its = recurrent_step(heads, rows, torch.float32)
            mine = measure_gdn.decode_us(heads, rows, measure_gdn.tuning_for(DEVICE))
            print(
                f"gdn decode {model} {rows}: vLLM without gated norm {its:.1f} us, ours with it {mine:.1f}", flush=True
            )


def measure_scan() -> None:
    """Prompts: FlashInfer's chunked rule as vLLM calls it, with q, k, v and gates given, against our layer part."""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import fi_chunk_gated_delta_rule

    size = measure_gdn.HEAD_DIM
    for model, heads in measure_gdn.MODELS.items():
        for name in ("1x1024", "8x1024", "1x8192"):
            lengths, tokens, sequences = measure_gdn.SHAPES[name]
            q, k = (torch.randn(1, tokens, heads.key, size, device=DEVICE).to(BF16) for _ in range(2))
            v = torch.randn(1, tokens, heads.value, size, device=DEVICE).to(BF16)
            g = -torch.rand(1, tokens, heads.value, device=DEVICE)
            beta = torch.rand(1, tokens, heads.value, device=DEVICE)
            state = torch.zeros(len(lengths), heads.value, size, size, device=DEVICE)
            edges = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)

            def call() -> None:
                fi_chunk_gated_delta_rule(q, k, v, g, beta, state, True, edges)

            for _ in range(3):
                call()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(20):
                call()
            end.record()
            end.synchronize()
            its = begin.elapsed_time(end) * 1000 / 20
            mine = measure_gdn.Pass(heads, lengths, tokens, sequences).us(measure_gdn.tuning_for(DEVICE))
            print(
                f"gdn prefill {model} {name}: vLLM's rule with L2 norms, launched one by one, {its:.1f} us; ours with "
                f"convolution, gates and gated norm {mine:.1f}",
                flush=True,
            )


PARTS = {
    "attention": measure_attention_kernels,
    "gdn": measure_recurrent,
    "experts": measure_experts,
    "linear": measure_projections,
    "scan": measure_scan,
}


def main() -> int:
    """Run the parts named, or all; 1 when one of them failed."""
    from vllm.config import VllmConfig, set_current_vllm_config

    torch.backends.cuda.matmul.allow_tf32 = False
    failed = 0
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        for name in sys.argv[1:] or PARTS:
            try:
                PARTS[name]()
            except Exception:
                traceback.print_exc()
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
