"""Paired comparisons: the centre of some ratios with its interval, and a file that gathers pairs over several runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError
from sparkinfer.output import write_text

CONFIDENCE = 0.95
FEWEST_PAIRS = 6
"""Fewer have no interval of that confidence."""
Runs = dict[str, list[tuple[float, float]]]
"""By the server's name, one entry a pair: output tok/s and TTFT p50 in ms."""


def centre(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The Hodges-Lehmann estimate of positive ratios and the ends of its interval, from their logarithms.

    The median of the averages of all pairs of values, each with itself too; the interval is that of Wilcoxon's signed
    rank test, with at least CONFIDENCE (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, 3rd ed.,
    sections 3.2 and 3.3). It assumes that the logarithms scatter alike to both sides, which runs in alternating order
    see to. Of values too few for any such interval the range, which does not reach CONFIDENCE.
    """
    logs, n = sorted(map(math.log, ratios)), len(ratios)
    averages = sorted((logs[i] + logs[j]) / 2 for i in range(n) for j in range(i, n))
    total = len(averages)
    middle = (averages[(total - 1) // 2] + averages[total // 2]) / 2
    cut = _lower_cut(n)
    return math.exp(middle), math.exp(averages[cut - 1]), math.exp(averages[total - cut])


def _lower_cut(n: int) -> int:
    """How many averages from each end the interval begins: the largest k for which a signed rank sum of n values is
    below k with a chance of (1 - CONFIDENCE) / 2 at most; 1 when there is none."""
    ways = [1]
    for rank in range(1, n + 1):
        grown = [*ways, *[0] * rank]
        for value, count in enumerate(ways):
            grown[value + rank] += count
        ways = grown
    below, k = 0, 0
    while below + ways[k] <= (1 - CONFIDENCE) / 2 * 2**n:
        below += ways[k]
        k += 1
    return max(k, 1)


class PairsFile:
    """Measured pairs in groups, so that a run that is cut short has lost none and the next one adds to them.

    A group is what may be judged together: pairs of one `identity` (engine, model, machine, what a pair is).
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any]) -> None:
        """Read what there is. Raises ConfigError for a file of something else."""
        self.path = path
        self._groups: list[dict[str, Any]] = []
        if path is not None and path.exists():
            try:
                self._groups = json.loads(path.read_text(encoding="utf-8"))
                for group in self._groups:
                    dict(group["identity"])
                    for pair in group["pairs"]:
                        for runs in pair["cells"].values():
                            (_, _), (_, _) = runs["on"], runs["off"]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"{path} holds no pairs ({error}): name another file") from error
        found = [group for group in self._groups if group["identity"] == identity]
        self._group: dict[str, Any] = found[0] if found else {"identity": dict(identity), "pairs": []}
        if not found:
            self._groups.append(self._group)

    def add(self, date: str, cells: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
        """One more pair of each cell: its figures by the server's name. Raises EnvironmentProblem."""
        rounded = {cell: {name: [round(v, 1) for v in of] for name, of in by.items()} for cell, by in cells.items()}
        self._group["pairs"].append({"date": date, "cells": rounded})
        if self.path is not None:
            write_text(self.path, _text(self._groups))

    def __len__(self) -> int:
        """Pairs of the group."""
        return len(self._group["pairs"])

    def of(self, cell: str) -> Runs:
        """All pairs of a cell in the group, in order."""
        pairs = [pair["cells"][cell] for pair in self._group["pairs"] if cell in pair["cells"]]
        return {name: [(float(pair[name][0]), float(pair[name][1])) for pair in pairs] for name in ("on", "off")}


def _text(groups: list[dict[str, Any]]) -> str:
    """JSON with one line for each pair."""
    parts = []
    for group in groups:
        pairs = ",\n".join(json.dumps(pair, separators=(",", ":")) for pair in group["pairs"])
        parts.append(f'{{"identity": {json.dumps(group["identity"])},\n"pairs": [\n{pairs}]}}')
    return "[" + ",\n".join(parts) + "]\n"
