"""`sparkinfer bench MODEL`: times of single engine steps, without server, scheduler or HTTP.

Decode rows: n requests at the same context length, one token each per step. Prefill rows: prompts computed together, in
one pass or as many as the largest one asks for. Prompts are random token ids; times are medians of repeated steps after
a warm-up. On a GPU, decode steps are launched one ahead, as the engine does, and the time is the distance of results.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import sparkinfer
from sparkinfer.arguments import seed
from sparkinfer.engine.build_gpu import gpu_options
from sparkinfer.errors import ConfigError
from sparkinfer.identity import engine_digest
from sparkinfer.models.config import load_config
from sparkinfer.models.hub import HUB, resolve_model
from sparkinfer.output import require_file, write_text
from sparkinfer.runner.gpu_runner import GpuRunner
from sparkinfer.runner.gpu_sizes import PassLimits
from sparkinfer.runner.model_runner import ModelRunner
from sparkinfer.runner.open_runner import open_runner
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, Request, Row, SamplingParams, StepPlan
from sparkinfer.settings import Settings, flag_name

SCHEMA = "sparkinfer/bench/v1"
ARITHMETIC = [
    field
    for field in dataclasses.fields(Settings)
    if field.name in ("prefill_dtype", "kv_cache_dtype", "state_dtype", "head_dtype")
]
"""Settings that trade accuracy for speed on a GPU."""


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One measured kind of step. Times are milliseconds of one step."""

    phase: str
    requests: int
    tokens_each: int
    """Prompt tokens of each request (prefill), context length at the first step (decode)."""
    steps: int
    median_ms: float
    min_ms: float
    tokens_per_s: float
    """Tokens computed per second, from the median."""


def _positive(text: str) -> list[int]:
    values = [int(part) for part in text.split(",") if part]
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected positive whole numbers separated by commas")
    return values


def parse_prompts(text: str) -> list[tuple[int, int]]:
    """`1024,4x128` -> [(1, 1024), (4, 128)]: prompts and tokens of each."""
    found = []
    for part in text.split(","):
        count, _, length = part.rpartition("x")
        found.append((int(count or 1), int(length)))
        if min(found[-1]) < 1:
            raise argparse.ArgumentTypeError(f"{part!r}: expected TOKENS or COUNTxTOKENS")
    return found


