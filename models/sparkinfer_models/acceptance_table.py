"""Two measurements of acceptance on the same prompts: do they agree within sampling error?

Both hold a pair (accepted drafts, verifications) for every answer. The difference of the two ratios of sums is judged
by its own standard error, from the answers' linearised residuals (delta method): as both engines answered the same
prompts, what a prompt contributes to both cancels.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparkinfer.errors import ConfigError

SHARED = ("tokens", "target", "drafter", "ignore_stop", "draft_sample_method", "prompts_sha256")
"""What two measurements must have in common. A document without one of these cannot be compared: it says nothing."""
WEIGHTS = ("target_sha256", "drafter_sha256")
"""What they must have in common where both say it."""
LIMIT = 2.64
"""Standard errors. Six comparisons (two models, three temperatures) at a joint level of 5 %: Bonferroni."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Means of both, their difference and its standard error."""

    temperature: float
    first: float
    second: float
    difference: float
    error: float
    paired: bool

    @property
    def z(self) -> float:
        """The difference in standard errors."""
        return self.difference / self.error if self.error else math.inf if self.difference else 0.0


def residuals(sums: np.ndarray) -> tuple[float, np.ndarray]:
    """Ratio of the sums of sums [n, 2] (accepted, verifications), and each part's share in its error [n]."""
    ratio = sums[:, 0].sum() / sums[:, 1].sum()
    return float(ratio), (sums[:, 0] - ratio * sums[:, 1]) / sums[:, 1].mean()


def difference(temperature: float, first: dict[str, Any], second: dict[str, Any]) -> Difference:
    """Of two rows: paired where both name every answer, of the two errors otherwise."""
    ratios, shares = zip(*(residuals(np.asarray(row["sums"], np.float64)) for row in (first, second)), strict=True)
    paired = len(shares[0]) == len(shares[1])
    if paired:
        each = shares[0] - shares[1]
        error = each.std(ddof=1) / math.sqrt(len(each))
    else:
        error = math.sqrt(sum(float(share.var(ddof=1)) / len(share) for share in shares))
    return Difference(temperature, ratios[0], ratios[1], ratios[0] - ratios[1], float(error), paired)


def read(path: Path) -> dict[str, Any]:
    """A document of `vllm_acceptance.py run` or `train_drafter.py measure`. Raises ConfigError."""
    try:
        document = json.loads(path.read_text())
        if not all(len(row["sums"]) > 1 for row in document["rows"]):
            raise ValueError("fewer than two answers")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no measurement with the sums of its answers: {error}") from error
    return dict(document)


def compare(args: argparse.Namespace) -> int:
    """Print a table; 1 when a difference is beyond the limit."""
    first, second = read(args.first), read(args.second)
    for name in SHARED:
        for path, document in ((args.first, first), (args.second, second)):
            if document.get(name) is None:
                raise ConfigError(f"{path} does not say its {name}: measure it again")
        if first.get(name) != second.get(name):
            raise ConfigError(f"{name} is {first.get(name)!r} in one and {second.get(name)!r} in the other")
    for name in WEIGHTS:
        # Documents of vLLM did not say these at first.
        digests = {document.get(name) for document in (first, second)} - {None}
        if len(digests) > 1:
            raise ConfigError(f"{name} differs: the two were measured with other weights")
    rows = {row["temperature"]: row for row in second["rows"]}
    shared = [row for row in first["rows"] if row["temperature"] in rows]
    if not shared:
        raise ConfigError(f"{args.first} and {args.second} share no temperature")
    print(f"{first['target']}: {first['engine']} against {second['engine']}")
    print("| temperature | answers | accepted of 7 | reference | difference | standard errors | agrees |")
    print("|---:|---:|---:|---:|---:|---:|---|")
    failed = 0
    for row in shared:
        other = rows[row["temperature"]]
        if row["prompts"] != other["prompts"]:
            raise ConfigError(f"{row['prompts']} prompts in one and {other['prompts']} in the other")
        d = difference(row["temperature"], row, other)
        ok = abs(d.z) <= args.limit
        failed += not ok
        print(
            f"| {d.temperature:g} | {row['prompts']} | {d.first:.3f} ± {row['standard_error']:.3f} "
            f"| {d.second:.3f} ± {other['standard_error']:.3f} | {d.difference:+.3f} ± {d.error:.3f} | {d.z:+.2f} "
            f"| {'yes' if ok else '**no**'} |"
        )
    return int(failed > 0)


def add_compare(commands: argparse._SubParsersAction) -> None:
    """Adds the `compare` command."""
    command = commands.add_parser("compare", help="do two measurements on the same prompts agree?")
    command.add_argument("first", type=Path, help="JSON of `run`")
    command.add_argument("second", type=Path, help="the reference: JSON of `train_drafter.py measure`")
    command.add_argument("--limit", type=float, default=LIMIT, help="standard errors (default %(default)s)")
