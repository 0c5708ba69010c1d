"""`mixed_conc_check`: two launches of the server, mixed steps and packing on and off, the same 24 chats at once.

The chats share a system prompt; their user turns are a few to 1500 tokens (less where the model's context is short);
a third each is greedy, seeded, and greedy with log-probabilities. They are sent twice to each server: with an empty
prefix cache and with a warm one. In float32 all tokens must be equal.

In 16 bits a number's rounding depends on what it is computed together with, so every request asks for log-probabilities
and these are compared up to where two answers part. How far they may move is measured, not assumed: further launches
without mixing change everything else about the composition of the passes (where prompts are cut, how many requests
decode at once, the order of arrival); no two prompts share a pass in them. With q(x) the x-quantile of how far
log-probabilities move between the first launch without mixing and those, the same quantile with mixing may be at most
2 q(x), for x = 0.99, 0.999 and 1 (the largest), and a greedy choice may only change between tokens less than 2 q(1)
apart. The quantiles see a fault that reaches many tokens, the largest one a fault that reaches few; on a MoE model the
latter is wide, since rounding may send a token to another expert.

A trace of the steps shows that mixing happened in one launch, tens of times, and not in the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sparkinfer.console import command_line
from sparkinfer.errors import EnvironmentProblem
from sparkinfer.models.config import ModelConfig, load_config
from sparkinfer.runner.memory import resolve_dtype

from . import launch
from .agreement import Agreement, Answer, Top, compare, differences, excused, worst
from .check_program import AT_LEAST, CheckRow, NotApplicable, parser, run
from .corpus import TEXTS, read_text
from .prompts import ChatCounter
from .server_probe import prefix_hits

CHECK = "mixed_conc_check"
CHATS = 24
SHORTEST, LONGEST = 4, 1500
SYSTEM_TOKENS = 200
OUTPUT = 32
ROOM = 64
"""Tokens of context for the chat template and for counts that do not add up."""
LEAST_CONTEXT = 160
KINDS = ("greedy", "seeded", "logprobs")
TOPS = 5
WAVES = ("cold", "warm")
EXACT_LOGPROBS = 1e-3
SHARES = (0.99, 0.999)
"""Quantiles of the differences that are compared beside the largest one."""
SAFETY = 2.0
"""Limits are this many times the quantiles between launches without mixing."""
LEAST_TOLERANCE = 2.0**-5
"""No limit is lower: a few units in the last place of a 16-bit logit."""
COMMON = {"SPARKINFER_LOG_LEVEL": "warning", "SPARKINFER_PREFILL_CHUNK": "1024"}
"""Of all launches. The chats do not fit into one prefill pass, so that some wait while others decode, however they
arrive."""
OFF = {"SPARKINFER_MIXED_CHUNK": "0", "SPARKINFER_PACK_PREFILL": "0", "SPARKINFER_PACK_MOE": "0"}
"""Of all launches but the mixed one: prompts are prefilled one by one, so that nothing a pack does wrong widens the
limits, and everything it does wrong is seen."""
ON_CHUNK = 256
ON = {"SPARKINFER_MIXED_CHUNK": str(ON_CHUNK), "SPARKINFER_PREFILL_CHUNK": str(2 * ON_CHUNK)}
"""Budgets that carry few chats at once, so that there are tens of mixed steps."""
SHARED = 20
"""Chats that take at least the system prompt from the cache."""
TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Launched:
    """What one launch gave: answers by wave, steps that carried prompts beside decoding requests, cached tokens."""

    answers: list[list[Answer]]
    mixed_steps: int
    cached: float


@dataclass(frozen=True, slots=True)
class Least:
    """What a launch must have done to be the test it is named after: mixed steps, and tokens from the cache."""

    mixed_steps: int
    cached: int


def least(context: int) -> Least:
    """Half of the steps that the cold wave's prompts fill, and the system prompt for all chats but the first few."""
    system, turns = turn_lengths(context)
    return Least(max(1, (CHATS * system + sum(turns)) // (2 * ON_CHUNK)), SHARED * system)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A launch without mixing whose passes are composed in another way."""

    name: str
    settings: dict[str, str]
    reverse: bool
    """The chats arrive in the opposite order."""


CALIBRATIONS = (
    Calibration("one by one, prompts cut every 192 tokens, opposite order", {"SPARKINFER_PREFILL_CHUNK": "192"}, True),
    Calibration(
        "one by one, 7 requests at once, prompts cut every 448 tokens",
        {"SPARKINFER_MAX_NUM_SEQS": "7", "SPARKINFER_PREFILL_CHUNK": "448"},
        False,
    ),
)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limits in 16 bits: of the largest difference, and of the quantiles `SHARES`. 0 and none: nothing is excused."""

    largest: float = 0.0
    quantiles: tuple[float, ...] = ()


EXACT = Tolerance()


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))] if ordered else 0.0


def turn_lengths(context: int) -> tuple[int, list[int]]:
    """(system prompt, user turns) in tokens: turns in equal ratios from a few to 1500, all less in a short context.

    Raises NotApplicable when nothing sensible fits.
    """
    if context < LEAST_CONTEXT:
        raise NotApplicable(f"the model's context of {context} tokens is too short: the chats need {LEAST_CONTEXT}")
    share = min(1.0, (context - OUTPUT - ROOM) / (SYSTEM_TOKENS + LONGEST))
    longest = max(SHORTEST, int(LONGEST * share))
    ratio = (longest / SHORTEST) ** (1 / (CHATS - 1))
    lengths = [round(SHORTEST * ratio**number) for number in range(CHATS)]
    # Short and long ones take turns, so that prompts end in different steps.
    return max(1, int(SYSTEM_TOKENS * share)), lengths[::2] + lengths[1::2][::-1]


def chats(model: Path, config: ModelConfig, exact: bool) -> list[dict[str, Any]]:
    """The request bodies, kinds in turn. Raises CheckpointError for a model without tokenizer or chat template."""
    counter = ChatCounter(model)
    text = read_text(TEXTS[0])[: (LONGEST + SYSTEM_TOKENS) * CHATS * 8]
    cuts = counter.cuts(text)
    system_tokens, turns = turn_lengths(config.max_positions)
    system = text[: cuts[system_tokens]]
    place = system_tokens
    bodies = []
    for number, tokens in enumerate(turns):
        user = text[cuts[place] : cuts[place + tokens]]
        place = (place + tokens) % (len(cuts) - LONGEST - 1)
        kind = KINDS[number % len(KINDS)]
        body: dict[str, Any] = {
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
            "max_completion_tokens": OUTPUT,
            "ignore_eos": True,
            "return_token_ids": True,
            "temperature": 0.0,
        }
        if kind == "seeded":
            body |= {"temperature": 0.7, "top_p": 0.95, "top_k": 20, "seed": number}
        if kind == "logprobs" or not exact:
            body |= {"logprobs": True, "top_logprobs": TOPS}
        bodies.append(body)
    return bodies


def _answer(body: dict[str, Any], choice: dict[str, Any], exact: bool) -> Answer:
    """One choice as tokens and tops. Log-probabilities name tokens by their bytes, so in 16 bits the tokens do too."""
    greedy = body["temperature"] == 0
    content = (choice.get("logprobs") or {}).get("content") or []
    tops: list[Top] = [
        {bytes(entry["bytes"]): float(entry["logprob"]) for entry in (*item["top_logprobs"], item)} for item in content
    ]
    if exact:
        return Answer(list(choice["token_ids"]), tops, greedy)
    return Answer([bytes(item["bytes"]) for item in content], tops, greedy)


async def _send(url: str, bodies: Sequence[dict[str, Any]], exact: bool) -> list[Answer]:
    """All chats at once. Raises EnvironmentProblem when one is not answered."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:

        async def one(body: dict[str, Any]) -> Answer:
            answer = await client.post("/v1/chat/completions", json=body)
            if answer.status_code != 200:
                raise EnvironmentProblem(f"a chat was answered with {answer.status_code}: {answer.text[:300]}")
            return _answer(body, answer.json()["choices"][0], exact)

        try:
            return list(await asyncio.gather(*(one(body) for body in bodies)))
        except httpx.HTTPError as error:
            raise EnvironmentProblem(f"a chat was not answered: {error or type(error).__name__}") from error


def mixed_steps(trace: Path) -> int:
    """Steps of a trace that carried prompts beside decoding requests."""
    steps = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    return sum(step.get("d", 0) > 0 and bool(step.get("p")) for step in steps)


def launched(
    options: argparse.Namespace,
    settings: Mapping[str, str],
    bodies: Sequence[dict[str, Any]],
    exact: bool,
    reverse: bool = False,
) -> Launched:
    """Start a server, send both waves, stop it; answers are in the order of `bodies`. Raises as `launch.served`."""
    context = min(load_config(options.model).max_positions, LONGEST + SYSTEM_TOKENS + OUTPUT + ROOM)
    flags = ["--device", options.device, "--dtype", options.dtype, "--max-model-len", str(context)]
    turn = -1 if reverse else 1
    with tempfile.TemporaryDirectory(prefix="mixed-conc-") as folder:
        trace = Path(folder) / "steps.jsonl"
        with launch.served(
            options.model, flags, {**COMMON, "SPARKINFER_STEP_TRACE": str(trace), **settings}, launch.COMMAND
        ) as url:
            answers = [asyncio.run(_send(url, bodies[::turn], exact))[::turn] for _ in WAVES]
            cached = prefix_hits(url)
        return Launched(answers, mixed_steps(trace), cached or 0.0)


def moved(one: Launched, other: Launched) -> list[float]:
    """How far log-probabilities moved from one launch to another, over all waves and chats."""
    return [
        value
        for first, second in zip(one.answers, other.answers, strict=True)
        for mine, its in zip(first, second, strict=True)
        for value in differences(mine, its)
    ]


def calibrated(off: Launched, others: Sequence[Launched]) -> tuple[Tolerance, list[CheckRow]]:
    """The limits, and a row for each launch of the calibration.

    Raises EnvironmentProblem when the passes of a launch came out mixed.
    """
    pooled: list[float] = []
    rows = []
    for calibration, other in zip(CALIBRATIONS, others, strict=True):
        if other.mixed_steps:
            raise EnvironmentProblem(f"calibration ({calibration.name}): {other.mixed_steps} steps were mixed")
        values = moved(off, other)
        pooled += values
        largest = max(values, default=0.0)
        rows.append(CheckRow(f"rounding, {calibration.name}: largest difference", largest, largest, True))
    limits = [max(LEAST_TOLERANCE, SAFETY * quantile(pooled, share)) for share in (*SHARES, 1.0)]
    return Tolerance(limits[-1], tuple(limits[:-1])), rows


def _compare(one: Launched, other: Launched) -> list[list[Agreement]]:
    """By wave and chat."""
    return [
        [compare(mine, its) for mine, its in zip(first, second, strict=True)]
        for first, second in zip(one.answers, other.answers, strict=True)
    ]


def rows_of(off: Launched, on: Launched, tolerance: Tolerance, wanted: Least) -> list[CheckRow]:
    """The rows: what differs by wave and kind, and whether the launches did what they are named after."""
    limit = tolerance.largest or EXACT_LOGPROBS
    rows = []
    for wave, found, answers in zip(WAVES, _compare(off, on), off.answers, strict=True):
        for number, kind in enumerate(KINDS):
            members = list(zip(found, answers, strict=True))[number :: len(KINDS)]
            far = tolerance.largest
            wrong = sum(not excused(item, answer.greedy, far, gap=far) for item, answer in members)
            rows.append(CheckRow(f"{wave} {kind}: answers that differ of {len(members)}", wrong, 0, wrong == 0))
            parted = sum(item.parted is not None for item, _ in members)
            if parted:
                rows.append(CheckRow(f"{wave} {kind}: answers that part", parted, len(members), wrong == 0))
        value = worst(found)
        rows.append(CheckRow(f"{wave}: largest logprob difference", value, limit, value <= limit))
    values = moved(off, on) if tolerance.quantiles else []
    for share, limit in zip(SHARES, tolerance.quantiles, strict=False):
        value = quantile(values, share)
        rows.append(CheckRow(f"{share:.1%} of {len(values)} logprob differences", value, limit, value <= limit))
    steps = on.mixed_steps
    rows.append(CheckRow(f"mixing on: mixed steps {AT_LEAST}", steps, wanted.mixed_steps, steps >= wanted.mixed_steps))
    rows.append(CheckRow("mixing off: mixed steps", off.mixed_steps, 0, off.mixed_steps == 0))
    for name, one in (("on", on), ("off", off)):
        enough = one.cached >= wanted.cached
        rows.append(CheckRow(f"mixing {name}: cached tokens {AT_LEAST}", one.cached, wanted.cached, enough))
    return rows


def check(options: argparse.Namespace) -> tuple[str, list[CheckRow]]:
    """Run the launches and compare."""
    config = load_config(options.model)
    dtype = resolve_dtype(config, options.dtype)
    exact = dtype == "float32"
    bodies = chats(options.model, config, exact)
    off = launched(options, OFF, bodies, exact)
    on = launched(options, ON, bodies, exact)
    wanted = least(config.max_positions)
    if exact:
        return dtype, rows_of(off, on, EXACT, wanted)
    others = [launched(options, OFF | each.settings, bodies, exact, each.reverse) for each in CALIBRATIONS]
    tolerance, rows = calibrated(off, others)
    return dtype, [*rows, *rows_of(off, on, tolerance, wanted)]


@command_line
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of `eval/mixed_conc_check.py`; returns the exit code."""
    return run(CHECK, parser(CHECK, __doc__.splitlines()[0] if __doc__ else None).parse_args(arguments), check)
