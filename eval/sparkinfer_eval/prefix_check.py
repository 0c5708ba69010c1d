"""`prefix_check`: answers that start from cached prefixes against answers computed from nothing.

Prompt lengths of 0, 1, 2, 15, 16 and 17 tokens beyond multiples of the KV block, up to several chunks, three warm
replays each; prompts that end 0 to 17 tokens behind a checkpoint; a chat over three turns; requests cancelled in
their prompt and in their answer; cancelled, or the cache reset, while a row that decodes, a restore or a checkpoint is
under way; a crowd that is preempted, with one step and with two in flight. In float32 tokens
must be equal and states within 1e-4 of their largest value; in 16 bits tokens may part at a near-tie, judged by
tolerances of log-probabilities and states that are calibrated on such prompts without any cache, cut into other chunks.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sparkinfer.arguments import seed
from sparkinfer.console import command_line
from sparkinfer.scheduling.invariants import IntegrityError
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, Request, Row, SamplingParams, StepPlan

from .agreement import compare, excused, worst
from .check_program import AT_LEAST, CheckRow, NotApplicable, parser, run
from .pack_ckpt import LIMITS, relative_difference
from .prefix_bench import HOST_BLOCKS, Bench, Result, Session

CHECK = "prefix_check"
OFFSETS = (0, 1, 2, 15, 16, 17)
BLOCKS = (0, 1, 4, 8, 19)
EVENTS: dict[str, Callable[[Row], bool]] = {
    "decode": lambda row: row.is_decode,
    "restore": lambda row: row.restore is not None,
    "checkpoint": lambda row: bool(row.checkpoints),
}
"""What a row of a step under way does."""
OUTPUT = 8
REPLAYS = 3
LEAST_TOLERANCE = 2.0**-5
"""Nats. In 16 bits two ways to cut a prompt differ by about as much on models whose logits reach 10."""
SAFETY = 3.0
"""The tolerance is this many times the largest difference that the calibration finds."""
CUTS = (16, 48, 112)
"""Chunks in tokens that the calibration cuts prompts into."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What rounding explains: nats of a log-probability, and of a state the share of its largest value."""

    logprob: float
    state: float


class Judge:
    """Holds results against cold ones and collects rows."""

    def __init__(self, dtype: str, tolerance: Tolerance | None = None) -> None:
        self.tolerance = tolerance.logprob if tolerance else 0.0
        self.state_limit = tolerance.state if tolerance else LIMITS[dtype]
        self.rows: list[CheckRow] = []

    def agree(self, name: str, pairs: Sequence[tuple[Result, Result]]) -> None:
        """(cold, other) results of one case: tokens, then states where all tokens are equal."""
        found = [compare(cold.answer, other.answer) for cold, other in pairs]
        wrong = sum(
            not excused(item, cold.answer.greedy, self.tolerance) for item, (cold, _) in zip(found, pairs, strict=True)
        )
        self.rows.append(CheckRow(f"{name}: answers that differ of {len(pairs)}", wrong, 0, wrong == 0))
        limit = self.tolerance or 1e-3
        self.rows.append(CheckRow(f"{name}: logprobs", worst(found), limit, worst(found) <= limit))
        states = [_states(*pair) for item, pair in zip(found, pairs, strict=True) if item.parted is None]
        value = max((state for state in states if state is not None), default=None)
        if value is not None:
            self.rows.append(CheckRow(f"{name}: state", value, self.state_limit, value <= self.state_limit))

    def at_least(self, name: str, value: float, limit: float) -> None:
        """A count that shows that the case tests what it says."""
        self.rows.append(CheckRow(f"{name} {AT_LEAST}", value, limit, value >= limit))

    def books(self, name: str, session: Session) -> None:
        """Run the session to its end and check its books."""
        try:
            session.finish()
        except IntegrityError as error:
            print(f"{name}: {error}")
            self.rows.append(CheckRow(f"{name}: books balance", 1, 0, False))


def _states(cold: Result, other: Result) -> float | None:
    if cold.state is None or other.state is None or cold.window is None or other.window is None:
        return None
    return max(relative_difference(cold.state, other.state), relative_difference(cold.window, other.window))


def lengths(longest: int) -> Iterator[tuple[str, int]]:
    """(name, prompt tokens) of the length cases that leave room for an answer."""
    for blocks in BLOCKS:
        for offset in OFFSETS:
            length = blocks * KV_BLOCK_TOKENS + offset
            if 1 <= length <= longest - OUTPUT:
                yield f"{blocks} blocks + {offset}", length


