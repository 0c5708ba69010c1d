"""`pack_ckpt_check`: prompts prefilled alone against the same prompts packed in one pass.

Three prompts of 1076, 1077 and 777 tokens (scaled down to fit a shorter context) and several random ragged sets, one
block-aligned checkpoint near each prompt's end. First tokens must be equal; recurrent states and conv windows, layer by
layer, must agree within a share of the largest value. A checkpoint that was not written counts as a difference.

On a GPU all passes have one padded size, that of the largest set. At its own size a prompt is multiplied by other
kernels, whose sums round otherwise: in 16 bits little is left of 5 % after 64 layers, or behind routers of experts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparkinfer.arguments import seed
from sparkinfer.console import command_line
from sparkinfer.models.config import ModelConfig, load_config
from sparkinfer.runner.gpu_runner import GpuRunner
from sparkinfer.runner.gpu_sizes import PassLimits, up_to
from sparkinfer.runner.model_runner import ModelRunner
from sparkinfer.runner.open_runner import open_runner
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, Checkpoint, Request, Row, SamplingParams, StepPlan
from sparkinfer_eval.check_program import CheckRow, NotApplicable, parser, run

CHECK = "pack_ckpt_check"
LENGTHS = (1076, 1077, 777)
LIMITS = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.05}
"""Largest difference allowed, as a share of the largest value."""
UNWRITTEN = 3.0e4
"""Snapshots are filled with this before a pass; one that still holds it was never written."""
PACK_ROWS = 4
NEAR_TIE = {"float32": 0.0, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""First tokens may differ when the two best logits lie within this share of the largest one: one rounding step."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What one prompt's prefill leaves. `state` [layers, Hv, K, V] and `window` [layers, W-1, C] are on the host."""

    token: int
    logits: torch.Tensor
    state: torch.Tensor
    window: torch.Tensor


