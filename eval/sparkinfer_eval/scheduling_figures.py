"""Figures about scheduling, each measured against the goal it was built for, with machine, versions and command.

- cost of `schedule`, `commit` and `add` per step at 32 and 1,000 running requests (no model);
- time to first token of a long shared prompt, cold and from the prefix cache, over HTTP;
- mixed steps on and off: throughput and TTFT of the CPU cells (`mixing_pairs`);
- a burst of 32 prompts: prompts per second, packed and one by one, on the engine's core without HTTP.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import itertools
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import sparkinfer
from sparkinfer.console import command_line
from sparkinfer.engine.core import EngineCore
from sparkinfer.errors import ConfigError, EnvironmentProblem, SparkinferError
from sparkinfer.identity import engine_digest, model_digest
from sparkinfer.models.config import load_config
from sparkinfer.output import require_file, require_folder
from sparkinfer.runner.open_runner import open_runner
from sparkinfer.scheduling.bench import hashing, measure
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.types import Request, SamplingParams

from . import launch, metrics, server_probe
from .closed_loop import closed_loop
from .corpus import TEXTS, read_text
from .figure import MISSED, UNDECIDED, Figure
from .figure_record import SCHEMA, read_earlier, with_kept, write
from .mixing_pairs import mixing
from .paired import CONFIDENCE, FEWEST_PAIRS
from .prompts import ChatCounter
from .report.machine import machine_facts, source_facts

PARTS = ("scheduler_cost", "prefix_hit", "burst", "mixing")
STEP_GOALS = (
    (32, 150.0, 1024, None, ""),
    (1000, 1000.0, 1024, None, ""),
    (1000, 1000.0, 3000, 64, " of 3000 tokens, 64 run"),
)
"""(requests, microseconds per step, prompt tokens, requests that run at most, words for the figure's name)."""
STEP_ROUNDS = 7
"""Runs of the scheduler's benchmark; their median is the figure, since a machine's neighbours slow some of them."""
SHARED_TOKENS = 8192
PREFIX_REPEATS = 3
BURST = 32
BURST_REPEATS = 5
BURST_TOKENS = (32, 128, 512)
QUIET_CPUS = 0.5
"""CPUs that other programs may keep busy. The load average would say what ran a minute ago."""
SAMPLE_S = 2.0


def busy_cpus(seconds: float = SAMPLE_S) -> float:
    """How many CPUs this machine keeps busy while we sleep. Raises EnvironmentProblem where that cannot be read."""

    def times() -> tuple[int, int]:
        try:
            fields = [
                int(field) for field in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
            ]
        except (OSError, ValueError, IndexError) as error:
            raise EnvironmentProblem(
                f"/proc/stat cannot be read ({error}): the figures are measured on Linux"
            ) from error
        return sum(fields[:8]), fields[3] + fields[4]  # Guests are in the first fields already; idle and iowait.

    before = times()
    time.sleep(seconds)
    after = times()
    total = after[0] - before[0]
    idle = after[1] - before[1]
    return (os.cpu_count() or 1) * (total - idle) / total if total else 0.0


def scheduler_cost(options: argparse.Namespace) -> list[Figure]:
    """Microseconds per step in a steady closed loop of chats: the thread's mean CPU time, median of several runs."""
    figures = []
    for requests, goal, prompt, seats, kind in STEP_GOALS:
        runs = (measure(requests, options.steps, prompt, seats=seats) for _ in range(STEP_ROUNDS))
        costs = sorted(runs, key=lambda cost: cost.mean_cpu_us)
        middle = costs[len(costs) // 2]
        note = (
            f"median of {len(costs)} runs of {options.steps} steps, {costs[0].mean_cpu_us:.0f}.."
            f"{costs[-1].mean_cpu_us:.0f} us; p50 {middle.p50_us:.0f}, p99 {middle.p99_us:.0f} us wall; decode-only "
            f"steps {middle.decode_only_mean_cpu_us:.0f} us"
        )
        name = f"schedule + commit + add, {requests} requests{kind}"
        figures.append(Figure("scheduler_cost", name, middle.mean_cpu_us, "us", goal, "below", note))
    costs_there = statistics.median(hashing() for _ in range(STEP_ROUNDS))
    note = f"not in the above: done in the server's process; median of {STEP_ROUNDS} runs"
    return [*figures, Figure("scheduler_cost", "hashes of a prompt of 1024 tokens", costs_there, "us", note=note)]


def prefix_hit(options: argparse.Namespace) -> list[Figure]:
    """TTFT of requests with a shared system prompt: the first one, and later ones from the cache."""
    counter = ChatCounter(options.model)
    context = load_config(options.model).max_positions
    if context < SHARED_TOKENS + 512:
        raise ConfigError(
            f"the model's context of {context} tokens is too short for a shared prompt of {SHARED_TOKENS}"
        )
    text = read_text(TEXTS[0])
    flags = ["--device", options.device, "--dtype", options.dtype, "--max-model-len", str(SHARED_TOKENS + 512)]
    cold, hits, cached = [], [], 0.0
    with launch.served(options.model, flags, {"SPARKINFER_LOG_LEVEL": "warning"}) as url:
        for repeat in range(PREFIX_REPEATS):
            shared = _stretch(counter, text, repeat, SHARED_TOKENS)
            rows = [_chat_row(f"{repeat}-{n}", f"{shared}\n\nQuestion {n}: what is said above?") for n in range(4)]
            server_probe.reset_prefix_cache(url)
            before = server_probe.prefix_hits(url) or 0.0
            # The second request finds the shared blocks but no state at their end, and leaves one there.
            times = [metrics.ttft_ms(closed_loop(url, options.model.name, [row], 1))[0] for row in rows]
            cached += (server_probe.prefix_hits(url) or 0.0) - before
            cold.append(times[0])
            hits += times[2:]
    slow, fast = statistics.median(cold), statistics.median(hits)
    note = f"medians of {len(cold)} cold and {len(hits)} warm requests; {cached:.0f} tokens from the cache in all"
    return [
        Figure("prefix_hit", f"TTFT, {SHARED_TOKENS} shared tokens, cold", slow, "ms"),
        Figure("prefix_hit", f"TTFT, {SHARED_TOKENS} shared tokens, cached", fast, "ms"),
        Figure("prefix_hit", "cold / cached", slow / fast, "x", 10.0, "above", note),
    ]


def _stretch(counter: ChatCounter, text: str, number: int, tokens: int) -> str:
    """That many tokens of text from the corpus's part `number`."""
    size = 8 * tokens
    begin = text.index("\n\n", number * size) + 2
    part = text[begin : begin + size]
    return part[: counter.cuts(part)[tokens - 1]]


def _chat_row(name: str, text: str) -> dict[str, Any]:
    return {"session_id": name, "phase": "profiling", "text": text, "output_length": 4}


def burst(options: argparse.Namespace) -> list[Figure]:
    """32 prompts that arrive together, to their first tokens: prompts per second, packed and one by one."""
    config = load_config(options.model)
    longest = min(config.max_positions, max(BURST_TOKENS) + 16)
    blocks = BURST * -(-longest // 16)
    runner = open_runner(
        options.model,
        device=options.device,
        dtype=options.dtype,
        max_num_seqs=BURST,
        num_kv_blocks=blocks,
        max_model_len=longest,
    )
    generator = torch.Generator().manual_seed(0)

    def rate(tokens: int, packed: bool) -> float:
        schedule = SchedulerConfig(
            max_num_seqs=BURST,
            num_kv_blocks=blocks,
            max_model_len=longest,
            pack_prefill=packed,
            mixed_chunk=0,
            is_moe=config.num_experts > 0,
        )
        core = EngineCore(runner, schedule)
        prompts = torch.randint(0, config.vocab_size, (BURST, tokens), generator=generator).tolist()
        begin = time.perf_counter()
        for number, prompt in enumerate(prompts):
            core.add(Request(f"r{number}", prompt, SamplingParams(1, temperature=0.0, ignore_eos=True)))
        while core.has_work:
            core.step()
        return BURST / (time.perf_counter() - begin)

    figures = []
    for tokens in (t for t in BURST_TOKENS if t < longest):
        rates: dict[bool, list[float]] = {True: [], False: []}
        for _, packed in itertools.product(range(1 + BURST_REPEATS), (True, False)):
            rates[packed].append(rate(tokens, packed))
        # The first round is a warm-up.
        packed_rate, single_rate = (statistics.median(rates[kind][1:]) for kind in (True, False))
        name = f"{BURST} prompts of {tokens} tokens"
        figures += [
            Figure("burst", f"{name}, packed", packed_rate, "prompts/s"),
            Figure("burst", f"{name}, one by one", single_rate, "prompts/s"),
            Figure("burst", f"{name}, packed / one by one", packed_rate / single_rate, "x"),
        ]
    return figures


def document(options: argparse.Namespace, figures: Sequence[Figure], command: Sequence[str]) -> dict[str, Any]:
    """Everything that is recorded."""
    return {
        "schema": SCHEMA,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "machine": machine_facts(),
        "busy_cpus_before": options.busy_before,
        "source": options.source,
        "versions": {"sparkinfer": sparkinfer.__version__, "python": platform.python_version(),
                     "torch": str(torch.__version__)},
        "engine_digest": engine_digest(),
        "model": {"name": options.model.name, "digest": model_digest(options.model), "weights": options.weights},
        "device": options.device,
        "dtype": options.dtype,
        "figures": [{**dataclasses.asdict(figure), "verdict": figure.verdict} for figure in figures],
    }  # fmt: skip


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scheduling_figures.py", description="Measure and record the scheduling figures."
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="model folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for figures.json and figures.md")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="default: all")
    parser.add_argument("--keep", action="store_true", help="keep what OUT holds of the other parts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--weights", default="random weights", help="what the record says of the model (default %(default)s)"
    )
    parser.add_argument("--cells", type=Path, default=Path("config/cells.yaml"))
    parser.add_argument("--scale", default="cpu")
    parser.add_argument(
        "--repeats",
        type=int,
        default=9,
        help=f"pairs of runs for each cell, at least {FEWEST_PAIRS} without --pairs (default %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="runs of each cell on both servers of a pair (default %(default)s)"
    )
    parser.add_argument(
        "--record", type=Path, metavar="FOLDER", help="keep the mixing part's requests and steps for eval/simulate.py"
    )
    parser.add_argument(
        "--pairs",
        type=Path,
        metavar="FILE",
        help="keep the mixing part's pairs there, and judge with those it has (with --repeats 0 those alone)",
    )
    parser.add_argument("--mixing-cells", nargs="+", metavar="ID", help="cells of the mixing part (default: all)")
    parser.add_argument("--steps", type=int, default=1000, help="steps of the scheduler's benchmark")
    parser.add_argument("--busy", action="store_true", help="measure although other programs are running")
    return parser.parse_args(arguments)


@command_line
def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 no goal missed, 1 one is, 2 bad input, 3 environment."""
    options = _options(arguments)
    parts: dict[str, Callable[[argparse.Namespace], Iterable[Figure]]] = {
        "scheduler_cost": scheduler_cost, "prefix_hit": prefix_hit, "mixing": mixing, "burst": burst,
    }  # fmt: skip
    try:
        require_folder(options.out, "--out")
        if options.record is not None:
            require_folder(options.record, "--record")
        if options.steps < 1:
            raise ConfigError(f"--steps {options.steps}: the scheduler's benchmark has at least one step")
        options.busy_before = busy_cpus()
        if options.busy_before > QUIET_CPUS and not options.busy:
            raise EnvironmentProblem(
                f"other programs keep {options.busy_before:.1f} CPUs busy: figures would be those of a busy machine; "
                f"wait until it is below {QUIET_CPUS}, or give --busy"
            )
        # Before anything is written: what is written may lie in the checkout.
        options.source = source_facts(Path(__file__).resolve().parents[2])
        load_config(options.model)
        if options.repeats < 0:
            raise ConfigError(f"--repeats {options.repeats}: a number of pairs is not negative")
        if options.pairs is not None:
            require_file(options.pairs, "--pairs")
        elif "mixing" in options.parts and options.repeats < FEWEST_PAIRS:
            raise ConfigError(
                f"--repeats {options.repeats}: an interval of {CONFIDENCE:.0%} needs at least {FEWEST_PAIRS} pairs"
            )
        if options.rounds < 1:
            raise ConfigError(f"--rounds {options.rounds}: a pair has at least one run of each cell")
        if options.record is not None and options.record.exists():
            raise ConfigError(f"--record {options.record} exists: name a new folder")
        command = ["python", "eval/scheduling_figures.py", *(sys.argv[1:] if arguments is None else arguments)]
        earlier, figures = read_earlier(options.out) if options.keep else None, list[Figure]()
        for name in options.parts:
            for figure in parts[name](options):
                figures.append(figure)
                print(f"{figure.name}: {figure.value:.3f} {figure.unit} {figure.note}", flush=True)
            write(options.out, with_kept(document(options, figures, command), earlier, PARTS))
    except SparkinferError as error:
        print(f"scheduling_figures: {error}", file=sys.stderr)
        return error.exit_code
    missed, open_ = ([figure.name for figure in figures if figure.verdict == v] for v in (MISSED, UNDECIDED))
    print(f"{len(missed)} goals missed: {'; '.join(missed)}" if missed else "no goal missed")
    if open_:
        print(f"{len(open_)} undecided: {'; '.join(open_)}")
    return 1 if missed else 0
