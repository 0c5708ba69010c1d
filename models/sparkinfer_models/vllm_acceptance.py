"""Mean accepted length of a drafter inside vLLM, over the prompts of the reference loop.

vLLM drafts greedily at every temperature unless `draft_sample_method` says otherwise, and goes on past stop tokens with
`ignore_eos`: `train_drafter.py measure --greedy-drafts --ignore-stop` is the reference loop's twin. Each answer says
how many drafts its steps accepted, and the server's counters have to say the same in all. A server without such answers
is read by its counters alone, before and after each group of prompts; a group's sums are then the unit of the error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkinfer.console import command_line
from sparkinfer.errors import ConfigError, EnvironmentProblem, SparkinferError
from sparkinfer_models.acceptance_table import add_compare, compare
from sparkinfer_models.measured import GREEDY, origin, prompts_digest
from sparkinfer_models.vllm_server import Server, causes, end_group, free_port, launch, server_command

DRAFTS = 7
TEMPERATURES = (0.0, 0.7, 1.0)
SETTLE_S = 0.3
"""The last step's counts reach /metrics a moment after its answer."""
COUNTERS_S = 5.0
START_S = 400.0
MAX_MODEL_LEN = 512
COUNTERS = {
    "verifications": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True, slots=True)
class Counts:
    """Of an answer, a group or since a server's start; `per_position`: how often draft 1, 2, ... was accepted."""

    verifications: int
    drafted: int
    accepted: int
    per_position: tuple[int, ...]

    def minus(self, other: Counts) -> Counts:
        """What came between two readings."""
        places = zip(self.per_position, other.per_position or (0,) * len(self.per_position), strict=True)
        return Counts(
            self.verifications - other.verifications,
            self.drafted - other.drafted,
            self.accepted - other.accepted,
            tuple(a - b for a, b in places),
        )

    @classmethod
    def of_histogram(cls, histogram: Sequence[int]) -> Counts:
        """`histogram[j]` steps accepted the first j drafts of `len(histogram) - 1`."""
        steps, drafts = sum(histogram), len(histogram) - 1
        places = tuple(sum(histogram[place:]) for place in range(1, drafts + 1))
        return cls(steps, steps * drafts, sum(places), places)


def parse_counters(text: str) -> Counts:
    """Read vLLM's speculation counters from its Prometheus text. Raises EnvironmentProblem when they are absent."""
    values = {name: 0.0 for name in COUNTERS}
    seen: set[str] = set()
    positions: dict[int, float] = {}
    for line in text.splitlines():
        match = re.match(r"([a-zA-Z_:][\w:]*)(?:\{([^}]*)\})?\s+(\S+)", line)
        if not match:
            continue
        for name, counter in COUNTERS.items():
            if match[1] == counter:
                seen.add(name)
                values[name] += float(match[3])
        place = re.search(r'position="(\d+)"', match[2] or "")
        if match[1] == POSITIONS and place:
            positions[int(place[1])] = positions.get(int(place[1]), 0.0) + float(match[3])
    absent = [COUNTERS[name] for name in COUNTERS if name not in seen]
    if absent:
        raise EnvironmentProblem(f"/metrics has no {', '.join(absent)}: does this server speculate?")
    per_position = tuple(int(positions[place]) for place in sorted(positions))
    return Counts(int(values["verifications"]), int(values["drafted"]), int(values["accepted"]), per_position)


def summarise(temperature: float, prompts: int, unit: str, parts: Sequence[Counts]) -> dict[str, Any]:
    """A row comparable with `acceptance.Acceptance`; `unit` says what a part is, `answer` or `group`.

    Raises ConfigError when nothing was verified.
    """
    accepted, verifications = sum(g.accepted for g in parts), sum(g.verifications for g in parts)
    if not verifications:
        raise ConfigError("no draft was verified: are the answers longer than one token?")
    mean = accepted / verifications
    n = len(parts)
    error = None
    if n > 1:
        # Ratio estimator: drafts of one answer are not independent.
        squares = sum((g.accepted - mean * g.verifications) ** 2 for g in parts)
        error = round(math.sqrt(squares / (n - 1) / n) / (verifications / n), 4)
    places = [sum(place) for place in zip(*(g.per_position for g in parts), strict=True)]
    return {
        "temperature": temperature,
        "prompts": prompts,
        "verifications": verifications,
        "mean": round(mean, 4),
        "standard_error": error,
        "tokens_per_step": round(1 + mean, 4),
        "drafted_per_step": round(sum(g.drafted for g in parts) / verifications, 4),
        "per_position": [round(place / verifications, 4) for place in places],
        "unit": unit,
        "sums": [[g.accepted, g.verifications] for g in parts],
    }


