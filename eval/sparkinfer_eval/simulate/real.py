"""Passes executed by the model instead of a cost model, for comparisons of policies on a machine that is not quiet.

A pass takes the least CPU time of several executions of passes like it: other programs can only add to that. The least
of more executions is less, and a machine has slow phases of seconds. So every pass has as many executions as any other,
in each of many rounds of all policies: otherwise the policy that repeats few passes is judged by better times than one
whose passes are all different. Loads, the scheduler and everything around the engine are simulated as always.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from sparkinfer.runner.model_runner import ModelRunner
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.types import StepPlan

from .cost import Costs

EXECUTIONS = {"decode": 2, "prompt": 1}
"""Of passes that are alike, in each round: passes without and with prompts."""
CONTEXT_STEP = 64
"""Decode passes of this many tokens' difference in mean context count as alike."""


class RealPasses:
    """Times the plans of a scheduler with settings `config` (or smaller ones) on the CPU. Raises SparkinferError when
    the model cannot be loaded."""

    def __init__(self, model: Path, config: SchedulerConfig, dtype: str, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self._runner = ModelRunner(
            model,
            device="cpu",
            dtype=dtype,
            max_num_seqs=config.max_num_seqs,
            num_kv_blocks=config.num_kv_blocks,
            max_model_len=config.max_model_len,
            num_snapshots=config.num_snapshots,
            num_host_blocks=config.num_host_blocks,
        )
        self.vocabulary = self._runner.config.vocab_size
        self._times: dict[tuple[object, ...], list[float]] = {}
        self._rounds = 1

    def next_round(self, first: bool) -> None:
        """From here on every pass is executed anew a few times; with `first`, what was measured before is forgotten."""
        if first:
            self._times.clear()
        self._rounds = 1 if first else self._rounds + 1

    def seconds(self, plan: StepPlan) -> float:
        """Seconds of the pass. It is executed at least once, so that the runner knows every block of it."""
        decode = len(plan.decode)
        context = int(plan.decode.starts.sum()) // (CONTEXT_STEP * max(decode, 1))
        prompts = tuple(sorted((row.start, row.length) for row in plan.prefill))
        times = self._times.setdefault((decode, context, prompts), [])
        each = EXECUTIONS["prompt" if prompts else "decode"]
        # A pass that comes up for the first time in a late round makes up for those before.
        missing = each * self._rounds - len(times)
        for _ in range(max(1, missing)):
            begin = time.thread_time()
            self._runner.execute(plan)
            seconds = time.thread_time() - begin
            if missing > 0:
                times.append(seconds)
        return min(times)


@dataclass(frozen=True, slots=True)
class RealCosts(Costs):
    """Costs whose passes are executed."""

    passes: RealPasses | None = None

    @classmethod
    def of(cls, costs: Costs, passes: RealPasses) -> RealCosts:
        """What is around the passes as in `costs`."""
        return cls(**{field.name: getattr(costs, field.name) for field in fields(costs)}, passes=passes)

    @property
    def vocabulary(self) -> int:
        """The model's."""
        assert self.passes is not None
        return self.passes.vocabulary

    def next_round(self, first: bool) -> None:
        """See `RealPasses.next_round`."""
        assert self.passes is not None
        self.passes.next_round(first)

    def pass_seconds(self, plan: StepPlan, rested: bool = False) -> float:
        """How long the model runner takes for a plan, undisturbed."""
        assert self.passes is not None
        return self.passes.seconds(plan)
