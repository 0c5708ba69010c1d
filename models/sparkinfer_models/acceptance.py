"""Mean accepted length of a drafter on held-out prompts, by the plain reference loop."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sparkinfer.errors import ConfigError
from sparkinfer_models.checkpoint import load_network
from sparkinfer_models.dataset import read_stream, write_summary
from sparkinfer_models.drafter import load_drafter
from sparkinfer_models.rollout import prompts
from sparkinfer_models.speculate import Speculator, plain_decode

TEMPERATURES = (0.0, 0.7, 1.0)


@dataclass(frozen=True)
class Acceptance:
    """`mean` accepted drafts per verification, its standard error over prompts, and tokens per verification."""

    temperature: float
    prompts: int
    verifications: int
    mean: float
    standard_error: float
    tokens_per_step: float
    identical: int
    compared: int


def held_out_prompts(data: Path, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Half windows of unseen documents, half held-out questions; all of `length` tokens."""
    random = np.random.default_rng(seed)
    text = prompts(read_stream(data / "held_out.u16.xz"), count - count // 2, length, 0.0, random)
    chat = prompts(read_stream(data / "held_out_chat.u16.xz"), count // 2, length, 1.0, random)
    return [list(map(int, row)) for row in np.concatenate((text, chat))]


def accepted_length(
    speculator: Speculator, rows: list[list[int]], count: int, temperature: float, compare: int
) -> Acceptance:
    """Decodes every prompt; the first `compare` also plainly, to see that the streams are the same."""
    sums, steps, tokens, identical = [], [], 0, 0
    for index, row in enumerate(rows):
        decoded = speculator.decode(row, count, temperature, seed=index)
        if index < compare:
            identical += decoded.tokens == plain_decode(speculator.network, row, count, temperature, index).tokens
        if decoded.accepted:
            sums.append(sum(decoded.accepted))
            steps.append(len(decoded.accepted))
            tokens += len(decoded.tokens) - 1
    if not steps:
        raise ConfigError("every answer ended at once: no draft was verified")
    total, verifications = sum(sums), sum(steps)
    mean = total / verifications
    # Ratio estimator over prompts: drafts of one answer are not independent.
    residual = [a - mean * b for a, b in zip(sums, steps, strict=True)]
    n = len(steps)
    error = math.sqrt(sum(r * r for r in residual) / max(1, n - 1) / n) / (verifications / n)
    return Acceptance(
        temperature, len(rows), verifications, mean, error, tokens / verifications, identical, min(compare, len(rows))
    )


def add_measure(commands: argparse._SubParsersAction) -> None:
    """Adds the `measure` command."""
    command = commands.add_parser("measure", help="mean accepted length on held-out prompts (CPU, float32)")
    command.add_argument("--target", type=Path, required=True)
    command.add_argument("--drafter", type=Path, required=True)
    command.add_argument("--data", type=Path, required=True, help="folder that `train.py prepare` wrote")
    command.add_argument("--prompts", type=int, default=64)
    command.add_argument("--prompt-tokens", type=int, default=128)
    command.add_argument("--tokens", type=int, default=128)
    command.add_argument("--compare", type=int, default=8, help="prompts also decoded plainly, to compare the streams")
    command.add_argument("--temperatures", type=float, nargs="+", default=list(TEMPERATURES))
    command.add_argument("--no-selector", action="store_true", help="draft each slot's best token, without the walk")
    command.add_argument("--greedy-drafts", action="store_true", help="draft without noise, as vLLM does by default")
    command.add_argument("--ignore-stop", action="store_true", help="go on after stop tokens (ignore_eos)")
    command.add_argument("--json", type=Path)


def measure(args: argparse.Namespace) -> None:
    """Prints one JSON row for each temperature, and writes them to `--json`."""
    network = load_network(args.target, torch.float32).requires_grad_(False)
    drafter = load_drafter(args.drafter, torch.float32).requires_grad_(False)
    rows = held_out_prompts(args.data, args.prompts, args.prompt_tokens)
    speculator = Speculator(
        network,
        drafter,
        selector=not args.no_selector,
        shared_noise=not args.greedy_drafts,
        ignore_stop=args.ignore_stop,
    )
    if args.ignore_stop and args.compare:
        raise ConfigError("--ignore-stop: plain decoding stops, so there is nothing to compare; give --compare 0")
    results = []
    for temperature in args.temperatures:
        result = accepted_length(speculator, rows, args.tokens, temperature, args.compare)
        results.append({key: round(value, 4) for key, value in vars(result).items()})
        print(json.dumps(results[-1]), flush=True)
    if args.json:
        summary = {
            "parameters": sum(p.numel() for p in drafter.parameters()),
            "prompts": args.prompts,
            "prompt_tokens": args.prompt_tokens,
            "tokens": args.tokens,
            "selector": not args.no_selector,
            "shared_noise": not args.greedy_drafts,
            "ignore_stop": args.ignore_stop,
            "rows": results,
        }
        write_summary(args.json, summary)
