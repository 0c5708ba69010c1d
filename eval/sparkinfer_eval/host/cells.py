"""Cells of a running server as raw results, by token ids or with AIPerf."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError, SparkinferError
from sparkinfer_eval import arrivals, metrics, token_load
from sparkinfer_eval.aiperf import Load, measure
from sparkinfer_eval.cells import Cell, load_cells, resolve_cells, resolve_scale
from sparkinfer_eval.host import facts
from sparkinfer_eval.host.servers import Running
from sparkinfer_eval.host.site import Host, program
from sparkinfer_eval.host.tokenizer import SOURCE
from sparkinfer_eval.plan.identity import folder_digest
from sparkinfer_eval.prompts import PromptSet, read_prompts
from sparkinfer_eval.records import read_records, write_records
from sparkinfer_eval.report.failures import record_failure
from sparkinfer_eval.result_folder import Target

SCALE = "full"
BLOCK = 1
WARM_TOKENS = 16
FIGURES = (("output_tok_s", "value"), ("ttft_ms", "p50"), ("ttft_ms", "p99"), ("itl_ms", "p50"))


def settings_of(host: Host, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The full scale with changed counts. Raises ConfigError for an unknown key."""
    return resolve_scale(load_cells(host.root / "config" / "cells.yaml"), SCALE, overrides)


def cells_of(host: Host, names: str, overrides: Mapping[str, Any]) -> list[Cell]:
    """Cells of the full scale, by name (`chat-c1,poisson-r1`, in that order) or `all`.

    Raises ConfigError for an unknown one.
    """
    found = resolve_cells(load_cells(host.root / "config" / "cells.yaml"), SCALE, overrides)
    wanted = list(found) if names == "all" else names.split(",")
    for name in wanted:
        if name not in found:
            raise ConfigError(f"no cell {name}: there are {', '.join(found)}")
    return [found[name] for name in wanted]


def run_folder(host: Host, run: str) -> Path:
    """Where a run's raw results lie."""
    return host.work / "results" / run


def folder_of(host: Host, run: str, server: Running, cell: str, rep: int) -> Path:
    """Where a raw result lies."""
    return run_folder(host, run) / f"b{BLOCK}" / server.name / server.model / cell / f"r{rep}"


@dataclass(frozen=True)
class Sitting:
    """What all cells of a call share: the run, its repetition and seed, the server."""

    host: Host
    run: str
    server: Running
    rep: int
    seed: int

    def target(self, cell: Cell) -> Target:
        """Identity and folder of one cell's result."""
        host, server = self.host, self.server
        model = host.model(server.model)
        known = facts.of_server(host, run_folder(host, self.run), server)
        return Target(
            run=self.run,
            block=BLOCK,
            rep=self.rep,
            engine=server.name,
            engine_version=known["version"],
            engine_digest=known["engine_digest"],
            model_name=server.model,
            model=model,
            out=folder_of(host, self.run, server, cell.id, self.rep),
            model_digest=folder_digest(model, host.work / "digests"),
        )


def measure_cells(sitting: Sitting, cells: list[Cell], load: str, until: float) -> int:
    """Measure cells that have no result yet, none of them begun after `until` (time.monotonic()).

    A cell that is not a result is recorded as failed, and the next one begun. Returns the exit code.
    """
    code = 0
    for cell in cells:
        target = sitting.target(cell)
        if not (target.out / "result.json").exists():
            if time.monotonic() > until:
                print(f"{cell.id}: no time left in this call", flush=True)
                continue
            begun = time.monotonic()
            run = arrivals_cell if cell.kind == "poisson" else quick_cell if load == "tokens" else aiperf_cell
            try:
                run(sitting, cell, target)
            except SparkinferError as error:
                record_failure(
                    run_folder(sitting.host, sitting.run), block=BLOCK, engine=target.engine, model=target.model_name,
                    cell=cell.id, rep=sitting.rep, reason=str(error),
                )  # fmt: skip
                print(f"{cell.id}: {error}", flush=True)
                code = 1
                continue
            print(f"({time.monotonic() - begun:.1f} s) ", end="")
        print(line(target.out), flush=True)
    return code


def quick_cell(sitting: Sitting, cell: Cell, target: Target) -> None:
    """Measure one cell by token ids and write its raw result."""
    vocab = int(json.loads((target.model / "config.json").read_text("utf-8"))["vocab_size"])
    assert cell.concurrency is not None
    assert cell.output_tokens is not None
    prompt, answer, seed = cell.prompt_tokens, cell.output_tokens, sitting.seed
    warm = token_load.jobs(cell.id, "warmup", cell.warmup_requests, prompt, WARM_TOKENS, vocab, seed)
    waves = [warm, token_load.jobs(cell.id, "profiling", cell.requests, prompt, answer, vocab, seed)]
    started = dt.datetime.now(dt.UTC)
    records = token_load.run(sitting.server.url, "m", waves, cell.concurrency, cell.request_timeout_s)
    prompts = hashlib.sha256("".join(r.prompt_sha256 for r in sorted(records, key=lambda r: r.request_id)).encode())
    result = target.result(
        cell,
        prompts_sha256=prompts.hexdigest(),
        command=facts.plain(sitting.host, [sys.executable, *sys.argv]),
        started_at=started,
        tool={"name": "token_load", "version": "1"},
    )
    staging = target.out.with_name(f".{target.out.name}.part")
    staging.mkdir(parents=True, exist_ok=True)
    write_records(staging / "records.jsonl", records)
    (staging / "result.json").write_text(json.dumps(asdict(result), indent=1) + "\n", "utf-8")
    staging.rename(target.out)