def read_prompts(path: Path) -> list[list[int]]:
    """Prompts as `prompts` wrote them: a JSON list of lists of ids. Raises ConfigError."""
    try:
        rows = json.loads(path.read_text())
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"{path}: {error}: write it with the command `prompts`") from error
    if not rows or not all(isinstance(row, list) and row and all(type(i) is int for i in row) for row in rows):
        raise ConfigError(f"{path} is not a list of lists of token ids: write it with the command `prompts`")
    return rows


def settled(server: Server) -> Counts:
    """The counters, once two readings are equal: earlier answers' counts may be on their way still.

    Raises EnvironmentProblem when they do not come to rest.
    """
    deadline = time.monotonic() + COUNTERS_S
    last = parse_counters(server.get("/metrics"))
    while True:
        time.sleep(SETTLE_S)
        now = parse_counters(server.get("/metrics"))
        if now == last:
            return now
        if time.monotonic() > deadline:
            raise EnvironmentProblem(
                "the counters of /metrics do not come to rest: does something else use this server?"
            )
        last = now


def measure(server: Server, prompts: list[list[int]], tokens: int, temperature: float, at_once: int) -> dict[str, Any]:
    """Answer all prompts, `at_once` at a time. Raises EnvironmentProblem when answers and counters disagree."""
    before = settled(server)
    with ThreadPoolExecutor(at_once) as pool:
        first = server.complete(prompts[0], tokens, temperature, 0)
        if first.histogram is None:
            return _by_groups(server, prompts, tokens, temperature, at_once)
        rest = pool.map(lambda i: server.complete(prompts[i], tokens, temperature, i), range(1, len(prompts)))
        histograms = [first.histogram, *(answer.histogram for answer in rest)]
    parts = [Counts.of_histogram(histogram) for histogram in histograms if histogram is not None]
    total = sum(part.verifications for part in parts), sum(part.accepted for part in parts)
    deadline = time.monotonic() + COUNTERS_S
    while True:
        counted = parse_counters(server.get("/metrics")).minus(before)
        if (counted.verifications, counted.accepted) == total:
            return summarise(temperature, len(prompts), "answer", parts)
        if time.monotonic() > deadline:
            raise EnvironmentProblem(
                f"the answers tell of {total[0]} verifications and {total[1]} accepted drafts, /metrics of "
                f"{counted.verifications} and {counted.accepted}: does something else use this server?"
            )
        time.sleep(0.1)


def _by_groups(
    server: Server, prompts: list[list[int]], tokens: int, temperature: float, at_once: int
) -> dict[str, Any]:
    groups = []
    before = settled(server)
    with ThreadPoolExecutor(at_once) as pool:
        for first in range(0, len(prompts), at_once):
            group = list(enumerate(prompts))[first : first + at_once]
            list(pool.map(lambda item: server.complete(item[1], tokens, temperature, item[0]), group))
            now = settled(server)
            groups.append(now.minus(before))
            before = now
    return summarise(temperature, len(prompts), "group", groups)


def speculation(drafter: Path, drafts: int = DRAFTS, probabilistic: bool = False) -> dict[str, object]:
    """vLLM's `--speculative-config`."""
    config: dict[str, object] = {"method": "dflash", "model": str(drafter.absolute()), "num_speculative_tokens": drafts}
    return config | ({"draft_sample_method": "probabilistic"} if probabilistic else {})


@contextlib.contextmanager
def started(args: argparse.Namespace) -> Iterator[Server]:
    """vLLM with the drafter, ready. Raises EnvironmentProblem with the end of its log when it does not come up."""
    port = free_port()
    server = Server(f"http://127.0.0.1:{port}")
    speculative = speculation(args.drafter, args.drafts, args.probabilistic)
    command = server_command(
        args.python,
        args.target,
        port,
        max_model_len=args.max_model_len,
        dtype=args.dtype,
        speculative=speculative,
        extra=args.vllm_arg,
    )
    process = launch(command, args.log)
    try:
        deadline = time.monotonic() + args.start_s
        while not server.ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise EnvironmentProblem(f"vLLM did not come up (log {args.log}):\n{causes(args.log)}")
            time.sleep(0.5)
        yield server
    finally:
        end_group(process.pid)
        process.wait()


