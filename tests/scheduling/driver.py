"""Drives a scheduler and a fake runner, and checks every token and every invariant."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.invariants import check_integrity
from sparkinfer.scheduling.prefix_index import prompt_hashes
from sparkinfer.scheduling.scheduler import Scheduler
from sparkinfer.scheduling.types import FinishReason, Request, RequestState, SamplingParams, StepPlan
from tests.scheduling.fake_model import VOCAB, FakeRunner, expected_output
from tests.scheduling.scripted_drafter import ScriptedDrafter

SMALL = {"max_num_seqs": 4, "num_kv_blocks": 24, "max_model_len": 256, "chunk_align": 16, "prefill_chunk": 64,
         "mixed_chunk": 32, "own_pass_tokens": 96, "num_snapshots": 6, "num_host_blocks": 8, "checkpoint_interval": 64,
         "branch_min_tokens": 16, "decode_checkpoint_interval": 32, "aging_steps": 50, "max_in_flight": 2}  # fmt: skip
FAMILIES = 4


def small_config(**changes: object) -> SchedulerConfig:
    """A configuration in which everything is scarce."""
    return SchedulerConfig(**(SMALL | changes))  # type: ignore[arg-type]


def random_config(rng: random.Random) -> SchedulerConfig:
    """A scarce configuration with random policies."""
    return small_config(
        max_num_seqs=rng.choice([1, 2, 4, 7]),
        num_kv_blocks=rng.choice([16, 20, 24, 40]),
        prefill_chunk=(prefill := rng.choice([32, 64, 256])),
        mixed_chunk=(mixed := rng.choice([0, 16, 32, 64])),
        backlog_chunk=rng.choice([0, prefill]) if 0 < mixed < prefill else 0,
        mixed_max_prompts=rng.choice([1, 2, 8]),
        own_pass_tokens=rng.choice([32, 96, 1000]),
        pack_prefill=rng.random() < 0.7,
        is_moe=rng.random() < 0.5,
        pack_moe=rng.random() < 0.5,
        drafter_loaded=rng.random() < 0.5,
        spec_load_limit=rng.choice([1, 3, 8, 20]),
        draft_tokens=rng.choice([1, 3, 7, 15, 20]),
        prefill_passes_per_decode=rng.choice([1, 3]),
        num_snapshots=(snapshots := rng.choice([0, 1, 3, 8, 16])),
        num_host_blocks=rng.choice([0, 2, 8, 30]) if snapshots else 0,
        checkpoint_interval=rng.choice([0, 32, 64]),
        branch_min_tokens=rng.choice([0, 16, 48]),
        decode_checkpoint_interval=rng.choice([0, 16, 32]),
        snapshot_bytes=rng.choice([1, 100, 10000]),
        kv_block_bytes=rng.choice([1, 100]),
        watermark=rng.choice([0.0, 0.1]),
        aging_steps=rng.choice([0, 5, 1000]),
        max_in_flight=rng.choice([1, 2]),
    )


def family_tokens(family: int) -> list[int]:
    """A long token sequence; prompts are made of its prefixes."""
    rng = random.Random(family)
    return [rng.randrange(VOCAB) for _ in range(256)]


class Driver:
    """One scheduler under test. `launch` and `collect` are the two halves of a step."""

    def __init__(self, config: SchedulerConfig, script: Sequence[int] = (3, 0, 7, 1)) -> None:
        """`script` is the drafter's, where one is loaded."""
        self.config = config
        self.scheduler = Scheduler(config)
        self.drafter = ScriptedDrafter(script, config.max_model_len)
        self.runner = FakeRunner(config, self.drafter if config.drafter_loaded else None)
        self.launched: deque[StepPlan] = deque()
        self.live: dict[str, Request] = {}
        self.finished: list[Request] = []
        self.histories: list[list[int]] = []
        self.steps = 0
        self.serial = 0

    def add(self, prompt: list[int], max_tokens: int, *, salt: str = "", cache: bool = True, priority: int = 0,
            seed: int = 0, stops: bool = True, min_tokens: int = 0) -> Request:  # fmt: skip
        """Queue a request; tokens 0 and 1 end it when `stops`."""
        self.serial += 1
        params = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=not stops, min_tokens=min_tokens)
        # Some requests bring their prompt's hashes along, for the others the cache computes them.
        hashes = prompt_hashes(prompt, salt) if self.serial % 2 else b""
        request = Request(
            f"r{self.serial}", prompt, params, frozenset({0, 1}), priority=priority, cache_salt=salt, use_cache=cache,
            prompt_hashes=hashes,
        )  # fmt: skip
        self.scheduler.add(request)
        self.live[request.id] = request
        return request

    def launch(self) -> bool:
        """Schedule a plan and start it."""
        plan = self.scheduler.schedule()
        if plan is None:
            assert self.launched or not self.scheduler.has_work, "work waits and nothing can be scheduled"
            return False
        self.runner.launch(plan)
        self.launched.append(plan)
        return True

    def collect(self) -> None:
        """Finish the oldest launched plan and check its tokens."""
        plan = self.launched.popleft()
        self.steps += 1
        for update in self.scheduler.commit(plan, self.runner.collect()):
            request = update.request
            assert request.id in self.live, "a token of a request that had ended"
            if update.finish_reason is not None:
                self._check_end(request)

    def _check_end(self, request: Request) -> None:
        del self.live[request.id]
        self.finished.append(request)
        expected = expected_output(request, self.config.max_model_len)
        assert request.output == expected, f"{request.id}: {request.output} instead of {expected}"
        assert request.state is RequestState.FINISHED
        assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        self.histories.append((request.prompt + request.output)[: self.config.max_model_len - 2])
        del self.histories[:-8]

    def abort(self, request_id: str) -> None:
        """End a request now; what it has produced so far must be right."""
        (request,) = self.scheduler.abort([request_id])
        expected = expected_output(request, self.config.max_model_len)
        assert request.output == expected[: len(request.output)]
        del self.live[request_id]

    def step(self) -> None:
        """Schedule as far as allowed, then finish the oldest plan."""
        while self.launch():
            pass
        if self.launched:
            self.collect()

    def drain(self, limit: int = 20_000) -> None:
        """Run until nothing is left, then check that nothing is held."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "requests do not end"
        assert not self.live
        self.check()

    def check(self) -> None:
        """All invariants."""
        check_integrity(self.scheduler)

    def run(self, prompt: list[int], max_tokens: int, **changes: object) -> Request:
        """Add one request and drain."""
        request = self.add(prompt, max_tokens, **changes)  # type: ignore[arg-type]
        self.drain()
        return request

    def random_action(self, rng: random.Random) -> None:
        """One arrival, cancel, cache reset, half step or step."""
        choice = rng.random()
        if choice < 0.16 and len(self.live) < 12:
            self.random_arrival(rng)
        elif choice < 0.19 and self.live:
            self.abort(rng.choice(list(self.live)))
        elif choice < 0.195:
            self.scheduler.reset_cache()
        elif choice < 0.55:
            self.launch()
        elif choice < 0.75 and self.launched:
            self.collect()
        else:
            self.step()

    def random_arrival(self, rng: random.Random) -> Request:
        """A prompt from a few families of shared prefixes, or the next turn of a finished chat."""
        limit = self.config.max_model_len
        if self.histories and rng.random() < 0.4:
            prompt = rng.choice(self.histories) + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        else:
            prompt = family_tokens(rng.randrange(FAMILIES))[: rng.randrange(1, limit // 2)]
            prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 5, 16, 40]))]
        prompt = prompt[: limit - 1]
        return self.add(
            prompt,
            rng.choice([1, 2, 15, 16, 17, 40, 200]),
            salt=rng.choice(["", "", "", "tenant"]),
            cache=rng.random() < 0.9,
            priority=rng.choice([0, 0, 0, -1, 3]),
            seed=rng.randrange(3),
            stops=rng.random() < 0.5,
            min_tokens=rng.choice([0, 0, 4]),
        )


def fuzz(seed: int, actions: int) -> Driver:
    """A random life of one scheduler; invariants are checked after every few actions."""
    rng = random.Random(seed)
    driver = Driver(random_config(rng), [rng.choice([0, 1, 2, 7, 15, 20]) for _ in range(7)])
    for number in range(actions):
        driver.random_action(rng)
        if number % 5 == 0:
            driver.check()
    driver.drain()
    return driver
