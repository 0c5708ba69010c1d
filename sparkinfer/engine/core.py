"""The engine loop: scheduler and model runner, one step at a time. Imports no torch by itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from sparkinfer.errors import ConfigError, SparkinferError
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.invariants import check_integrity
from sparkinfer.scheduling.scheduler import Scheduler
from sparkinfer.scheduling.types import EngineStats, Request, StepPlan, StepResult, TokenUpdates


class Runner(Protocol):
    """Owns tensors and executes plans."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan to its end and answer with the sampled tokens, one per row with `samples`, in row order."""
        ...


@runtime_checkable
class OverlapRunner(Runner, Protocol):
    """A runner that can also start a plan without waiting for it. Plans execute in the order of their launch."""

    def launch(self, plan: StepPlan) -> None:
        """Start the plan; what it reads from the host is taken before this returns."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest launched plan and answer with its result."""
        ...


class EngineCore:
    """Drives `runner` with the plans of a scheduler.

    With `scheduler_config.max_in_flight` 2 the runner must be an OverlapRunner: the next step is then scheduled
    and launched while the one before still runs.
    """

    def __init__(self, runner: Runner, scheduler_config: SchedulerConfig) -> None:
        """Raises ConfigError on contradictory settings."""
        if scheduler_config.max_in_flight > 1 and not isinstance(runner, OverlapRunner):
            raise ConfigError(
                f"max_in_flight is {scheduler_config.max_in_flight}, but {type(runner).__name__} has no "
                f"launch/collect: use max_in_flight 1"
            )
        self.runner = runner
        self.scheduler = Scheduler(scheduler_config)
        self._launched: deque[StepPlan] = deque()
        self._next_check_s = 0.0

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError when it can never run."""
        self.scheduler.add(request)

    def abort(self, ids: Iterable[str]) -> list[Request]:
        """End requests now; returns those that were still active."""
        return self.scheduler.abort(ids)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_work

    def step(self) -> TokenUpdates:
        """Run one step and return its tokens; none when there is no work.

        Raises SparkinferError when work waits and nothing can run, or when the scheduler's books do not balance:
        those are faults of this program.
        """
        overlapped = self.scheduler.config.max_in_flight > 1
        updates = self._step_overlapped() if overlapped else self._step_in_turn()
        if not self.scheduler.has_work:
            self._check_when_idle()
        return updates

    def _step_in_turn(self) -> TokenUpdates:
        plan = self.scheduler.schedule()
        if plan is None:
            self._check_progress()
            return TokenUpdates()
        return self.scheduler.commit(plan, self.runner.execute(plan))

    def _step_overlapped(self) -> TokenUpdates:
        assert isinstance(self.runner, OverlapRunner)
        while (plan := self.scheduler.schedule()) is not None:
            self.runner.launch(plan)
            self._launched.append(plan)
        if not self._launched:
            self._check_progress()
            return TokenUpdates()
        return self.scheduler.commit(self._launched.popleft(), self.runner.collect())

    def _check_when_idle(self) -> None:
        """Check the scheduler's books now and then, when nobody waits for it. Raises IntegrityError."""
        interval, now = self.scheduler.config.idle_check_interval_s, time.monotonic()
        if interval and now >= self._next_check_s:
            self._next_check_s = now + interval
            check_integrity(self.scheduler)

    def _check_progress(self) -> None:
        if self.scheduler.has_work:
            raise SparkinferError(f"requests wait but nothing can be scheduled: {self.scheduler.stats()}")

    def reset_cache(self) -> tuple[int, int]:
        """Empty the prefix cache; returns dropped (blocks, snapshots)."""
        return self.scheduler.reset_cache()

    def stats(self) -> EngineStats:
        """Gauges and counters for /metrics."""
        return self.scheduler.stats()
