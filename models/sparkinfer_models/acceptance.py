"""Mean accepted length of a drafter on held-out prompts, by the plain reference loop."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from sparkinfer.errors import ConfigError
from sparkinfer_models.checkpoint import load_network
from sparkinfer_models.dataset import read_stream
from sparkinfer_models.drafter import load_drafter
from sparkinfer_models.measured import GREEDY, origin, prompts_digest
from sparkinfer_models.rollout import prompts
from sparkinfer_models.speculate import Decoded, Speculator, plain_decode
from sparkinfer_models.speculate_batched import BatchedSpeculator

TEMPERATURES = (0.0, 0.7, 1.0)


@dataclass(frozen=True)
class Acceptance:
    """`mean` accepted drafts per verification, its standard error over prompts, and tokens per verification.

    `sums` holds accepted drafts and verifications of every answer.
    """

    temperature: float
    prompts: int
    verifications: int
    mean: float
    standard_error: float
    tokens_per_step: float
    identical: int
    compared: int
    sums: list[list[int]]


def held_out_prompts(data: Path, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Half windows of unseen documents, half held-out questions; all of `length` tokens."""
    random = np.random.default_rng(seed)
    text = prompts(read_stream(data / "held_out.u16.xz"), count - count // 2, length, 0.0, random)
    chat = prompts(read_stream(data / "held_out_chat.u16.xz"), count // 2, length, 1.0, random)
    return [list(map(int, row)) for row in np.concatenate((text, chat))]


def decoded(
    speculator: Speculator | BatchedSpeculator, rows: list[list[int]], count: int, temperature: float, batch: int
) -> Iterator[Decoded]:
    """Answers in the prompts' order; the seed is the prompt's number."""
    if isinstance(speculator, Speculator):
        for index, row in enumerate(rows):
            yield speculator.decode(row, count, temperature, seed=index)
    else:
        for first in range(0, len(rows), batch):
            seeds = list(range(first, min(first + batch, len(rows))))
            yield from speculator.decode(rows[first : first + batch], count, temperature, seeds)


def accepted_length(
    speculator: Speculator | BatchedSpeculator,
    rows: list[list[int]],
    count: int,
    temperature: float,
    compare: int,
    batch: int = 1,
) -> Acceptance:
    """Decodes every prompt; the first `compare` also plainly, to see that the streams are the same."""
    sums: list[list[int]] = []
    tokens, identical = 0, 0
    for index, answer in enumerate(decoded(speculator, rows, count, temperature, batch)):
        if index < compare:
            plain = plain_decode(speculator.network, rows[index], count, temperature, index)
            identical += answer.tokens == plain.tokens
        if answer.accepted:
            sums.append([sum(answer.accepted), len(answer.accepted)])
            tokens += len(answer.tokens) - 1
    if not sums:
        raise ConfigError("every answer ended at once: no draft was verified")
    total, verifications = (sum(column) for column in zip(*sums, strict=True))
    mean = total / verifications
    # Ratio estimator over prompts: drafts of one answer are not independent.
    residual = [a - mean * b for a, b in sums]
    n = len(sums)
    error = math.sqrt(sum(r * r for r in residual) / max(1, n - 1) / n) / (verifications / n)
    return Acceptance(
        temperature,
        len(rows),
        verifications,
        round(mean, 4),
        round(error, 4),
        round(tokens / verifications, 4),
        identical,
        min(compare, len(rows)),
        sums,
    )


def add_measure(commands: argparse._SubParsersAction) -> None:
    """Adds the `measure` command."""
    command = commands.add_parser("measure", help="mean accepted length on held-out prompts")
    command.add_argument("--target", type=Path, required=True)
    command.add_argument("--drafter", type=Path, required=True)
    command.add_argument("--data", type=Path, help="folder that `train.py prepare` wrote")
    command.add_argument(
        "--prompts-file", type=Path, help="in place of --data: what `vllm_acceptance.py prompts` wrote"
    )
    command.add_argument("--prompts", type=int, default=64)
    command.add_argument("--prompt-tokens", type=int, default=128)
    command.add_argument("--tokens", type=int, default=128)
    command.add_argument("--compare", type=int, default=8, help="prompts also decoded plainly, to compare the streams")
    command.add_argument("--temperatures", type=float, nargs="+", default=list(TEMPERATURES))
    command.add_argument("--no-selector", action="store_true", help="draft each slot's best token, without the walk")
    command.add_argument("--greedy-drafts", action="store_true", help="draft without noise, as vLLM does by default")
    command.add_argument("--ignore-stop", action="store_true", help="go on after stop tokens (ignore_eos)")
    text = "prompts decoded together; 1 takes the plain loop (default %(default)s)"
    command.add_argument("--batch", type=int, default=32, help=text)
    command.add_argument("--device", default="cpu")
    command.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of activations")
    command.add_argument("--json", type=Path)


def measure(args: argparse.Namespace) -> None:
    """Prints one JSON row for each temperature, and writes them to `--json`."""
    if args.ignore_stop and args.compare:
        raise ConfigError("--ignore-stop: plain decoding stops, so there is nothing to compare; give --compare 0")
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    if device.type != "cpu" and args.compare:
        raise ConfigError(f"--device {args.device}: plain decoding runs on a CPU only; give --compare 0")
    network = load_network(args.target, dtype, device).requires_grad_(False)
    drafter = load_drafter(args.drafter, dtype, device).requires_grad_(False)
    rows = read_prompts(args)
    kind = Speculator if args.batch == 1 else BatchedSpeculator
    speculator = kind(
        network,
        drafter,
        selector=not args.no_selector,
        shared_noise=not args.greedy_drafts,
        ignore_stop=args.ignore_stop,
    )
    results = []
    for temperature in args.temperatures:
        begun = time.monotonic()
        result = asdict(accepted_length(speculator, rows, args.tokens, temperature, args.compare, args.batch))
        results.append(result)
        shown = {key: value for key, value in result.items() if key != "sums"}
        print(json.dumps(shown | {"seconds": round(time.monotonic() - begun, 1)}), flush=True)
    if args.json:
        summary = {
            "engine": f"reference loop, {args.dtype}",
            "target": args.target.name,
            "drafter": args.drafter.name,
            "parameters": sum(p.numel() for p in drafter.parameters()),
            "prompts": len(rows),
            "prompt_tokens": len(rows[0]),
            "tokens": args.tokens,
            "selector": not args.no_selector,
            "draft_sample_method": GREEDY if args.greedy_drafts else "shared noise",
            "prompts_sha256": prompts_digest(rows),
            **origin(args.target, args.drafter, args.argv),
            "ignore_stop": args.ignore_stop,
            "device": device.type,
            "rows": results,
        }
        temporary = args.json.with_name(args.json.name + ".part")
        temporary.write_text(json.dumps(summary) + "\n")
        temporary.replace(args.json)


def read_prompts(args: argparse.Namespace) -> list[list[int]]:
    """The held-out prompts, or those of a file of `vllm_acceptance.py prompts`. Raises ConfigError."""
    if args.prompts_file is None:
        if args.data is None:
            raise ConfigError("give --data, the folder that `train.py prepare` wrote, or --prompts-file")
        return held_out_prompts(args.data, args.prompts, args.prompt_tokens)
    rows: list[list[int]] = json.loads(args.prompts_file.read_text())
    if len({len(row) for row in rows}) != 1:
        raise ConfigError(f"{args.prompts_file}: prompts of one length are wanted")
    return rows
