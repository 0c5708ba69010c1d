"""Runs requests on the engine's own core and model runner, in process, and keeps what `prefix_check` compares."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparkinfer.engine.core import EngineCore
from sparkinfer.models.config import ModelConfig, load_config
from sparkinfer.runner.gpu_runner import GpuRunner
from sparkinfer.runner.model_runner import ModelRunner
from sparkinfer.runner.open_runner import open_runner
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.invariants import check_integrity
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, Request, SamplingParams, StepPlan, StepResult

from .agreement import Answer, Token, Top

LONGEST = 512
SLOTS = 5
SNAPSHOTS = 64
HOST_BLOCKS = 12
TOPS = 5


@dataclass(frozen=True, slots=True)
class Result:
    """A request's answer, the tokens it took from the cache, and the state [L, Hv, K, V] and conv window
    [L, W-1, C] behind its last computed token, on the host; None where they were not kept."""

    tokens: list[int]
    answer: Answer
    cached: int
    state: torch.Tensor | None = None
    window: torch.Tensor | None = None


class Watched:
    """The runner, remembering which slot each request had."""

    def __init__(self, runner: ModelRunner | GpuRunner) -> None:
        self.runner = runner
        self.slots: dict[str, int] = {}
        self.during: Callable[[StepPlan], None] | None = None
        """Called while a plan is under way: scheduled, and not committed."""

    def _note(self, plan: StepPlan) -> None:
        self.slots.update((row.request.id, row.slot) for row in plan.rows)
        if self.during is not None:
            self.during(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        """As the runner's own."""
        self._note(plan)
        return self.runner.execute(plan)

    def launch(self, plan: StepPlan) -> None:
        """As the runner's own."""
        self._note(plan)
        self.runner.launch(plan)

    def collect(self) -> StepResult:
        """As the runner's own."""
        return self.runner.collect()


class Session:
    """One engine core with its own cache. Requests run with `run`, or step by step through `core`.

    All sessions of a bench share the runner's memory, so only the latest one may be used.
    """

    def __init__(self, bench: Bench, config: SchedulerConfig) -> None:
        self._bench = bench
        self.watched = Watched(bench.runner)
        self.core = EngineCore(self.watched, config)
        self.results: dict[str, Result] = {}
        self._tops: dict[str, list[Top]] = {}
        self._keep_states = config.max_in_flight == 1

    def step(self) -> None:
        """One step; keeps what requests that end with it leave. Raises RuntimeError when a later session exists."""
        if self._bench.latest is not self:
            raise RuntimeError("a later session has overwritten this one's memory: finish one before the next")
        for update in self.core.step():
            request = update.request
            if update.logprobs is not None:
                tops: dict[Token, float] = dict(zip(update.logprobs.top_ids, update.logprobs.top_logprobs, strict=True))
                assert update.token is not None
                tops[update.token] = update.logprobs.logprob
                self._tops.setdefault(request.id, []).append(tops)
            if update.finish_reason is not None:
                self.results[request.id] = self._result(request)

    def _result(self, request: Request) -> Result:
        greedy = request.sampling.temperature == 0
        tokens = list(request.output)
        answer = Answer(tokens, self._tops.pop(request.id, []), greedy)
        if not self._keep_states:
            return Result(tokens, answer, request.num_cached)
        slot, caches = self.watched.slots[request.id], self.watched.runner.caches
        state = caches.state[:, slot].clone().cpu()
        return Result(tokens, answer, request.num_cached, state, caches.window[:, slot].clone().float().cpu())

    def finish(self) -> None:
        """Step until nothing is left, then check the books. Raises IntegrityError."""
        while self.core.has_work:
            self.step()
        check_integrity(self.core.scheduler)

    def run(self, requests: Iterable[Request], gap: int = 0) -> list[Result]:
        """Add requests, `gap` steps between two of them, and run all to their end."""
        requests = list(requests)
        for request in requests:
            self.core.add(request)
            for _ in range(gap):
                self.step()
        self.finish()
        return [self.results[request.id] for request in requests]


class Bench:
    """A runner, sizes that fit the model, prompts, and answers from nothing to hold others against."""

    def __init__(self, model: Path, device: str, dtype: str, seed: int) -> None:
        """Raises SparkinferError when the model does not load."""
        self.config: ModelConfig = load_config(model)
        self.longest = min(self.config.max_positions, LONGEST)
        per_request = -(-self.longest // KV_BLOCK_TOKENS)
        self.settings = SchedulerConfig(
            max_num_seqs=SLOTS,
            num_kv_blocks=3 * per_request,
            max_model_len=self.longest,
            prefill_chunk=128,
            mixed_chunk=64,
            own_pass_tokens=200,
            num_snapshots=SNAPSHOTS,
            branch_min_tokens=16,
            checkpoint_interval=256,
            decode_checkpoint_interval=32,
        )
        self.runner = open_runner(
            model,
            device=device,
            dtype=dtype,
            max_num_seqs=SLOTS,
            num_kv_blocks=self.settings.num_kv_blocks,
            max_model_len=self.longest,
            num_snapshots=SNAPSHOTS,
            num_host_blocks=HOST_BLOCKS,
        )
        self._generator = torch.Generator().manual_seed(seed)
        self._names = itertools.count()
        self.latest: Session | None = None
        self._cold: dict[tuple[tuple[int, ...], SamplingParams], Result] = {}

    def tokens(self, count: int) -> list[int]:
        """Random token ids."""
        return torch.randint(0, self.config.vocab_size, (count,), generator=self._generator).tolist()

    def sampling(self, max_tokens: int, number: int = 0) -> SamplingParams:
        """Greedy, every third one seeded."""
        temperature = 0.8 if number % 3 == 2 else 0.0
        return SamplingParams(max_tokens, temperature=temperature, top_k=20, seed=number, logprobs=TOPS)

    def request(self, prompt: Sequence[int], sampling: SamplingParams, use_cache: bool = True) -> Request:
        """A request of its own name; no token ends it early."""
        return Request(f"r{next(self._names)}", list(prompt), sampling, use_cache=use_cache)

    def session(self, **changes: Any) -> Session:
        """A core with an empty cache, which ends the use of earlier ones; `changes` are settings of the scheduler."""
        self.latest = Session(self, dataclasses.replace(self.settings, **changes))
        return self.latest

    def cold(self, prompt: Sequence[int], sampling: SamplingParams) -> Result:
        """The request alone, from nothing: no cache, the whole prompt in one pass. Ends the use of other sessions."""
        key = (tuple(prompt), sampling)
        if key not in self._cold:
            session = self.session(num_snapshots=0, prefill_chunk=LONGEST, own_pass_tokens=LONGEST)
            self._cold[key] = session.run([self.request(prompt, sampling)])[0]
        return self._cold[key]
