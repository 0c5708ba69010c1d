"""Cells of a running server as raw results, by token ids or with AIPerf; a table of ratios."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from sparkinfer.errors import ConfigError
from sparkinfer.identity import engine_digest
from sparkinfer_eval import metrics, token_load
from sparkinfer_eval.cells import Cell, cell_digest, load_cells, resolve_cells
from sparkinfer_eval.host.servers import Running
from sparkinfer_eval.host.site import Host, program
from sparkinfer_eval.plan.identity import folder_digest
from sparkinfer_eval.records import RawResult, read_records, write_records

WARM_TOKENS = 16
FIGURES = (("output_tok_s", "value"), ("ttft_ms", "p50"), ("ttft_ms", "p99"), ("itl_ms", "p50"))


def cells_of(host: Host, names: str, requests: int | None) -> list[Cell]:
    """The closed-loop cells of the full scale, by name (`chat-c1,long_prompt-c4`) or `all`.

    Raises ConfigError for an unknown one.
    """
    overrides = {} if requests is None else {"requests": {count: max(count, requests) for count in (1, 4, 16, 32)}}
    found = resolve_cells(load_cells(host.root / "config" / "cells.yaml"), "full", overrides)
    closed = {name: cell for name, cell in found.items() if cell.kind == "closed"}
    wanted = list(closed) if names == "all" else names.split(",")
    for name in wanted:
        if name not in closed:
            raise ConfigError(f"no closed-loop cell {name}: there are {', '.join(closed)}")
    return [closed[name] for name in wanted]


def folder_of(host: Host, run: str, server: Running, cell: str, rep: int) -> Path:
    """Where a raw result lies; a column other than `exact` is part of the engine's name."""
    engine = server.engine if server.column == "exact" else f"{server.engine}-{server.column}"
    return host.work / "results" / run / "b1" / engine / server.model / cell / f"r{rep}"


def quick_cell(host: Host, run: str, server: Running, cell: Cell, rep: int, seed: int) -> None:
    """Measure one cell by token ids and write its raw result. An existing result is kept."""
    out = folder_of(host, run, server, cell.id, rep)
    if not (out / "result.json").exists():
        model = host.model(server.model)
        vocab = int(json.loads((model / "config.json").read_text("utf-8"))["vocab_size"])
        assert cell.concurrency is not None
        assert cell.output_tokens is not None
        prompt, answer = cell.prompt_tokens, cell.output_tokens
        warm = token_load.jobs(cell.id, "warmup", cell.concurrency, prompt, WARM_TOKENS, vocab, seed)
        waves = [warm, token_load.jobs(cell.id, "profiling", cell.requests, prompt, answer, vocab, seed)]
        started = dt.datetime.now(dt.UTC)
        records = token_load.run(server.url, "m", waves, cell.concurrency, cell.request_timeout_s)
        prompts = hashlib.sha256("".join(r.prompt_sha256 for r in sorted(records, key=lambda r: r.request_id)).encode())
        digest = engine_digest() if server.engine == "sparkinfer" else f"bundle:{server.engine}"
        result = RawResult(
            run=run,
            block=1,
            engine=out.parts[-4],
            engine_version="",
            engine_digest=digest,
            model=server.model,
            model_digest=folder_digest(model, host.work / "digests"),
            cell=cell.id,
            rep=rep,
            cell_definition=cell.definition(),
            cell_digest=cell_digest(cell),
            prompts_sha256=prompts.hexdigest(),
            command=sys.argv,
            started_at=started.isoformat(timespec="seconds"),
            tool={"name": "token_load", "version": "1"},
        )
        staging = out.with_name(f".{out.name}.part")
        staging.mkdir(parents=True, exist_ok=True)
        write_records(staging / "records.jsonl", records)
        (staging / "result.json").write_text(json.dumps(asdict(result), indent=1) + "\n", "utf-8")
        staging.rename(out)
    print(line(out), flush=True)


def aiperf_cell(host: Host, run: str, server: Running, cell: Cell, rep: int, seed: int) -> int:
    """Measure one cell with the bundled AIPerf, by `eval/run_cell.py`; returns its exit code."""
    out, model = folder_of(host, run, server, cell.id, rep), host.model(server.model)
    if (out / "result.json").exists():
        print(line(out))
        return 0
    prompts = host.work / "prompts" / server.model
    common = ["--scale", "full", "--cell", cell.id]
    if not (prompts / f"{cell.id}.jsonl").exists():
        made = ["eval/make_prompts.py", "--model", str(model), "--block", "1", "--out", str(prompts), *common]
        if code := program(host, "prompts", made, host.work / "logs" / "prompts.log", 300):
            return code
    launcher = host.work / "aiperf-launcher"
    path = host.environment("aiperf")["PYTHONPATH"]
    launcher.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec "{sys.executable}" -m aiperf.cli "$@"\n', "utf-8")
    launcher.chmod(0o755)
    arguments = [
        "eval/run_cell.py", "--url", server.url, "--served-name", "m", "--model", str(model), "--aiperf", str(launcher),
        "--seed", str(seed), "--prompts", str(prompts / f"{cell.id}.jsonl"), *common, "--run", run, "--engine",
        out.parts[-4], "--engine-version", "0", "--engine-digest", engine_digest(), "--model-name", server.model,
        "--rep", str(rep), "--out", str(out),
    ]  # fmt: skip
    return program(host, cell.id, arguments, host.work / "logs" / f"{cell.id}.log", cell.timeout_s)


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
    base = host.work / "results" / run / "b1"
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
