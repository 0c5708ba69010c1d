"""Command line of eval/spec_open_arrivals.py: alone against any URL, or as a cell of a run."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

from sparkinfer.console import command_line
from sparkinfer.errors import ConfigError, SparkinferError
from sparkinfer.output import require_file, write_text

from . import gates
from .arrival_plan import Arrival, poisson_plan
from .arrivals import all_failed, figures, measure, rate_gate, render, send_all, served_model
from .corpus import paragraphs, read_text
from .prompts import read_prompts
from .run_cell import add_cell_options, add_target_options, cell_from, end_on_sigterm, target_from
from .server_probe import require_url

RATE_LIMIT = 0.02


def own_rows(rate: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows for use alone: corpus text of about the asked length (no tokenizer at hand), the plan from the seed."""
    rng = random.Random(f"texts/{options.seed}/{rate}")
    blocks = [block for block in paragraphs(read_text("english.txt")) if block[0].isalnum()]
    rows: list[dict[str, Any]] = []
    for index, arrival in enumerate([None, None, *plan(rate, options)]):
        text = ""
        while len(text) < 4 * options.prompt_tokens:
            text += ("\n\n" if text else "") + rng.choice(blocks)
        row = {
            "session_id": f"r{rate:g}-{index:04d}",
            "phase": "warmup" if arrival is None else "profiling",
            "text": text[: 4 * options.prompt_tokens].strip(),
            "output_length": options.short_tokens if arrival is None else arrival.output_tokens,
        }
        if arrival is not None:
            row |= {"label": arrival.label, "timestamp": arrival.at_s * 1000, "extra": {"seed": arrival.seed}}
        rows.append(row)
    return rows


def plan(rate: float, options: argparse.Namespace) -> list[Arrival]:
    """The arrivals of one rate. Raises ConfigError on impossible numbers."""
    return poisson_plan(
        options.requests, rate, options.short_share, options.short_tokens, tuple(options.long_tokens),
        f"{options.seed}/{rate}",
    )  # fmt: skip


def check_load(options: argparse.Namespace) -> None:
    """Raise ConfigError for a load that cannot be sent, at whichever rate, before any is."""
    for rate in options.rate:
        plan(rate, options)
    if options.prompt_tokens < 1:
        raise ConfigError(f"--prompt-tokens {options.prompt_tokens}: must be at least 1")
    for name in ("temperature", "top_p"):
        if not math.isfinite(getattr(options, name)):
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be a finite number")
    if not 0 < options.timeout < math.inf:
        raise ConfigError(f"--timeout {options.timeout:g}: must be above 0 seconds and finite")


def run_alone(options: argparse.Namespace) -> dict[str, Any]:
    """Every rate in turn, printed as it ends.

    Raises ConfigError for a load that cannot be sent, gates.InvalidRun when a request fails or the rate is off.
    """
    check_load(options)
    served_name = options.served_name or served_model(options.url)
    sampling = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
    found = {}
    for rate in options.rate:
        rows = own_rows(rate, options)
        print(f"{rate:g} requests/s, {options.requests} requests", flush=True)
        sent = asyncio.run(send_all(options.url, served_name, rows, sampling, options.timeout, not options.stop_at_eos))
        records = [item.record for item in sent]
        reason = all_failed(records)
        if reason is not None:
            raise gates.InvalidRun(reason)
        gates.require([gates.errors(records), rate_gate(records, rate, RATE_LIMIT)], f"the run at {rate:g} requests/s")
        found[f"{rate:g}"] = figures(sent)
        print(render(found[f"{rate:g}"]), flush=True)
    return found


def run_as_cell(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """One cell of a run, published as a result folder."""
    needed = ("scale", "cell", "prompts", "run", "engine", "engine_version", "engine_digest", "model_name", "model")
    missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(options, name) is None]
    if missing:
        raise ConfigError(f"--out writes a result folder of a run: {', '.join(missing)} missing")
    cell = cell_from(options)
    if cell.kind != "poisson":
        raise ConfigError(f"cell {cell.id} is {cell.kind}: measure it with eval/run_cell.py")
    words = ["eval/spec_open_arrivals.py", "--url", options.url, "--scale", options.scale, "--cell", cell.id]
    words += ["--overrides", options.overrides] if options.overrides != "{}" else []
    words += ["--prompts", options.prompts.name, "--block", str(options.block), "--rep", str(options.rep)]
    result = measure(
        options.url,
        options.served_name or options.model_name,
        cell,
        read_prompts(options.prompts),
        target_from(options),
        words,
    )
    print(render(result.tool_summary))
    return {cell.id: result.tool_summary}


def build_parser(root: Path) -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description="Poisson arrivals against an OpenAI-compatible server; prints tokens over makespan, latencies and "
        "counts per class. Exit codes: 0 done, 1 not a result, 2 bad input, 3 the server cannot be reached.",
    )
    parser.add_argument("--url", required=True, help="base URL of the running server")
    parser.add_argument("--served-name", help="model name (default: the first that /v1/models lists)")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    alone = parser.add_argument_group("use alone (ignored with --out)")
    alone.add_argument("--rate", type=float, nargs="+", default=[1.0, 2.0], help="requests per second")
    alone.add_argument("--requests", type=int, default=80)
    alone.add_argument("--seed", type=int, default=0)
    alone.add_argument("--prompt-tokens", type=int, default=256, help="about this long; the server's count is exact")
    alone.add_argument("--short-share", type=float, default=0.2)
    alone.add_argument("--short-tokens", type=int, default=32)
    alone.add_argument("--long-tokens", type=int, nargs=2, default=[128, 768], metavar=("LOW", "HIGH"))
    alone.add_argument("--temperature", type=float, default=0.7)
    alone.add_argument("--top-p", type=float, default=0.95)
    alone.add_argument("--top-k", type=int, default=20)
    alone.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    alone.add_argument("--stop-at-eos", action="store_true", help="let answers end early (default: ignore_eos)")
    add_cell_options(parser, root, required=False)
    add_target_options(parser, required=False)
    parser.add_argument("--model", type=Path, help="model folder, for its digest (with --out)")
    return parser


@command_line
def main(root: Path, arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = build_parser(root).parse_args(arguments)
    end_on_sigterm()
    try:
        require_url(options.url)
        if options.json is not None:
            require_file(options.json, "--json")
        found = run_alone(options) if options.out is None else run_as_cell(options, root)
        if options.json is not None:
            write_text(options.json, json.dumps(found, indent=2) + "\n")
    except SparkinferError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