GPU_DECODE_CONTEXT = [1200]
GPU_PREFILL = "1024,8192,32x1024"


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Flags that say what is loaded where."""
    parser.add_argument(
        "model", metavar="MODEL", type=Path, help=f"folder (only config.json with a dummy load), or {HUB}"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32 (default %(default)s)")
    parser.add_argument("--load-format", default="auto", help="auto, or dummy for random weights (default %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="of prompts and dummy weights (default %(default)s)")
    parser.add_argument("--threads", type=int, help="torch threads on CPU (default: torch's own choice)")
    for field in ARITHMETIC:
        parser.add_argument(
            flag_name(field.name),
            choices=field.metadata["choices"],
            default=field.default,
            help="GPU: as in `serve` (default %(default)s)",
        )


def check_options(options: argparse.Namespace, least: dict[str, int]) -> None:
    """What can be refused before a model is loaded; `least` is the least value of a flag. Raises ConfigError."""
    for name, low in {**least, "threads": 1}.items():
        value = getattr(options, name)
        if value is not None and value < low:
            raise ConfigError(f"--{name} {value}: must be at least {low}")
    for field in ARITHMETIC:
        value = getattr(options, field.name)
        if options.device == "cpu" and value != field.default:
            raise ConfigError(f"{flag_name(field.name)} {value} is for a GPU: give --device cuda")
    if options.json is not None:
        require_file(options.json, "--json")


def _arithmetic(options: argparse.Namespace) -> dict[str, Any]:
    """What the flags say about a GPU's arithmetic."""
    return {field.name: getattr(options, field.name) for field in ARITHMETIC}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sparkinfer bench", description=__doc__.splitlines()[0] if __doc__ else None)
    add_load_options(parser)
    parser.add_argument("--decode", type=_positive, default=[1, 4, 16, 32], metavar="N,N", help="batch sizes")
    parser.add_argument(
        "--context", type=_positive, metavar="N,N", help="context lengths of decode (default: 128; GPU 1200)"
    )
    parser.add_argument(
        "--prefill",
        type=parse_prompts,
        metavar="N,KxN",
        help=f"prompts (default: 128,1024,8192,4x128,16x128; GPU {GPU_PREFILL})",
    )
    parser.add_argument("--steps", type=int, default=40, help="timed decode steps (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="timed prefills (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="F", help="write the result there too")
    return parser


class _Load:
    """Makes requests and their rows for a runner; every request has a slot and blocks of its own."""

    def __init__(self, runner: ModelRunner | GpuRunner, capacity: int, temperature: float, seed: int) -> None:
        self.runner, self.capacity, self.temperature = runner, capacity, temperature
        self.pass_tokens = runner.limits.prefill_chunk if isinstance(runner, GpuRunner) else 1 << 30
        self.blocks: dict[int, list[int]] = {}
        self.generator = torch.Generator().manual_seed(seed)
        self.step = 0

    def requests(self, count: int, length: int) -> list[Request]:
        vocab = self.runner.config.vocab_size
        return [
            Request(
                id=str(index),
                prompt=torch.randint(0, vocab, (length,), generator=self.generator).tolist(),
                sampling=SamplingParams(max_tokens=self.capacity, temperature=self.temperature, seed=index),
            )
            for index in range(count)
        ]

    def _rows(self, requests: Sequence[Request], *, decode: bool, ahead: int = 0, pending: bool = False) -> list[Row]:
        """A step's rows; `ahead` tokens of each request are still being computed."""
        per = self.capacity // KV_BLOCK_TOKENS
        self.step += 1
        return [
            Row(
                request=request,
                slot=slot,
                blocks=self.blocks.setdefault(slot, list(range(slot * per, (slot + 1) * per))),
                start=request.num_tokens - 1 + ahead if decode else 0,
                length=1 if decode else len(request.prompt),
                is_decode=decode,
                samples=True,
                output_index=len(request.output) + ahead,
                pending=pending,
            )
            for slot, request in enumerate(requests)
        ]

    def run(self, requests: Sequence[Request], *, decode: bool) -> float:
        """One step over all requests, their prompts or one token each; prompts in as many passes as it takes.

        Returns seconds."""
        rows = self._rows(requests, decode=decode)
        plans = [StepPlan(self.step, part) for part in self._passes(rows)]
        started = time.perf_counter()
        results = [self.runner.execute(plan) for plan in plans]
        elapsed = time.perf_counter() - started
        tokens = [token for result in results for token in result.tokens]
        for request, token in zip(requests, tokens, strict=True):
            request.output.append(token)
        return elapsed

    def _passes(self, rows: list[Row]) -> list[list[Row]]:
        """Rows in passes of at most the runner's tokens."""
        passes: list[list[Row]] = [[]]
        for row in rows:
            if passes[-1] and sum(other.length for other in passes[-1]) + row.length > self.pass_tokens:
                passes.append([])
            passes[-1].append(row)
        return passes

    def decode_steps(self, requests: Sequence[Request], steps: int) -> list[float]:
        """Seconds of decode steps, the way the device's engine runs them."""
        if isinstance(self.runner, GpuRunner):
            return self.decode_ahead(requests, steps)
        return [self.run(requests, decode=True) for _ in range(steps)]

    def decode_ahead(self, requests: Sequence[Request], steps: int) -> list[float]:
        """Decode steps, each launched before the one before is collected. Returns the distances of results."""
        self.runner.launch(StepPlan(self.step, self._rows(requests, decode=True)))
        times, last = [], time.perf_counter()
        for index in range(steps):
            if index + 1 < steps:
                self.runner.launch(StepPlan(self.step, self._rows(requests, decode=True, ahead=1, pending=True)))
            for request, token in zip(requests, self.runner.collect().tokens, strict=True):
                request.output.append(token)
            now = time.perf_counter()
            times.append(now - last)
            last = now
        return times


def _row(phase: str, requests: int, tokens_each: int, per_step: int, times: list[float]) -> BenchRow:
    median = statistics.median(times)
    return BenchRow(phase, requests, tokens_each, len(times), median * 1e3, min(times) * 1e3, per_step / median)


def open_for(options: argparse.Namespace, sequences: int, longest: int) -> tuple[ModelRunner | GpuRunner, _Load]:
    """A runner with room for `sequences` requests of `longest` tokens, and what drives it.

    Raises ConfigError when a length exceeds the model's positions, and what `resolve_model` and `load_config` raise.
    """
    folder = resolve_model(str(options.model))
    config = load_config(folder)
    capacity = -(-longest // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
    if longest > config.max_positions:
        raise ConfigError(
            f"{longest} tokens are more than the model's {config.max_positions} positions:"
            " shorten --prefill, --context or --steps"
        )
    chunk = max(8192, capacity)
    runner = open_runner(
        folder,
        device=options.device,
        dtype=options.dtype,
        max_num_seqs=sequences,
        num_kv_blocks=sequences * capacity // KV_BLOCK_TOKENS,
        max_model_len=min(capacity, config.max_positions),
        load_format=options.load_format,
        seed=options.seed,
        limits=PassLimits(sequences, chunk, 0, 1, sequences),
        options=gpu_options(Settings(**_arithmetic(options))),
    )
    return runner, _Load(runner, capacity, options.temperature, options.seed)


def measure(options: argparse.Namespace) -> list[BenchRow]:
    """Run all measurements of the parsed options. Raises ConfigError when a length exceeds the model's positions."""
    warm = 4
    gpu = options.device != "cpu"
    contexts = options.context or (GPU_DECODE_CONTEXT if gpu else [128])
    prefill = options.prefill or parse_prompts(GPU_PREFILL if gpu else "128,1024,8192,4x128,16x128")
    longest = max([length for _, length in prefill] + [c + options.steps + 2 * warm + 1 for c in contexts])
    sequences = max(options.decode + [count for count, _ in prefill])
    _, load = open_for(options, sequences, longest)
    rows = []
    for context in contexts:
        for count in options.decode:
            requests = load.requests(count, context)
            load.run(requests, decode=False)
            times = load.decode_steps(requests, options.steps + 2 * warm)[warm:-warm]
            rows.append(_row("decode", count, context, count, times))
            _print(rows[-1])
    for count, length in prefill:
        times = [load.run(load.requests(count, length), decode=False) for _ in range(options.repeats + 1)][1:]
        rows.append(_row("prefill", count, length, count * length, times))
        _print(rows[-1])
    return rows


def _print(row: BenchRow) -> None:
    print(
        f"{row.phase:8} {row.requests:8d} {row.tokens_each:7d} {row.median_ms:10.3f} {row.min_ms:10.3f}"
        f" {row.tokens_per_s:10.0f}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. Prints a table; returns 0. Raises SparkinferError for bad input."""
    options = _parser().parse_args(arguments)
    check_options(options, {"steps": 1, "repeats": 1})
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    print(f"{'phase':8} {'requests':>8} {'tokens':>7} {'median ms':>10} {'min ms':>10} {'tok/s':>10}")
    rows = measure(options)
    if options.json is not None:
        document = {
            "schema": SCHEMA,
            "version": sparkinfer.__version__,
            "engine_digest": engine_digest(),
            "model": options.model.name,
            "random_weights": options.load_format == "dummy",
            "device": options.device,
            "dtype": options.dtype,
            **_arithmetic(options),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": {"arch": platform.machine(), "cpus": os.cpu_count()},
            "rows": [asdict(row) for row in rows],
        }
        write_text(options.json, json.dumps(document, indent=1) + "\n")
    return 0
