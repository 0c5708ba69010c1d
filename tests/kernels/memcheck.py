"""Every GPU kernel once or twice on small ragged shapes, for NVIDIA's memory checker; nothing is compared here.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
        python tests/kernels/memcheck.py [rows] [attention] [gdn] [scan] [sampler] [linear] [moe] [step]

Without torch's caching allocator every tensor is an allocation of its own, so that the checker sees each overrun.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

DEVICE = torch.device("cuda")


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(DEVICE)


def rows() -> None:
    """Norms, SwiGLU, quantisation, rotary and cache write."""
    from sparkinfer_kernels.rms_norm import gpu as norm
    from sparkinfer_kernels.rotary import gpu as rotary
    from sparkinfer_kernels.rotary.reference import rotary_table

    for count, d in itertools.product((1, 3, 200), (96, 2048, 5120)):
        weight, x, residual = rand(d, dtype=torch.float32), rand(count, d), rand(count, d)
        fp8 = torch.empty(count, d, dtype=torch.float8_e4m3fn, device=DEVICE), rand(count, dtype=torch.float32)
        norm.add_rms_norm(x, residual, weight, 1e-6, out=torch.empty_like(x), fp8=fp8)
        norm.rms_norm(x, weight, 1e-6)
        norm.embed_rms_norm(ints([count - 1] * count), x, weight, 1e-6, residual)
        norm.quantise_rows(x, *fp8)
        norm.swiglu(rand(count, 2 * d), fp8=fp8)
    for (heads, kv), count, kind in itertools.product(
        ((24, 4), (16, 2), (2, 1)), (1, 5, 131), (torch.bfloat16, torch.float8_e4m3fn)
    ):
        cache = torch.empty(2, 9, 16, kv, 256, dtype=kind, device=DEVICE)
        norms, scales = rand(2, 256, dtype=torch.float32), torch.ones(2, kv).to(DEVICE)
        rotary.qk_norm_rotary_write(
            rand(count, (2 * heads + 2 * kv) * 256), ints([i % 40 for i in range(count)]), ints([*range(count)]),
            norms[0], norms[1], rotary_table(40, 64, 1e7, DEVICE), cache[0], cache[1], 1e-6,
            torch.empty(count, heads, 256, dtype=torch.bfloat16, device=DEVICE), kv_scales=scales,
        )  # fmt: skip


def attention() -> None:
    """Plan, decode with its combination, prefill, for ragged lengths."""
    from sparkinfer_kernels.attention import gpu
    from sparkinfer_kernels.attention.configs import PREFILL
    from test_attention_gpu import LENGTHS, SPANS, Pool, queries

    for (heads, kv), fp8 in itertools.product(((24, 4), (16, 2), (2, 1)), (False, True)):
        lengths = [*LENGTHS, 700]
        pool, n = Pool(lengths, kv, fp8), len(lengths)
        q, gate = queries(n, heads, kv)
        for independent in (False, True):
            work = gpu.make_workspace(
                n, 0, 0, heads, kv, 256, DEVICE, fp8_cache=fp8, independent=independent
            )  # fmt: skip
            positions = ints([length - 1 for length in lengths])
            gpu.plan(work, positions)
            out = torch.empty_like(q)
            gpu.attention_decode(q, gate, *pool.kv, pool.table, positions, 0.06, work, out, pool.scales)
        spans = [*SPANS, (300, 40)]
        pool, total = Pool([a + b for a, b in spans], kv, fp8), sum(b for _, b in spans)
        q, gate = queries(total + 9, heads, kv)
        ends = ints([0, *itertools.accumulate(b for _, b in spans)])
        starts = ints([a for a, _ in spans])
        for config, independent in itertools.product((PREFILL[90], replace(PREFILL[90], wgmma=False)), (False, True)):
            work = gpu.make_workspace(
                0, total + 9, len(spans) + 1, heads, kv, 256, DEVICE, prefill_config=config, independent=independent
            )
            gpu.plan(work, cu_seqlens=ends, starts=starts)
            gpu.attention_prefill(
                q, gate, *pool.kv, pool.table, ends, starts, 0.06, work, torch.empty_like(q), pool.scales
            )  # fmt: skip


def gdn() -> None:
    """Decode and prefill with checkpoints, as every tuned entry launches them."""
    from gdn_reference import make_layer, make_proj
    from sparkinfer_kernels.gated_delta_rule.gpu import gdn_decode, make_decode_workspace
    from sparkinfer_kernels.gated_delta_rule.tuned import tunings
    from test_gdn_gpu import MARKS, RAGGED, prefill

    hk, hv = 2, 6
    for tuning, kind in itertools.product(tunings().values(), (torch.float32, torch.bfloat16)):
        for sequences, marks in zip(RAGGED, MARKS, strict=True):
            layer = make_layer(hk, hv, 7, 1, "cuda", kind)
            if kind is torch.float32:
                prefill(layer, sequences, marks, padding=3, check=False, tuning=tuning)
        for count in (3, 20):
            layer, work = make_layer(hk, hv, 24, 1, "cuda", kind), make_decode_workspace(count, hk, DEVICE)
            slots = ints([*range(count - 1), 23])
            gdn_decode(make_proj(layer, count, 2), layer.window, layer.state, slots, *layer.weights(), 1e-6,
                       workspace=work, tuning=tuning)  # fmt: skip


def scan() -> None:
    """The scan at every width and depth of pipelining (SCAN=columns,stages: that one only)."""
    from gdn_reference import make_layer
    from sparkinfer_kernels.gated_delta_rule.gpu import tuning_for
    from test_gdn_gpu import MARKS, RAGGED, prefill

    only = os.environ.get("SCAN")
    pairs = [tuple(map(int, only.split(",")))] if only else [*itertools.product((16, 32, 64, 128), (2, 3))]
    for columns, stages in pairs:
        shipped = tuning_for(DEVICE)
        tuning = replace(shipped, scan=replace(shipped.scan, block=columns, narrow=0, num_stages=stages))
        prefill(make_layer(2, 6, 7, 1, "cuda"), RAGGED[0], MARKS[0], check=False, tuning=tuning)
        print("scan", columns, stages, flush=True)


def sampler() -> None:
    """Every mode, bans, logprobs."""
    from sparkinfer_kernels.sampler import gpu
    from test_sampler_gpu import M, tensors

    for vocab, kind in itertools.product((100, 5000, 20003), (torch.float32, torch.bfloat16)):
        logits, work = rand(M, vocab, dtype=kind), gpu.make_workspace(M, vocab, DEVICE)
        out = torch.empty(M, dtype=torch.int64, device=DEVICE)
        bans = {"banned_rows": ints([0, -1, 2]), "banned_tokens": ints([3, 0, vocab - 1])}
        for mode in ("greedy", "sample", "filter"):
            gpu.sample(logits, tensors(mode == "filter", **bans), mode, work, out)
        for top in (0, 20):
            gpu.logprobs(logits, out, top, work)


def linear() -> None:
    """NVFP4 and FP8 weights at few and many rows."""
    from sparkinfer_kernels.linear import gpu, weights
    from test_linear_gpu import on_gpu

    for n, k in ((48, 208), (1544, 256)):
        for fp8, gate_up in itertools.product((False, True), (False, True)):
            pairs = [on_gpu(n // 2, k, 2e-4, seed=i)[0] for i in range(2)]
            try:
                weight = gpu.prepare_nvfp4(pairs, gate_up=gate_up, fp8=fp8)
            except ValueError as refused:
                print("refused", n, k, refused)
                continue
            work = gpu.make_workspace([weight], 300)
            for m in (1, 3, 17, 33, 64, 65, 300):
                gpu.linear(rand(m, k), weight, work)
                if gate_up:
                    gpu.linear_swiglu(rand(m, k), weight, work)
    values = rand(1000, 272).to(weights.FP8)
    block = gpu.prepare_fp8_block([(values, torch.ones(8, 3).to(DEVICE))])
    work = gpu.make_workspace([block], 130)
    for m in (1, 33, 130):
        gpu.linear(rand(m, 272), block, work)


def moe() -> None:
    """All small cases of the comparison."""
    from moe_cases import CASES, make_case
    from sparkinfer_kernels.moe import gpu

    for case in CASES:
        made = make_case(case, "cuda")
        gpu.NVFP4_TOKENS = 1 << 20 if case.wide == "nvfp4" else 0
        gpu.moe(made.x, made.weights, gpu.make_workspace(made.config, case.tokens + 3, DEVICE))


def step() -> None:
    """Inputs and tables of a captured pass."""
    from test_step import test_inputs_tables_and_tokens

    test_inputs_tables_and_tokens()


PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part for part in (rows, attention, gdn, scan, sampler, linear, moe, step)
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
        torch.cuda.synchronize()
        print("ran", name, flush=True)