def check_lengths(bench: Bench, judge: Judge) -> None:
    """Each length written into an empty cache, then three times from it."""
    for number, (name, length) in enumerate(lengths(bench.longest)):
        prompt, sampling = bench.tokens(length), bench.sampling(OUTPUT, number)
        cold = bench.cold(prompt, sampling)
        session = bench.session()
        others = [session.run([bench.request(prompt, sampling)])[0] for _ in range(1 + REPLAYS)]
        judge.agree(f"{name} tokens", [(cold, other) for other in others])
        if length >= 2 * KV_BLOCK_TOKENS:
            least = min(other.cached for other in others[1:])
            judge.at_least(f"{name} tokens: cached", least, (length // KV_BLOCK_TOKENS - 1) * KV_BLOCK_TOKENS)


def check_tails(bench: Bench, judge: Judge) -> None:
    """Prompts that end few tokens behind a checkpoint, on the cached text and off it."""
    for blocks in (2, 4, 13):
        position = blocks * KV_BLOCK_TOKENS
        if position + 2 * KV_BLOCK_TOKENS + OUTPUT > bench.longest:
            continue
        stem = bench.tokens(position + KV_BLOCK_TOKENS + 3)
        for number, offset in enumerate(OFFSETS):
            session = bench.session()
            session.run([bench.request(stem, bench.sampling(1))])
            sampling = bench.sampling(OUTPUT, number)
            prompts = [stem[: position + offset], stem[:position] + bench.tokens(offset)]
            results = [session.run([bench.request(prompt, sampling)])[0] for prompt in prompts]
            cold = [bench.cold(prompt, sampling) for prompt in prompts]
            judge.agree(f"{offset} tokens behind a checkpoint at {position}", list(zip(cold, results, strict=True)))
            if offset:
                least = min(result.cached for result in results)
                judge.at_least(f"{offset} tokens behind a checkpoint at {position}: cached", least, position)


def check_turns(bench: Bench, judge: Judge) -> None:
    """A chat: each turn's prompt is all that was said before and a new question."""
    session, said, sampling = bench.session(), bench.tokens(70), bench.sampling(40)
    prompts, results = [], []
    for turn in range(3):
        prompts.append(said)
        results.append(session.run([bench.request(said, sampling)])[0])
        said = [*said, *results[-1].tokens, *bench.tokens(20 + turn)]
    judge.agree("turns of a chat", [(bench.cold(p, sampling), r) for p, r in zip(prompts, results, strict=True)])
    cached = [result.cached for result in results]
    judge.at_least("second turn: cached, of the first answer too", cached[1], 80)
    judge.at_least("third turn: cached", cached[2], cached[1] + 2 * KV_BLOCK_TOKENS)


def check_cancelled(bench: Bench, judge: Judge) -> None:
    """Requests cancelled in their prompt, in their answer, and beside one with the same prompt."""
    for name, length, steps in (("its prompt", 250, 1), ("its answer", 100, 20)):
        prompt, sampling = bench.tokens(length), bench.sampling(30)
        session = bench.session()
        victim = bench.request(prompt, sampling)
        session.core.add(victim)
        for _ in range(steps):
            session.step()
        done = list(victim.output)
        judge.at_least(f"cancelled in {name}: tokens computed", victim.num_computed, 1)
        session.core.abort([victim.id])
        judge.books(f"cancelled in {name}", session)
        prompts = [prompt, prompt, prompt + done + bench.tokens(5)] * 2
        results = [session.run([bench.request(again, sampling)])[0] for again in prompts]
        cold = [bench.cold(again, sampling) for again in prompts]
        judge.agree(f"after one cancelled in {name}", list(zip(cold, results, strict=True)))
    prompt, sampling = bench.tokens(90), bench.sampling(30)
    session = bench.session()
    victim, other = bench.request(prompt, sampling), bench.request(prompt, sampling)
    session.core.add(victim)
    session.step()
    session.core.add(other)
    for _ in range(10):
        session.step()
    session.core.abort([victim.id])
    judge.books("cancelled beside its twin", session)
    judge.agree("the twin of a cancelled one", [(bench.cold(prompt, sampling), session.results[other.id])])


@dataclass
class Interruption:
    """Cancels a request, or resets the cache, once, while a plan with a row of it that `concerns` is under way."""

    session: Session
    victim: Request
    concerns: Callable[[Row], bool]
    cancels: bool
    times: int = 0

    def __call__(self, plan: StepPlan) -> None:
        if self.times or not any(row.request is self.victim and self.concerns(row) for row in plan.rows):
            return
        self.times += 1
        if self.cancels:
            self.session.core.abort([self.victim.id])
        else:
            self.session.core.reset_cache()


def check_in_flight(bench: Bench, judge: Judge) -> None:
    """A request cancelled, or the cache reset, while a step decodes for it, restores its state or saves it."""
    for number, (event, action, in_flight) in enumerate(itertools.product(EVENTS, ("cancel", "reset"), (1, 2))):
        name = f"{action} during a {event}, {in_flight} in flight"
        prompt, sampling = bench.tokens(100 + OFFSETS[number % len(OFFSETS)]), bench.sampling(30)
        session = bench.session(max_in_flight=in_flight)
        if event == "restore":
            session.run([bench.request(prompt, sampling)])
        victim, other = bench.request(prompt, sampling), bench.request(prompt[:70] + prompt[:9], sampling)
        interruption = Interruption(session, victim, EVENTS[event], action == "cancel")
        session.watched.during = interruption
        session.core.add(victim)
        session.core.add(other)
        judge.books(name, session)
        session.watched.during = None
        judge.at_least(f"{name}: times", interruption.times, 1)
        again = [(prompt, session.run([bench.request(prompt, sampling)])[0]) for _ in range(2)]
        ran = [(other.prompt, session.results[other.id])]
        if action == "reset":
            ran.append((prompt, session.results[victim.id]))
        judge.agree(name, [(bench.cold(given, sampling), result) for given, result in ran + again])
        judge.at_least(f"{name}: cached afterwards", again[1][1].cached, 64)


def crowd(bench: Bench) -> list[tuple[list[int], SamplingParams]]:
    """Ten requests with shared beginnings of several lengths, greedy and seeded."""
    stems = [bench.tokens(120) for _ in range(2)]
    load = []
    for number in range(10):
        shared = stems[number % 2][: (40, 64, 96, 112)[number % 4]]
        prompt = shared + bench.tokens(OFFSETS[number % len(OFFSETS)])
        load.append((prompt, bench.sampling((60, 20, 50)[number % 3], number)))
    return load


def check_preempted(bench: Bench, judge: Judge) -> None:
    """A crowd on too few KV blocks, twice, with one step in flight and with two; evicted KV moves to the host."""
    length = min(bench.longest, 256)
    # Three long requests fill the pool before they end.
    blocks = -(-length // KV_BLOCK_TOKENS) + 6
    load = crowd(bench)
    cold = [bench.cold(prompt, sampling) for prompt, sampling in load]

    def requests() -> list[Request]:
        return [bench.request(prompt, sampling) for prompt, sampling in load]

    for in_flight in (1, 2):
        session = bench.session(
            num_kv_blocks=blocks,
            max_model_len=length,
            num_snapshots=6,
            num_host_blocks=HOST_BLOCKS,
            max_in_flight=in_flight,
        )
        for name in ("first", "warm"):
            results = session.run(requests(), gap=1)
            judge.agree(f"{name} crowd, {in_flight} in flight", list(zip(cold, results, strict=True)))
        stats = session.core.stats()
        judge.at_least(f"crowd, {in_flight} in flight: preemptions", stats.preemptions, 1)
        judge.at_least(f"crowd, {in_flight} in flight: tokens from the cache", stats.prefix_hits_tokens, 100)


def calibrate(bench: Bench) -> Tolerance:
    """What two ways without any cache differ by: lengths cut into chunks of three sizes, and three crowds, one packed.

    About as many positions are compared as the check compares: a difference that turns an expert's choice is rare and
    large, and a calibration that sees few positions misses it.
    """
    pairs: list[tuple[Result, Result]] = []
    for number, (_, length) in enumerate(lengths(bench.longest)):
        prompt, sampling = bench.tokens(length), bench.sampling(OUTPUT, number)
        cold = bench.cold(prompt, sampling)
        for chunk in CUTS:
            if length > chunk:
                session = bench.session(num_snapshots=0, prefill_chunk=chunk, mixed_chunk=0, chunk_align=16)
                pairs.append((cold, session.run([bench.request(prompt, sampling)])[0]))
    for gap in (0, 1, 3):
        load, session = crowd(bench), bench.session(num_snapshots=0)
        results = session.run([bench.request(prompt, sampling) for prompt, sampling in load], gap=gap)
        pairs += [(bench.cold(*given), result) for given, result in zip(load, results, strict=True)]
    found = [compare(cold.answer, other.answer) for cold, other in pairs]
    states = [_states(*pair) or 0.0 for item, pair in zip(found, pairs, strict=True) if item.parted is None]
    least_state = LIMITS[bench.runner.dtype_name]
    return Tolerance(max(LEAST_TOLERANCE, SAFETY * worst(found)), max(least_state, SAFETY * max(states, default=0.0)))


def check(options: argparse.Namespace) -> tuple[str, list[CheckRow]]:
    """Run all cases. Raises NotApplicable for a context too short for them."""
    # The cases are thousands of small passes: threads would wait for each other more than they work.
    torch.set_num_threads(1)
    bench = Bench(options.model, options.device, options.dtype, options.seed)
    if bench.longest < 288:
        raise NotApplicable(f"the model's context of {bench.longest} tokens is too short: the cases need 288")
    exact = bench.runner.dtype_name == "float32"
    judge = Judge(bench.runner.dtype_name, None if exact else calibrate(bench))
    for part in (check_lengths, check_tails, check_turns, check_cancelled, check_in_flight, check_preempted):
        part(bench, judge)
    return bench.runner.dtype_name, judge.rows


@command_line
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of `eval/prefix_check.py`; returns the exit code."""
    arguments_of = parser(CHECK, __doc__.splitlines()[0] if __doc__ else None)
    arguments_of.add_argument("--seed", type=seed, default=0, help="of the random prompts (default %(default)s)")
    return run(CHECK, arguments_of.parse_args(arguments), check)
