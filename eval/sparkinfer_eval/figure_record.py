"""The record of eval/scheduling_figures.py: its files, its page, and parts kept from an earlier record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError
from sparkinfer.output import write_text
from sparkinfer_eval.rows_json import rows_json

from .figure import EQUIVALENCE, MISSED
from .paired import CONFIDENCE

SCHEMA = "sparkinfer/scheduling-figures/v3"
ORIGIN = ("date", "command", "busy_cpus_before", "source", "engine_digest")
"""What may differ from figure to figure."""


def with_kept(record: dict[str, Any], earlier: dict[str, Any] | None, parts: Sequence[str]) -> dict[str, Any]:
    """The record with the figures of an earlier one that it has not measured anew. `parts`: all names, in the page's
    order. `kept` lists where those come from: an origin each, with its figures as [part, name].

    Raises ConfigError when the earlier one is of another model, device, dtype or CPU.
    """
    if earlier is None:
        return record
    for name in ("model", "device", "dtype"):
        if earlier[name] != record[name]:
            raise ConfigError(f"--keep: the recorded figures are of {name} {earlier[name]}, not {record[name]}")
    if earlier["machine"].get("cpu_model") != record["machine"].get("cpu_model"):
        raise ConfigError("--keep: the recorded figures are of another machine")

    def keys(of: dict[str, Any]) -> list[list[str]]:
        return [[figure["part"], figure["name"]] for figure in of["figures"]]

    new, before = keys(record), keys(earlier)
    origins = list(earlier.get("kept", []))
    others = [key for origin in origins for key in origin["figures"]]
    own = {name: earlier[name] for name in ORIGIN}
    origins.append({**own, "figures": [key for key in before if key not in others]})
    kept = [{**origin, "figures": [key for key in origin["figures"] if key not in new]} for origin in origins]
    old = [figure for figure in earlier["figures"] if [figure["part"], figure["name"]] not in new]
    figures = sorted(
        [*record["figures"], *old],
        key=lambda figure: (parts.index(figure["part"]), _place(before, [figure["part"], figure["name"]])),
    )
    return {**record, "figures": figures, "kept": [origin for origin in kept if origin["figures"]]}


def _place(keys: list[list[str]], key: list[str]) -> int:
    return keys.index(key) if key in keys else len(keys)


def read_earlier(folder: Path) -> dict[str, Any]:
    """The record in a folder, whose other parts are to be kept. Raises ConfigError when there is none."""
    path = folder / "figures.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--keep: {path} cannot be read ({error}); leave the flag out to record anew") from error
    if found.get("schema") != SCHEMA:
        raise ConfigError(f"--keep: {path} has schema {found.get('schema')!r}, expected {SCHEMA!r}")
    return found


def _commit(source: dict[str, Any]) -> str:
    return f"commit {str(source['commit'])[:12]}{' with changes' if source['dirty'] else ''}"


def _named(origin: dict[str, Any], record: dict[str, Any]) -> str:
    """Which figures an origin has: whole parts by their names, parts of these by the exceptions or one by one."""
    named = []
    for part in dict.fromkeys(part for part, _ in origin["figures"]):
        has = [name for owner, name in origin["figures"] if owner == part]
        lacks = [f["name"] for f in record["figures"] if f["part"] == part and f["name"] not in has]
        if len(lacks) > len(has):
            named.append(f"{part} ({'; '.join(has)})")
        else:
            named.append(part + (f" (but for {'; '.join(lacks)})" if lacks else ""))
    return ", ".join(named)


def markdown(record: dict[str, Any]) -> str:
    """The record as a page."""
    machine, versions = record["machine"], record["versions"]
    kept = []
    for origin in record.get("kept", []):
        engine = f"{origin['engine_digest'][:19]}, {_commit(origin['source'])}"
        kept.append(f"{_named(origin, record)}: measured {origin['date']} ({engine}) by `{origin['command']}`.\n")
    lines = [
        "# Scheduling figures",
        "",
        f"Measured {record['date']} on {machine.get('cpu_model') or 'an unnamed CPU'} ({record['device']}, "
        f"{record['dtype']}), CPUs busy before: {record['busy_cpus_before']:.2f}.",
        f"sparkinfer {versions['sparkinfer']} ({record['engine_digest'][:19]}, {_commit(record['source'])}), "
        f"Python {versions['python']}, torch {versions['torch']}.",
        f"Model: {record['model']['name']} ({record['model']['digest'][:19]}), {record['model']['weights']}.",
        "",
        "```",
        record["command"],
        "```",
        "",
        *kept,
        "| part | figure | value | goal | verdict | note |",
        "|---|---|---:|---:|---|---|",
    ]
    for figure in record["figures"]:
        goal = "" if figure["goal"] is None else f"{'<=' if figure['better'] == 'below' else '>='} {figure['goal']:g}"
        verdict = f"**{MISSED}**" if figure["verdict"] == MISSED else figure["verdict"] or ""
        number = f"{figure['value']:.3g}" if figure["unit"] == "x" else f"{figure['value']:.1f}"
        value = f"{number} {figure['unit']}"
        lines.append(f"| {figure['part']} | {figure['name']} | {value} | {goal} | {verdict} | {figure['note']} |")
    lines += [
        "",
        f"Mixing: each pair has two servers of its own; intervals ({CONFIDENCE:.0%}) are Wilcoxon's of the "
        "Hodges-Lehmann estimate, where a note says median order statistics. Throughput: missed (lost) when the whole "
        f"interval lies below 1, reached when it lies above {1 - EQUIVALENCE:g} (no loss of {EQUIVALENCE:.0%}), "
        "undecided otherwise. TTFT: reached when the whole interval lies below 1.",
    ]
    return "\n".join(lines) + "\n"


def write(folder: Path, record: dict[str, Any]) -> None:
    """`figures.json` and `figures.md`, each by rename. Raises EnvironmentProblem."""
    for name, text in (("figures.json", rows_json(record)), ("figures.md", markdown(record))):
        write_text(folder / name, text)
