"""Mean accepted length of a drafter inside vLLM: its server, its counters, the prompts of the reference loop.

vLLM drafts greedily at every temperature unless `draft_sample_method` says otherwise, and goes on past stop tokens with
`ignore_eos`: `train_drafter.py measure --greedy-drafts --ignore-stop` is the reference loop's twin. Its counters
are read before and after each group of prompts; a group's sums are the unit of the standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError, EnvironmentProblem, SparkinferError

DRAFTS = 7
TEMPERATURES = (0.0, 0.7, 1.0)
SETTLE_S = 0.3
START_S = 400.0
STOP_S = 20.0
COUNTERS = {
    "verifications": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True, slots=True)
class Counts:
    """vLLM's counters since its start; `per_position` holds how often draft 1, 2, ... was accepted."""

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


def summarise(temperature: float, prompts: int, groups: Sequence[Counts]) -> dict[str, Any]:
    """A row comparable with `acceptance.Acceptance`. Raises ConfigError when nothing was verified."""
    accepted, verifications = sum(g.accepted for g in groups), sum(g.verifications for g in groups)
    if not verifications:
        raise ConfigError("no draft was verified: are the answers longer than one token?")
    mean = accepted / verifications
    n = len(groups)
    error = None
    if n > 1:
        # Ratio estimator over groups: drafts of one answer are not independent.
        squares = sum((g.accepted - mean * g.verifications) ** 2 for g in groups)
        error = round(math.sqrt(squares / (n - 1) / n) / (verifications / n), 4)
    places = [sum(place) for place in zip(*(g.per_position for g in groups), strict=True)]
    return {
        "temperature": temperature,
        "prompts": prompts,
        "verifications": verifications,
        "mean": round(mean, 4),
        "standard_error": error,
        "tokens_per_step": round(1 + mean, 4),
        "drafted_per_step": round(sum(g.drafted for g in groups) / verifications, 4),
        "per_position": [round(place / verifications, 4) for place in places],
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


class Server:
    """A running server. `url` has no trailing slash."""

    def __init__(self, url: str, model: str, timeout_s: float = 300.0) -> None:
        self.url, self.model, self._timeout_s = url, model, timeout_s

    def get(self, path: str) -> str:
        """Raises EnvironmentProblem when the server does not answer with 200."""
        return self._read(urllib.request.Request(self.url + path))

    def complete(self, prompt: list[int], tokens: int, temperature: float, seed: int) -> None:
        """One answer of exactly `tokens` tokens. Raises EnvironmentProblem when it is anything else."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": temperature}
        data = json.dumps({**body, "seed": seed, "ignore_eos": True}).encode()
        headers = {"Content-Type": "application/json"}
        answer = json.loads(self._read(urllib.request.Request(self.url + "/v1/completions", data, headers)))
        count = answer["usage"]["completion_tokens"]
        if count != tokens:
            raise EnvironmentProblem(f"the server answered with {count} tokens, {tokens} were asked for")

    def _read(self, request: urllib.request.Request) -> str:
        # A proxy of the environment is not asked for a server of this host.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self._timeout_s) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:300]
            raise EnvironmentProblem(f"{request.full_url} answered {error.code}: {text}") from error
        except OSError as error:
            raise EnvironmentProblem(f"{request.full_url} does not answer: {error}") from error


def measure(server: Server, prompts: list[list[int]], tokens: int, temperature: float, at_once: int) -> dict[str, Any]:
    """Answer all prompts in groups of `at_once` and take the counters between them."""
    groups = []
    before = parse_counters(server.get("/metrics"))
    with ThreadPoolExecutor(at_once) as pool:
        for first in range(0, len(prompts), at_once):
            group = list(enumerate(prompts))[first : first + at_once]
            list(pool.map(lambda item: server.complete(item[1], tokens, temperature, item[0]), group))
            # The last step's counts reach /metrics a moment after its answer.
            time.sleep(SETTLE_S)
            now = parse_counters(server.get("/metrics"))
            groups.append(now.minus(before))
            before = now
    return summarise(temperature, len(prompts), groups)


def server_command(args: argparse.Namespace, port: int) -> list[str]:
    """vLLM's command line."""
    speculative = {"method": "dflash", "model": str(args.drafter.absolute()), "num_speculative_tokens": args.drafts}
    if args.probabilistic:
        speculative["draft_sample_method"] = "probabilistic"
    command = [args.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(args.target.absolute())]
    command += ["--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port), "--dtype", args.dtype]
    command += ["--max-model-len", str(args.max_model_len), "--speculative-config", json.dumps(speculative)]
    return command + args.vllm_arg


@contextlib.contextmanager
def started(args: argparse.Namespace) -> Iterator[Server]:
    """vLLM with the drafter, ready. Raises EnvironmentProblem with the end of its log when it does not come up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", "target")
    with args.log.open("wb") as log:
        # `python -m` looks for modules in the working folder first: this project's own folders must not be there.
        process = subprocess.Popen(
            server_command(args, port),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=args.log.absolute().parent,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        )
    try:
        deadline = time.monotonic() + args.start_s
        while True:
            try:
                server.get("/health")
                break
            except EnvironmentProblem as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    lines = args.log.read_text(errors="replace").splitlines()
                    # The cause of a dead engine stands before the server's own traceback.
                    causes = [line for line in lines if "Error" in line][-8:]
                    text = "\n".join([*causes, *lines[-10:]])
                    raise EnvironmentProblem(f"vLLM did not come up (log {args.log}):\n{text}") from error
                time.sleep(0.5)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        if process.poll() is None:
            process.kill()
            process.wait()


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
            print(json.dumps(rows[-1]), flush=True)
        version = json.loads(server.get("/version"))["version"]
    if args.json:
        summary = {"engine": f"vLLM {version}", "target": args.target.name, "drafter": args.drafter.name}
        summary |= {"dtype": args.dtype, "drafts": args.drafts, "tokens": args.tokens, "ignore_stop": True}
        summary |= {"draft_sample_method": "probabilistic" if args.probabilistic else "greedy", "rows": rows}
        temporary = args.json.with_name(args.json.name + ".part")
        temporary.write_text(json.dumps(summary, indent=1) + "\n")
        temporary.replace(args.json)


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
    command = commands.add_parser("run", help="start vLLM with the drafter, answer the prompts, read its counters")
    command.add_argument("--target", type=Path, required=True)
    command.add_argument("--drafter", type=Path, required=True)
    command.add_argument("--prompts", type=Path, required=True, help="file that `prompts` wrote")
    command.add_argument("--limit", type=int, default=0, help="take so many prompts only")
    command.add_argument("--tokens", type=int, default=128, help="length of each answer; stop tokens are ignored")
    command.add_argument("--temperatures", type=float, nargs="+", default=list(TEMPERATURES))
    command.add_argument("--at-once", type=int, default=8, help="prompts in a group, answered together")
    command.add_argument("--drafts", type=int, default=DRAFTS)
    command.add_argument("--probabilistic", action="store_true", help="drafts with the request's temperature")
    command.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    command.add_argument("--max-model-len", type=int, default=512)
    command.add_argument("--python", default=sys.executable, help="interpreter that has vLLM")
    command.add_argument("--vllm-arg", action="append", default=[], metavar="ARG", help="one more argument for vLLM")
    command.add_argument("--start-s", type=float, default=START_S, help="seconds until vLLM must be up")
    command.add_argument("--url", help="a server that runs already, instead of starting one")
    command.add_argument("--model", default="target", help="name of the model at --url")
    command.add_argument("--log", type=Path, default=Path("vllm.log"))
    command.add_argument("--json", type=Path)
    return top


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code: 2 bad input, 3 vLLM cannot be had."""
    args = parser().parse_args(argv)
    try:
        {"prompts": write_prompts, "run": run}[args.command](args)
    except SparkinferError as error:
        print(f"vllm_acceptance.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0