def scaled_lengths(max_positions: int) -> tuple[int, ...]:
    """The three lengths, all divided alike when the longest and its first token exceed the model's context."""
    longest = max(LENGTHS) + 1
    if max_positions >= longest:
        return LENGTHS
    return tuple(max(KV_BLOCK_TOKENS + 1, length * max_positions // longest) for length in LENGTHS)


def checkpoint_position(length: int) -> int:
    """The last block boundary that leaves at least one token, moved back one block when in the last 16 tokens."""
    last = (length - 1) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    if last > length - KV_BLOCK_TOKENS and last >= 2 * KV_BLOCK_TOKENS:
        last -= KV_BLOCK_TOKENS
    return last


def prompt_sets(config: ModelConfig, seed: int) -> list[tuple[str, list[list[int]]]]:
    """Named sets of random prompts: the three given lengths, then ragged ones."""
    generator = torch.Generator().manual_seed(seed)
    longest = min(config.max_positions - 1, max(LENGTHS))
    if longest <= KV_BLOCK_TOKENS:
        raise NotApplicable(f"the model's context of {config.max_positions} tokens holds no block-aligned checkpoint")
    sets = [("x".join(map(str, scaled_lengths(config.max_positions))), list(scaled_lengths(config.max_positions)))]
    for number in range(3):
        count = 2 + number
        ragged = torch.randint(
            KV_BLOCK_TOKENS + 1, max(KV_BLOCK_TOKENS + 2, longest // 2), (count,), generator=generator
        )
        sets.append((f"ragged{number}", ragged.tolist()))
    # Lengths at the edges of blocks and chunks.
    sets.append(("edges", [length for length in (17, 63, 65, 129) if length <= longest]))

    def tokens(length: int) -> list[int]:
        return torch.randint(0, config.vocab_size, (length,), generator=generator).tolist()

    return [(name, [tokens(length) for length in lengths]) for name, lengths in sets]


class Bench:
    """A runner with a place for each prompt of a set."""

    def __init__(self, runner: ModelRunner | GpuRunner, per_slot: int) -> None:
        self.runner, self.per_slot, self.step = runner, per_slot, 0

    def prefill(self, prompts: Sequence[list[int]], places: Sequence[int]) -> list[Prefilled]:
        """Prefill prompts in one pass, each in its place, and take what they leave."""
        caches = self.runner.caches
        requests = [
            Request(id=f"prompt{place}", prompt=prompt, sampling=SamplingParams(max_tokens=1, temperature=0.0))
            for place, prompt in zip(places, prompts, strict=True)
        ]
        rows = [self._row(request, place) for request, place in zip(requests, places, strict=True)]
        self.step += 1
        logits = self.runner.logits(StepPlan(self.step, rows)).cpu()
        # The pass once more as the engine runs it, sampling and a captured graph included, from the same zero start:
        # what is compared are the checkpoints that it writes.
        with torch.inference_mode():
            caches.snapshot_state.fill_(UNWRITTEN)
            caches.snapshot_window.fill_(UNWRITTEN)
        self.step += 1
        tokens = self.runner.execute(StepPlan(self.step, rows)).tokens
        states = [
            (caches.snapshot_state[place].clone(), caches.snapshot_window[place].clone().float()) for place in places
        ]
        ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
        return [
            Prefilled(token, logits[end], state, window)
            for token, end, (state, window) in zip(tokens, ends.tolist(), states, strict=True)
        ]

    def _row(self, request: Request, place: int) -> Row:
        length = len(request.prompt)
        return Row(
            request=request,
            slot=place,
            blocks=list(range(place * self.per_slot, (place + 1) * self.per_slot)),
            start=0,
            length=length,
            is_decode=False,
            samples=True,
            output_index=0,
            checkpoints=(Checkpoint(checkpoint_position(length), place),),
        )


def relative_difference(alone: torch.Tensor, packed: torch.Tensor) -> float:
    """Largest difference as a share of the largest value alone; 1e9 when either was never written or is not finite."""
    for tensor in (alone, packed):
        if not torch.isfinite(tensor).all() or (tensor == UNWRITTEN).any():
            return 1e9
    scale = alone.abs().max().item()
    return (alone - packed).abs().max().item() / max(scale, 1e-30)


def compare(name: str, alone: Prefilled, packed: Prefilled, dtype: str) -> list[CheckRow]:
    """The rows of one prompt: first token, then state and window of every linear-attention layer."""
    limit = LIMITS[dtype]
    off = float(alone.token != packed.token)
    if off:
        best = alone.logits.topk(2).values
        gap = (best[0] - best[1]).item() / max(alone.logits.abs().max().item(), 1e-30)
        off = 0.0 if gap <= NEAR_TIE[dtype] else 1.0
    rows = [CheckRow(f"{name} first token", off, 0.0, off == 0.0)]
    for kind, before, after in (
        ("state", alone.state, packed.state),
        ("window", alone.window, packed.window),
    ):
        for layer, (one, other) in enumerate(zip(before, after, strict=True)):
            value = relative_difference(one, other)
            rows.append(CheckRow(f"{name} {kind} linear layer {layer}", value, limit, value <= limit))
    return rows


def pass_limits(prompts: int, tokens: int) -> PassLimits:
    """Of a GPU's runner: passes of up to so many prompts and tokens, at one padded size."""
    # The size that a server would take for so many tokens.
    size = next(size for size in up_to(2 * tokens) if size >= tokens)
    return PassLimits(prompts, size, 0, 1, prompts, deterministic=True, one_prompt_size=True)


def check(options: argparse.Namespace) -> tuple[str, list[CheckRow]]:
    """Run the comparison. Raises NotApplicable for a model without linear attention."""
    config = load_config(options.model)
    if config.num_linear_layers == 0:
        raise NotApplicable("the model has no linear-attention layer, so there is no recurrent state to compare")
    sets = prompt_sets(config, options.seed)
    longest = max(len(prompt) for _, prompts in sets for prompt in prompts)
    per_slot = -(-(longest + 1) // KV_BLOCK_TOKENS)
    count = max(PACK_ROWS, *(len(prompts) for _, prompts in sets))
    runner = open_runner(
        options.model,
        device=options.device,
        dtype=options.dtype,
        max_num_seqs=count,
        num_kv_blocks=count * per_slot,
        max_model_len=min(per_slot * KV_BLOCK_TOKENS, config.max_positions),
        num_snapshots=count,
        limits=pass_limits(count, max(sum(map(len, prompts)) for _, prompts in sets)),
    )
    bench = Bench(runner, per_slot)
    rows = []
    for name, prompts in sets:
        places = range(len(prompts))
        alone = [bench.prefill([prompt], [place])[0] for place, prompt in zip(places, prompts, strict=True)]
        packed = bench.prefill(prompts, places)
        for place, prompt in enumerate(prompts):
            label = f"{name}[{place}] {len(prompt)} tokens"
            rows += compare(label, alone[place], packed[place], runner.dtype_name)
    return runner.dtype_name, rows


@command_line
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of `eval/pack_ckpt_check.py`; returns the exit code."""
    arguments_of = parser(CHECK, __doc__.splitlines()[0] if __doc__ else None)
    arguments_of.add_argument("--seed", type=seed, default=0, help="of the random prompts (default %(default)s)")
    return run(CHECK, arguments_of.parse_args(arguments), check)
