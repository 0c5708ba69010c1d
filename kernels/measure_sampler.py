"""Check and time the sampler on a GPU against the plain torch reference: `python kernels/measure_sampler.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from measure_attention import DEVICE, timed
from sparkinfer_kernels.sampler import gpu as sampler
from sparkinfer_kernels.sampler import reference

KINDS = {
    "greedy": ("greedy", {"temperature": 0.0}),
    "temperature": ("sample", {"temperature": 0.8}),
    "greedy in filter graph": ("filter", {"temperature": 0.0}),
    "top-k 20": ("filter", {"temperature": 0.8, "top_k": 20}),
    "top-p 0.95": ("filter", {"temperature": 1.0, "top_p": 0.95}),
    "top-k 50 top-p 0.9": ("filter", {"temperature": 0.7, "top_k": 50, "top_p": 0.9}),
    "min-p 0.05": ("filter", {"temperature": 1.0, "min_p": 0.05}),
    "top-k 100000 top-p 0.5": ("filter", {"temperature": 1.0, "top_k": 100000, "top_p": 0.5}),
}


def parameters(m: int, values: dict[str, float], seed: int) -> tuple[sampler.SamplingTensors, reference.SamplingBatch]:
    """The same parameters for every row, as both samplers take them."""
    full = lambda name, off, dtype: torch.full((m,), values.get(name, off), dtype=dtype, device=DEVICE)  # noqa: E731
    keys = torch.from_numpy(reference.noise_keys(range(seed, seed + m), range(m))).to(DEVICE)
    temperature, top_p, min_p = (full(n, o, torch.float32) for n, o in (("temperature", 0), ("top_p", 1), ("min_p", 0)))
    top_k = full("top_k", 0, torch.int32)
    mine = sampler.SamplingTensors(temperature, keys, top_k, top_p, min_p)
    return mine, reference.SamplingBatch(temperature, keys, top_k.long(), 0, top_p, min_p)


def check_and_time(m: int, vocab: int, dtype: torch.dtype, sharpness: float) -> None:
    """Tokens of every kind against the reference on the same logits (Gaussian, `sharpness` their deviation)."""
    workspace = sampler.make_workspace(m, vocab, DEVICE)
    logits = [(torch.randn(m, vocab, device=DEVICE) * sharpness).to(dtype) for _ in range(4)]
    out = torch.full((m,), -1, dtype=torch.int64, device=DEVICE)
    for name, (mode, values) in KINDS.items():
        differ, same = 0, True
        for seed, x in enumerate(logits):
            mine, theirs = parameters(m, values, 1000 * seed)
            before = x.clone()
            sampler.sample(x, mine, mode, workspace, out)
            again = torch.empty_like(out)
            sampler.sample(x, mine, mode, workspace, again)
            same &= torch.equal(out, again) and torch.equal(before, x)
            differ += int((out != reference.sample(x.float(), theirs)).sum())
        calls = [lambda x=x, mine=mine, mode=mode: sampler.sample(x, mine, mode, workspace, out) for x in logits]
        us = timed(calls * 2)
        print(
            f"sample {m} x {vocab} {str(dtype)[6:]} deviation {sharpness} {name}: {differ} of {4 * m} tokens differ"
            f"{'' if same else ' NOT REPEATABLE'}, {us:.1f} us",
            flush=True,
        )
    expected = reference.logprobs(logits[0].float(), out, 20)
    got = sampler.logprobs(logits[0], out, 20, workspace)
    errors = [(a - b).abs().max().item() for a, b in ((got[0], expected[0]), (got[3], expected[3]))]
    us = timed([lambda: sampler.logprobs(logits[0], out, 20, workspace)] * 4)
    print(
        f"logprobs 20: errors {errors}, ranks equal {torch.equal(got[1].long(), expected[1])}, {us:.1f} us", flush=True
    )


if __name__ == "__main__":
    check_and_time(32, 248320, torch.float32, 2.0)
    check_and_time(32, 248320, torch.bfloat16, 4.0)
    check_and_time(1, 248320, torch.bfloat16, 2.0)
