"""Which kind of pass comes next: decode, mixed, or prefill; each rule is one function.

Semantics of the engine of the seeds: a mixed step carries up to `mixed_chunk` tokens of up to `mixed_max_prompts`
waiting prompts, oldest first, beside all decoding requests; prompts with more than `own_pass_tokens` left keep passes
of their own; small loads are left to speculation when a drafter is loaded. Our own addition: while prompts pile up, a
mixed step carries up to `backlog_chunk` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkinfer.scheduling.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class LoadView:
    """What the choice depends on. `head_left`: tokens left of the oldest prompt, 0 when no prompt waits;
    `num_requests`: running and waiting; `prefill_streak`: passes without decoding requests just before; `waiting`:
    tokens left of the prompts that one mixed step could carry if it had room, counted only where a rule asks."""

    decoding: bool
    num_requests: int
    head_left: int
    prefill_streak: int
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class PassShape:
    """One pass: whether requests decode in it, and what part of which prompts it carries.

    `alone`: the oldest prompt only, whatever its length; otherwise prompts that are not long.
    """

    decode: bool
    budget: int = 0
    max_prompts: int = 0
    alone: bool = False


def is_long(tokens_left: int, config: SchedulerConfig) -> bool:
    """Long prompts keep a prefill pass of their own."""
    return tokens_left > config.own_pass_tokens


def speculation_applies(load: LoadView, config: SchedulerConfig) -> bool:
    """A drafter is loaded, and the load small enough that verifying several tokens of each request pays."""
    return config.drafter_loaded and load.num_requests <= config.spec_load_limit


def mixing_applies(load: LoadView, config: SchedulerConfig) -> bool:
    """Mixed steps are on, and the load is not one that is left to speculation."""
    return config.mixed_chunk > 0 and not speculation_applies(load, config)


def prefill_shape(load: LoadView, config: SchedulerConfig) -> PassShape:
    """A pass of prompts only: a long one alone, or a pack of short ones where packing is on."""
    if is_long(load.head_left, config):
        return PassShape(decode=False, budget=config.prefill_chunk, max_prompts=1, alone=True)
    max_prompts = config.pack_max_prompts if config.packs else 1
    return PassShape(decode=False, budget=config.prefill_chunk, max_prompts=max_prompts)


def backlog_applies(load: LoadView, config: SchedulerConfig) -> bool:
    """Prompts pile up: more than half of a backlog's budget waits.

    A pass has a cost of its own, which one prompt a pass pays in full. Under a load that no policy can keep up with,
    first tokens then wait for that alone; with several prompts in a pass the queue is shorter for all.
    """
    return 2 * load.waiting > config.backlog_chunk > 0


def mixed_shape(load: LoadView, config: SchedulerConfig) -> PassShape:
    """All decoding requests and chunks of short prompts."""
    budget = config.backlog_chunk if backlog_applies(load, config) else config.mixed_chunk
    return PassShape(decode=True, budget=budget, max_prompts=config.mixed_max_prompts)


def choose_pass(load: LoadView, config: SchedulerConfig) -> PassShape:
    """The next pass.

    While requests decode, at most `prefill_passes_per_decode` passes without them run in a row; a long prompt at
    the head then alternates with steps that decode (and carry short prompts, where mixing applies).
    """
    if load.head_left == 0:
        return PassShape(decode=True)
    if not load.decoding:
        return prefill_shape(load, config)
    mixing = mixing_applies(load, config)
    if mixing and not is_long(load.head_left, config):
        return mixed_shape(load, config)
    if load.prefill_streak < config.prefill_passes_per_decode:
        return prefill_shape(load, config)
    return mixed_shape(load, config) if mixing else PassShape(decode=True)


def chunk_length(start: int, left: int, budget: int, align: int) -> int:
    """Tokens of a prompt that a pass computes: all that is left, or up to the last aligned position in the budget.

    0 when the budget does not reach an aligned position: the prompt then waits for the next pass.
    """
    if left <= budget:
        return left
    return max(0, (start + budget) // align * align - start)