def _prompts(sitting: Sitting, cell: Cell) -> PromptSet:
    path = prompts_of(sitting.host, sitting.server.model) / f"{cell.id}.jsonl"
    if not path.exists():
        raise ConfigError(f"{path} does not exist: make it with `gpu_host.py prompts`")
    return read_prompts(path)


def arrivals_cell(sitting: Sitting, cell: Cell, target: Target) -> None:
    """Measure an open-loop cell, as `eval/spec_open_arrivals.py` does. Raises InvalidRun with the failed gates."""
    command = facts.plain(sitting.host, [sys.executable, *sys.argv])
    arrivals.measure(sitting.server.url, "m", cell, _prompts(sitting, cell), target, command)


def aiperf_cell(sitting: Sitting, cell: Cell, target: Target) -> None:
    """Measure one cell with the bundled AIPerf, as `eval/run_cell.py` does. Raises InvalidRun with the failed gates."""
    # AIPerf takes 14 s to load the filled-up tokenizer and counts nothing with it (the server's counts are used).
    filled_up = target.model.is_relative_to(sitting.host.work)
    load = Load(
        url=sitting.server.url,
        served_name="m",
        model=sitting.host.root / "models" / SOURCE if filled_up else target.model,
        cell=cell,
        prompts=_prompts(sitting, cell),
        seed=sitting.seed,
        executable=sitting.host.launcher("aiperf", "-m", "aiperf"),
    )
    measure(load, target)


WAVES = ((1, 32), (4, 128), (16, 256), (32, 128), (4, 1024), (1, 8192))
"""Requests at once and their prompt tokens."""


def warm_up(host: Host, server: Running) -> None:
    """Requests of every size, the same for every engine, so that nothing is compiled while a cell is measured."""
    vocab = int(json.loads((host.model(server.model) / "config.json").read_text("utf-8"))["vocab_size"])
    begun = time.monotonic()
    for count, length in WAVES:
        wave = token_load.jobs(f"warm-up-{count}", "warmup", count, length, WARM_TOKENS, vocab, 0)
        token_load.run(server.url, "m", [wave], count)
    print(f"{server.name} warmed up in {time.monotonic() - begun:.1f} s", flush=True)


def prompts_of(host: Host, model: str) -> Path:
    """Where a model's prompts lie."""
    return host.work / "prompts" / model


def make_prompts(host: Host, model: str, cells: list[Cell], overrides: Mapping[str, Any], seed: int) -> int:
    """Write the cells' prompts, the same for every engine; returns the exit code."""
    arguments = ["eval/make_prompts.py", "--model", str(host.model(model)), "--block", str(BLOCK), "--scale", SCALE]
    arguments += ["--seed", str(seed), "--out", str(prompts_of(host, model)), "--overrides", json.dumps(overrides)]
    arguments += [word for cell in cells for word in ("--cell", cell.id)]
    return program(host, "prompts", arguments, host.work / "logs" / f"prompts-{model}.log", 300)


def figures(folder: Path) -> dict[tuple[str, str], float]:
    """The figures of a raw result."""
    return {(v.metric, v.stat): v.value for v in metrics.summarise(read_records(folder / "records.jsonl"))}


def line(folder: Path) -> str:
    """One line of a raw result's figures."""
    found = figures(folder)
    text = "  ".join(f"{metric} {stat} {found[metric, stat]:.2f}" for metric, stat in FIGURES)
    return f"{folder.parts[-4]:16} {folder.parts[-3]:14} {folder.parts[-2]:16} {text}"


def table(host: Host, run: str) -> list[str]:
    """Every cell that sparkinfer and vLLM both have: output tok/s and TTFT p50 with their ratios."""
    base = run_folder(host, run) / f"b{BLOCK}"
    lines = [f"{'engine':16} {'model':14} {'cell':16} {'tok/s':>9} {'ratio':>6} {'TTFT p50':>9} {'ratio':>6}"]
    for result in sorted(base.glob("*/*/*/r1/result.json")):
        folder = result.parent
        other = base / "vllm" / folder.parts[-3] / folder.parts[-2] / "r1"
        if folder == other or not (other / "result.json").exists():
            continue
        own, their = figures(folder), figures(other)
        rate, ttft = ("output_tok_s", "value"), ("ttft_ms", "p50")
        lines.append(
            f"{folder.parts[-4]:16} {folder.parts[-3]:14} {folder.parts[-2]:16} {own[rate]:9.1f}"
            f" {own[rate] / their[rate]:6.2f} {own[ttft]:9.1f} {own[ttft] / their[ttft]:6.2f}"
        )
    return lines
