"""How numbers, cells, engines and machines are written in the report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sparkinfer.errors import ConfigError

MARK = "†"
AT_ONCE = "‡"
"""Set behind a percentile that has fewer requests than it needs."""

SHAPES = {"chat": "chat", "long_answer": "long answer", "long_prompt": "long prompt"}

CLAIM_WORDS = re.compile(
    r"\b(faster|fastest|slower|sooner|quicker|beats?|outperform\w*|match(es)? (or|vLLM|the baseline)|"
    r"level with|on par with|within (run-to-run )?variance|speed-?up|state of the art|"
    r"\d+(\.\d+)? ?% (better|less|more|lower|higher))\b",
    re.IGNORECASE,
)
"""Words that claim a comparison: they need a registered design with at least 6 blocks and a verdict."""


def number(value: float | None) -> str:
    """At least three significant digits: 1,234 / 123 / 12.3 / 1.23; a missing value is a dash."""
    if value is None:
        return "–"
    size = abs(value)
    if round(size, 1) >= 100:
        return f"{value:,.0f}"
    if round(size, 2) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if round(size, 3) >= 1 or size == 0 else f"{value:.3g}"


def seconds(milliseconds: float | None) -> str:
    """Milliseconds as seconds with the same number of digits as `number`."""
    return number(None if milliseconds is None else milliseconds / 1000)


def plural(count: float, singular: str) -> str:
    """`1 chat`, `16 chats`, `1 request`, `0.5 requests`."""
    text = f"{count:g}"
    return f"{text} {singular}" if count == 1 else f"{text} {singular}s"


def split_cell(cell: str) -> tuple[str, float]:
    """`chat-c16` to (`chat`, 16), `poisson-r1` to (`poisson`, 1). Raises ConfigError for another form."""
    found = re.fullmatch(r"([a-z][a-z_]*)-[cr](\d+(?:\.\d+)?)", cell)
    if found is None:
        raise ConfigError(f"cell id {cell!r}: expected e.g. chat-c16 or poisson-r1")
    return found[1], float(found[2])


def is_arrivals(cell: str) -> bool:
    """Whether a cell is an open-loop one (Poisson arrivals)."""
    return split_cell(cell)[0] == "poisson"


def shape_name(shape: str) -> str:
    """A shape in words."""
    return SHAPES.get(shape, shape.replace("_", " "))


def cell_name(cell: str) -> str:
    """`chat, 16 requests`; an open-loop cell keeps its id, since its rate depends on the run's scale."""
    shape, level = split_cell(cell)
    if shape == "poisson":
        return cell
    return f"{shape_name(shape)}, {plural(level, 'request')}"


def gibibytes(count: int | None) -> str:
    """Bytes as GiB with one decimal."""
    return "memory unknown" if count is None else f"{count / 2**30:.1f} GiB memory"


def machine_line(machine: dict[str, Any]) -> str:
    """The machine in one sentence: CPU, cores, memory, system, GPUs with driver, clocks and power limit."""
    cpus = machine.get("cpus_usable")
    quota = machine.get("cpu_quota")
    parts = [
        str(machine.get("cpu_model") or "CPU unknown"),
        f"{cpus} CPUs" + (f" (quota {quota:g})" if quota else ""),
        gibibytes(machine.get("memory_bytes")),
        str(machine.get("os") or "system unknown"),
        f"kernel {machine.get('kernel') or 'unknown'}",
    ]
    gpus = machine.get("gpus") or []
    parts += [
        f"{g.get('name')} (driver {g.get('driver_version')}, {g.get('memory.total')} MiB, "
        f"SM clock {g.get('clocks.sm')} of {g.get('clocks.max.sm')} MHz, power limit {g.get('power.limit')} W, "
        f"UUID {g.get('uuid')})"
        for g in gpus
    ]
    return ", ".join(parts) + ("" if gpus else ", no GPU")


def refuse_claims(texts: Sequence[str], where: str) -> None:
    """Raise ConfigError when a text claims a comparison that no verdict supports."""
    for text in texts:
        found = CLAIM_WORDS.search(text)
        if found:
            raise ConfigError(
                f"{where}: {found[0]!r} claims a comparison, and this run has no verdict that supports it "
                "(needs at least 6 registered blocks): state the figures, or leave the comparison to the tables"
            )
