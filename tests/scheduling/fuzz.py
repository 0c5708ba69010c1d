"""Random lives of the scheduler on the fake model: `python -m tests.scheduling.fuzz --steps 1000000`.

Every token is checked against the model's definition, every plan against what may be in use, and the conservation laws
after every few actions. Prints what was exercised; a failure names the seed that repeats it.
"""

from __future__ import annotations

import argparse
import time

from tests.scheduling.driver import Driver, fuzz


def totals(drivers_seen: dict[str, int], driver: Driver) -> None:
    """Add up what a life exercised."""
    stats, counters = driver.scheduler.stats(), driver.scheduler.cache.counters
    for name, value in (
        ("steps", driver.steps),
        ("requests", driver.serial),
        ("tokens", driver.runner.tokens),
        ("hit tokens", stats.prefix_hits_tokens),
        ("preemptions", stats.preemptions),
        ("evictions", stats.prefix_evictions),
        ("moves to host", counters.moves_to_host),
        ("moves to device", counters.moves_to_device),
        ("drafts", stats.draft_tokens),
        ("accepted drafts", stats.accepted_tokens),
        ("rejected drafts", stats.draft_tokens - stats.accepted_tokens),
    ):
        drivers_seen[name] = drivers_seen.get(name, 0) + value


def main() -> None:
    """Run lives of 300 actions, seed after seed, until `--steps` engine steps are done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--actions", type=int, default=300)
    args = parser.parse_args()
    seen: dict[str, int] = {"steps": 0}
    seed, start = args.seed, time.monotonic()
    while seen["steps"] < args.steps:
        try:
            totals(seen, fuzz(seed, args.actions))
        except BaseException:
            print(f"failed with --seed {seed} --actions {args.actions} --steps 1")
            raise
        seed += 1
    print(", ".join(f"{value} {name}" for name, value in seen.items()))
    print(f"seeds {args.seed} to {seed - 1}, {time.monotonic() - start:.0f} s, no difference")


if __name__ == "__main__":
    main()
