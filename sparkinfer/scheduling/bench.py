"""What scheduling costs per step: `python -m sparkinfer.scheduling.bench`.

A closed loop of chat requests (1024-token prompts, 256 output tokens by default) through the real scheduler with
prefix cache and checkpoints on; the "model" answers at once, so only `schedule`, `commit` and the `add` of the
requests that arrive in a step are timed. As in a server, the hashes of a prompt come along with it: the process that
tokenises has computed them, and `hashing` says what that costs there. Times are microseconds per step: CPU time of
the thread for the means, which other load on the machine disturbs less, and wall-clock time for the percentiles.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass

from sparkinfer import garbage
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.prefix_index import prompt_hashes
from sparkinfer.scheduling.scheduler import Scheduler
from sparkinfer.scheduling.types import Request, SamplingParams, StepPlan, StepResult

VOCAB = 248_320


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost per step in microseconds at a number of requests."""

    requests: int
    steps: int
    mean_cpu_us: float
    p50_us: float
    p99_us: float
    decode_only_mean_cpu_us: float
    mean_rows: float


def bench_config(requests: int, prompt: int, output: int) -> SchedulerConfig:
    """Enough memory for `requests` running ones, a snapshot pool as on a GPU, and a mixed budget that keeps them
    running."""
    per_request = -(-(prompt + output) // 16)
    per_step = -(-requests * prompt // output)
    return SchedulerConfig(
        max_num_seqs=requests,
        num_kv_blocks=requests * per_request * 5 // 4,
        max_model_len=prompt + output,
        mixed_chunk=(mixed := max(1024, -(-per_step // 64) * 64)),
        backlog_chunk=4096 if 2 * mixed < 4096 else 0,  # The engine's own defaults on a CPU.
        num_snapshots=64,
        snapshot_bytes=154_000_000,
        kv_block_bytes=1_048_576,
    )


class ClosedLoop:
    """`requests` users, each sending its next prompt when its last answer ends; `seats` of them run at most."""

    def __init__(self, requests: int, prompt: int, output: int, seats: int, seed: int = 0) -> None:
        self.scheduler = Scheduler(bench_config(seats, prompt, output))
        self._rng = random.Random(seed)
        self._prompt, self._output, self._serial = prompt, output, 0
        for _ in range(requests):
            # The first wave ends at different times, so that later arrivals spread over the steps.
            self._add(self._rng.randrange(1, output + 1))

    def _add(self, output: int) -> tuple[float, float]:
        """CPU and wall-clock seconds that the scheduler took for a new request."""
        self._serial += 1
        tokens = [self._rng.randrange(VOCAB) for _ in range(self._prompt)]
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        # The server's process has the hashes computed.
        hashes = prompt_hashes(tokens, "")
        request = Request(f"r{self._serial}", tokens, params, frozenset({1, 2}), prompt_hashes=hashes)
        cpu, start = time.thread_time(), time.perf_counter()
        self.scheduler.add(request)
        wall = time.perf_counter() - start
        return time.thread_time() - cpu, wall

    def step(self) -> tuple[float, float, StepPlan]:
        """One step; returns the CPU and wall-clock microseconds spent in schedule, commit and add, and the plan."""
        cpu_start, start = time.thread_time(), time.perf_counter()
        plan = self.scheduler.schedule()
        middle, cpu_middle = time.perf_counter(), time.thread_time()
        assert plan is not None
        sampled = plan.num_sampled
        result = StepResult(plan.step_id, [7] * sampled, [None] * sampled)
        cpu_resumed, resumed = time.thread_time(), time.perf_counter()
        updates = self.scheduler.commit(plan, result)
        end, cpu_end = time.perf_counter(), time.thread_time()
        cpu = (cpu_middle - cpu_start) + (cpu_end - cpu_resumed)
        wall = (middle - start) + (end - resumed)
        for update in updates:
            if update.finish_reason is not None:
                added = self._add(self._output)
                cpu, wall = cpu + added[0], wall + added[1]
        return cpu * 1e6, wall * 1e6, plan


def hashing(prompt: int = 1024, repeats: int = 1000) -> float:
    """CPU microseconds that the hashes of one prompt take, in the process that tokenises."""
    tokens = random.Random(0).choices(range(VOCAB), k=prompt)
    start = time.thread_time()
    for _ in range(repeats):
        prompt_hashes(tokens, "")
    return (time.thread_time() - start) / repeats * 1e6


def measure(requests: int, steps: int, prompt: int = 1024, output: int = 256, seats: int | None = None) -> StepCost:
    """Cost per step in a steady state of `requests` requests, of which `seats` (default: all) can run."""
    loop = ClosedLoop(requests, prompt, output, seats or requests)
    for _ in range(2 * output):
        loop.step()
    times: list[float] = []
    walls: list[float] = []
    decode_only: list[float] = []
    rows = 0
    with garbage.settled():
        for _ in range(steps):
            cpu, wall, plan = loop.step()
            times.append(cpu)
            walls.append(wall)
            rows += plan.num_rows
            if not plan.prefill:
                decode_only.append(cpu)
    ordered = sorted(walls)
    return StepCost(
        requests=requests,
        steps=steps,
        mean_cpu_us=sum(times) / steps,
        p50_us=ordered[steps // 2],
        p99_us=ordered[steps * 99 // 100],
        decode_only_mean_cpu_us=sum(decode_only) / len(decode_only) if decode_only else float("nan"),
        mean_rows=rows / steps,
    )


def main() -> None:
    """Print a table, or JSON lines with --json."""
    parser = argparse.ArgumentParser(description="Scheduling cost per step, in microseconds of wall-clock time.")
    parser.add_argument("--requests", type=int, nargs="+", default=[32, 1000])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--seats", type=int, help="requests that run at most (default: all)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.json:
        print(f"{'requests':>8} {'rows':>7} {'mean CPU':>8} {'p50':>8} {'p99':>8} {'decode only':>12}  (us per step)")
    for requests in args.requests:
        cost = measure(requests, args.steps, args.prompt, args.output, args.seats)
        if args.json:
            print(json.dumps({name: getattr(cost, name) for name in cost.__slots__}))
        else:
            print(
                f"{cost.requests:>8} {cost.mean_rows:>7.1f} {cost.mean_cpu_us:>8.1f} {cost.p50_us:>8.1f} "
                f"{cost.p99_us:>8.1f} {cost.decode_only_mean_cpu_us:>12.1f}"
            )


if __name__ == "__main__":
    main()
