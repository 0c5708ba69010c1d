"""A burst of prompts to a running server: prompts per second when all arrive together, and one by one."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from sparkinfer_eval import token_load
from sparkinfer_eval.host import facts
from sparkinfer_eval.host.cells import run_folder
from sparkinfer_eval.host.servers import Running
from sparkinfer_eval.host.site import Host
from sparkinfer_eval.records import Record

BURST = 32
"""Prompts that arrive together."""
SIZES = (128, 1024)
"""Tokens of each prompt."""


def prompts_per_second(records: Sequence[Record]) -> float:
    """Prompts over the seconds from the first request sent to the last first token."""
    starts = [record.start_ns for record in records]
    firsts = [record.first_token_ns for record in records if record.first_token_ns is not None]
    return len(firsts) / ((max(firsts) - min(starts)) / 1e9)


def measure_bursts(
    host: Host, run: str, server: Running, sizes: Sequence[int], repeats: int, seed: int
) -> list[dict[str, Any]]:
    """Bursts of 32 distinct prompts of each size, `repeats` of each after one that warms up; recorded with the run.

    Returns the figures: prompts/s of the median repetition, packed as the server likes (`together`) and with one
    request at a time (`one_by_one`). Raises EnvironmentProblem when a request fails.
    """
    vocab = int(json.loads((host.model(server.model) / "config.json").read_text("utf-8"))["vocab_size"])
    known = facts.of_server(host, run_folder(host, run), server)
    found: list[dict[str, Any]] = []
    for size in sizes:
        rates: dict[str, list[float]] = {}
        for name, users in (("together", BURST), ("one_by_one", 1)):
            for repeat in range(1 + repeats):
                wave = token_load.jobs(f"burst-{size}-{name}-{repeat}", "profiling", BURST, size, 1, vocab, seed)
                rates.setdefault(name, []).append(prompts_per_second(token_load.run(server.url, "m", [wave], users)))
        for name, measured in rates.items():
            value = statistics.median(measured[1:])
            found.append({"prompt_tokens": size, "sent": name, "prompts_s": value, "repeats": measured[1:]})
            print(f"{server.name:16} {server.model:14} {BURST} prompts of {size} tokens, {name}: {value:.2f} prompts/s")
    record = {
        "schema": "sparkinfer/burst/v1",
        "engine": server.name,
        "engine_version": known["version"],
        "engine_digest": known["engine_digest"],
        "model": server.model,
        "prompts": BURST,
        "seed": seed,
        "figures": found,
    }
    path = run_folder(host, run) / "bursts" / f"{server.name}-{server.model}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
    return found
