"""A record of `pack_ckpt_check`, `mixed_conc_check` and `prefix_check` on several models and dtypes.

Each check runs as its users run it, a process of its own; `checks.json` and `checks.md` keep, of every run, its exit
code, how many rows it compared, how many differ, and the row that came closest to its limit. A check that ends without
rows is recorded as such, and the others run all the same.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import sparkinfer
from sparkinfer.console import command_line
from sparkinfer.errors import EnvironmentProblem, SparkinferError
from sparkinfer.identity import engine_digest, model_digest
from sparkinfer.models.config import load_config
from sparkinfer.output import require_folder, write_text

from .check_program import AT_LEAST, BAD_INPUT, DIFFERENCE, ENVIRONMENT, NOT_APPLICABLE, PASS
from .report.machine import machine_facts, source_facts
from .rows_json import rows_json

SCHEMA = "sparkinfer/check-record/v1"
CHECKS = ("pack_ckpt_check", "mixed_conc_check", "prefix_check")
PROGRAMS = Path(__file__).resolve().parents[1]


def closest(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The row that used most of its limit, among those that must stay below one other than 0; None without any."""
    below = [row for row in rows if row["limit"] > 0 and AT_LEAST not in row["name"] and math.isfinite(row["value"])]
    return max(below, key=lambda row: row["value"] / row["limit"], default=None)


def own_engine() -> str:
    """Digest of the engine that runs here.

    Raises EnvironmentProblem when it is not the one beside this program, whose commit the record names: an installed
    package can be another checkout's.
    """
    found = Path(sparkinfer.__file__).resolve().parent
    if found != PROGRAMS.parent / "sparkinfer":
        raise EnvironmentProblem(
            f"the engine that would be checked is {found}, not this checkout's: make its environment with "
            f"`make setup`, or set PYTHONPATH={PROGRAMS.parent}"
        )
    return engine_digest()


def run_check(check: str, model: Path, device: str, dtype: str, engine: str) -> dict[str, Any]:
    """One run of the engine with digest `engine`: its exit code, seconds, and what its rows say.

    Where it ended without rows (bad input or a machine that cannot do it), `error` has the last line that it said.
    Raises EnvironmentProblem when it ran another engine.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        words = [str(model), "--device", device, "--dtype", dtype, "--json", str(path)]
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(PROGRAMS / f"{check}.py"), *words], capture_output=True, text=True, check=False
        )
        seconds = time.monotonic() - begin
        error = None
        if done.returncode in (PASS, DIFFERENCE, NOT_APPLICABLE) and path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
        else:
            print(f"{check} {model.name} {dtype} ended with {done.returncode}:\n{done.stderr}", file=sys.stderr)
            error = ([line for line in done.stderr.splitlines() if line.strip()] or [f"exit {done.returncode}"])[-1]
            found = {"engine_digest": engine, "model_digest": None, "rows": []}
    if found["engine_digest"] != engine:
        raise EnvironmentProblem(
            f"{check} ran the engine {found['engine_digest']}, not {engine}: was the source changed meanwhile?"
        )
    rows = found["rows"]
    return {
        "check": check,
        "model": model.name,
        "model_digest": found["model_digest"],
        "dtype": dtype,
        "exit": done.returncode if error is None or done.returncode in (BAD_INPUT, ENVIRONMENT) else ENVIRONMENT,
        "rows": len(rows),
        "differing": [row["name"] for row in rows if not row["ok"]],
        "closest": closest(rows),
        "not_applicable": found.get("not_applicable"),
        "error": error,
        "seconds": round(seconds, 1),
    }


def markdown(record: dict[str, Any]) -> str:
    """The record as a page."""
    machine, versions, source = record["machine"], record["versions"], record["source"]
    lines = [
        "# The three checks",
        "",
        f"Run {record['date']} on {machine.get('cpu_model') or 'an unnamed CPU'}, device {record['device']}, "
        f"sparkinfer {versions['sparkinfer']} ({record['engine_digest'][:19]}, commit {str(source['commit'])[:12]}"
        f"{' with changes' if source['dirty'] else ''}), Python {versions['python']}, torch {versions['torch']}.",
        f"Weights: {record['weights']}. Closest row: the one that used most of its limit, among rows with one above 0.",
        "",
        "```",
        record["command"],
        "```",
        "",
        "| check | model | dtype | result | rows | closest row | value | limit | s |",
        "|---|---|---|---|---:|---|---:|---:|---:|",
    ]
    for item in record["runs"]:
        near = item["closest"] or {"name": "", "value": math.nan, "limit": math.nan}
        result = item["not_applicable"] or item["error"] or f"{len(item['differing'])} differ"
        lines.append(
            f"| {item['check']} | {item['model']} | {item['dtype']} | {'passes' if item['exit'] == PASS else result} | "
            f"{item['rows']} | {near['name']} | {near['value']:.3g} | {near['limit']:.3g} | {item['seconds']:.0f} |"
        )
    lines += [f"\n{item['check']}, {item['model']}, {item['dtype']}: " + "; ".join(item["differing"])
              for item in record["runs"] if item["differing"]]  # fmt: skip
    return "\n".join(lines) + "\n"


def write(folder: Path, record: dict[str, Any]) -> None:
    """`checks.json` and `checks.md`, each by rename. Raises EnvironmentProblem."""
    for name, text in (("checks.json", rows_json(record)), ("checks.md", markdown(record))):
        write_text(folder / name, text)


@command_line
def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 all pass, 1 a row differs, 2 bad input, 3 environment."""
    parser = argparse.ArgumentParser(prog="check_record.py", description="Run the three checks and record them.")
    parser.add_argument("models", metavar="MODEL", nargs="+", type=Path, help="model folders")
    parser.add_argument("--out", type=Path, required=True, help="folder for checks.json and checks.md")
    parser.add_argument("--checks", nargs="+", default=list(CHECKS), choices=CHECKS, help="default: all")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--weights", default="random weights", help="what the record says of the models")
    options = parser.parse_args(arguments)
    try:
        require_folder(options.out, "--out")
        for model in options.models:
            load_config(model)
            model_digest(model)
        record: dict[str, Any] = {
            "schema": SCHEMA,
            "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "eval/check_record.py", *(arguments or sys.argv[1:])]),
            "machine": machine_facts(),
            "source": source_facts(PROGRAMS.parent),
            "versions": {"sparkinfer": sparkinfer.__version__, "python": platform.python_version(),
                         "torch": str(torch.__version__)},
            "engine_digest": own_engine(),
            "device": options.device,
            "weights": options.weights,
            "runs": [],
        }  # fmt: skip
        for model in options.models:
            for dtype in options.dtypes:
                for check in options.checks:
                    done = run_check(check, model, options.device, dtype, record["engine_digest"])
                    record["runs"].append(done)
                    print(f"{check} {model.name} {dtype}: exit {done['exit']}, {done['rows']} rows", flush=True)
        write(options.out, record)
    except SparkinferError as error:
        print(f"check_record: {error}", file=sys.stderr)
        return error.exit_code if error.exit_code != DIFFERENCE else 3
    broken = [item["exit"] for item in record["runs"] if item["error"]]
    if broken:
        return ENVIRONMENT if ENVIRONMENT in broken else max(broken)
    return DIFFERENCE if any(item["exit"] == DIFFERENCE for item in record["runs"]) else PASS