def document(
    server: Server, target: Path, drafter: Path, rows: list[dict[str, Any]], **facts: object
) -> dict[str, Any]:
    """What is kept of a measurement."""
    version = json.loads(server.get("/version"))["version"]
    return {
        "engine": f"vLLM {version}",
        "target": target.name,
        "drafter": drafter.name,
        "ignore_stop": True,
        **facts,
        "rows": rows,
    }


def write_document(path: Path, content: dict[str, Any]) -> None:
    """To a temporary name first."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(content) + "\n")
    temporary.replace(path)


def run(args: argparse.Namespace) -> None:
    """Print one JSON row for each temperature, and write them to `--json`."""
    prompts = read_prompts(args.prompts)[: args.limit or None]
    if max(map(len, prompts)) + args.tokens > args.max_model_len:
        raise ConfigError(f"--max-model-len {args.max_model_len} is too short for these prompts and --tokens")
    rows = []
    begun = time.monotonic()
    with started(args) if args.url is None else contextlib.nullcontext(Server(args.url, args.model)) as server:
        print(json.dumps({"ready_s": round(time.monotonic() - begun, 1)}), flush=True)
        server.complete(prompts[0], args.tokens, 0.0, 0)
        for temperature in args.temperatures:
            rows.append(measure(server, prompts, args.tokens, temperature, args.at_once))
            print(json.dumps({key: value for key, value in rows[-1].items() if key != "sums"}), flush=True)
        if args.json:
            facts: dict[str, Any] = {"dtype": args.dtype, "drafts": args.drafts, "tokens": args.tokens}
            facts["draft_sample_method"] = "probabilistic" if args.probabilistic else GREEDY
            facts["prompts_sha256"] = prompts_digest(prompts)
            facts |= origin(args.target, args.drafter, args.argv)
            write_document(args.json, document(server, args.target, args.drafter, rows, **facts))


def write_prompts(args: argparse.Namespace) -> None:
    """Write the held-out prompts of the reference loop as JSON."""
    from sparkinfer_models.acceptance import held_out_prompts

    rows = held_out_prompts(args.data, args.count, args.length)
    args.out.write_text(json.dumps(rows) + "\n")
    print(f"{len(rows)} prompts of {args.length} tokens in {args.out}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description="Mean accepted length of a DFlash2 drafter inside vLLM.")
    commands = top.add_subparsers(dest="command", required=True)
    prompts = commands.add_parser("prompts", help="write the prompts that `train_drafter.py measure` decodes")
    prompts.add_argument("--data", type=Path, required=True, help="folder that `train.py prepare` wrote")
    prompts.add_argument("--count", type=int, default=64)
    prompts.add_argument("--length", type=int, default=128)
    prompts.add_argument("--out", type=Path, required=True)
    command = commands.add_parser("run", help="start vLLM with the drafter, answer the prompts, read what was accepted")
    command.add_argument("--target", type=Path, required=True)
    command.add_argument("--drafter", type=Path, required=True)
    command.add_argument("--prompts", type=Path, required=True, help="file that `prompts` wrote")
    command.add_argument("--limit", type=int, default=0, help="take so many prompts only")
    command.add_argument("--tokens", type=int, default=128, help="length of each answer; stop tokens are ignored")
    command.add_argument("--temperatures", type=float, nargs="+", default=list(TEMPERATURES))
    command.add_argument("--at-once", type=int, default=8, help="prompts that are answered together")
    command.add_argument("--drafts", type=int, default=DRAFTS)
    command.add_argument("--probabilistic", action="store_true", help="drafts with the request's temperature")
    command.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    command.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
    command.add_argument("--python", default=sys.executable, help="interpreter that has vLLM")
    command.add_argument("--vllm-arg", action="append", default=[], metavar="ARG", help="one more argument for vLLM")
    command.add_argument("--start-s", type=float, default=START_S, help="seconds until vLLM must be up")
    command.add_argument("--url", help="a server that runs already, instead of starting one")
    command.add_argument("--model", default="target", help="name of the model at --url")
    command.add_argument("--log", type=Path, default=Path("vllm.log"))
    command.add_argument("--json", type=Path)
    add_compare(commands)
    return top


@command_line
def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code: 1 they differ, 2 bad input, 3 vLLM cannot be had."""
    args = parser().parse_args(argv)
    args.argv = ["vllm_acceptance.py", *(sys.argv[1:] if argv is None else argv)]
    try:
        return {"prompts": write_prompts, "run": run, "compare": compare}[args.command](args) or 0
    except SparkinferError as error:
        print(f"vllm_acceptance.py: {error}", file=sys.stderr)
        return error.exit_code
