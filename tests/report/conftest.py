"""Generated raw-result folders: real `Record` and `RawResult` objects with deterministic, plausible times."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sparkinfer_eval.records import RawResult, Record, write_records

VERSION = "0.1.0"
LENGTHS = {"chat": (128, 32), "long_answer": (16, 128), "long_prompt": (1024, 16), "poisson": (32, 64)}
SPEED = {"sparkinfer": 1.0, "vllm": 1.3, "previous": 1.1}


def digest(text: str) -> str:
    """A digest of the right form."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def make_records(engine: str, model: str, cell: str, count: int, seed: int) -> list[Record]:
    """One warm-up request and `count` measured ones; the same seed gives the same prompts on every engine."""
    shape, _, level = cell.partition("-")
    prompt, output = LENGTHS[shape]
    concurrency = max(1, int(float(level[1:])))
    draw = random.Random(f"{engine}-{model}-{cell}-{seed}")
    slow = SPEED.get(engine, 1.0) * (1 + 0.03 * concurrency)
    records = []
    for index in range(-1, count):
        if shape == "poisson":
            start = max(index, 0) * 500_000_000 // concurrency
        else:
            start = max(index, 0) // concurrency * 900_000_000 + max(index, 0) % concurrency * 1_000_000
        first = start + int(slow * (20 + prompt * 0.05 + draw.expovariate(1 / 25)) * 1e6)
        gap = slow * draw.uniform(4.0, 6.0) * 1e6
        tokens = output if shape != "poisson" or index % 5 else 16
        stamps = [int(first + gap * k) for k in range(tokens)]
        records.append(
            Record(
                request_id=f"{cell}-{index}",
                phase="warmup" if index < 0 else "profiling",
                prompt_sha256=hashlib.sha256(f"{cell}-{seed}-{index}".encode()).hexdigest(),
                prompt_tokens=prompt + 9,
                output_tokens=tokens,
                start_ns=10**18 + start,
                first_token_ns=10**18 + first,
                end_ns=10**18 + stamps[-1],
                finish_reason="length",
                token_ns=[10**18 + s for s in stamps],
                label=("short" if tokens == 16 else "long") if shape == "poisson" else None,
            )
        )
    return records


class RawRun:
    """A run folder under construction; `write()` puts run.json, results and checks on disk."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.engines: list[str] = settings.get("engines", ["sparkinfer", "vllm"])
        self.models: list[str] = settings.get("models", ["spark-tiny-dense"])
        self.cells: list[str] = settings.get("cells", ["chat-c1", "chat-c16", "long_answer-c4", "poisson-r1"])
        self.counts: dict[str, int] = settings.get("counts", {"chat-c16": 70})
        self.blocks, self.reps = settings.get("blocks", 1), settings.get("reps", 1)
        self.label: str = settings.get("label", "spark-tiny-dense")
        self.random_weights: bool = settings.get("random_weights", True)
        self.container: dict[str, Any] | None = settings.get("container")
        self.skip: set[tuple[str, str]] = settings.get("skip", set())
        self.folder = folder / "results" / f"{VERSION}-cpu-0a1b2c3d"

    @property
    def info(self) -> dict[str, Any]:
        """run.json, as `collect` would write it."""
        versions = {"sparkinfer": VERSION, "previous": "0.0.9", "vllm": "0.30.0"}
        labels = {"vllm": "vLLM 0.30.0"}
        return {
            "schema": "sparkinfer/run/v1",
            "run": self.folder.name,
            "version": VERSION,
            "profile": "cpu",
            "scale": {"statement": "CPU-scale run: lengths divided by 8, 1 repetition.", "full": False},
            "engines": [
                {
                    "name": name,
                    "label": labels.get(name, f"sparkinfer {versions[name]}"),
                    "version": versions[name],
                    "digest": digest(name),
                    "command": ["python", "-m", name, "--port", "0"],
                    "environment": {"OMP_NUM_THREADS": "2"},
                }
                for name in self.engines
            ],
            "models": [
                {"name": name, "label": self.label if len(self.models) == 1 else name, "digest": digest(name),
                 "random_weights": self.random_weights, "dtype": "float32", "parameters": 5_500_000}
                for name in self.models
            ],
            "cells": self.cells,
            "checks": ["pack_ckpt_check"],
            "blocks": self.blocks,
            "reps": self.reps,
            "commands": [{"name": "the whole evaluation", "command": ["make", "release"]}],
            "container": self.container,
            "machine": {"cpu_model": "Test CPU", "cpus_usable": 2, "cpu_quota": None, "memory_bytes": 8 * 2**30,
                        "os": "Debian GNU/Linux 12", "kernel": "6.1.0", "gpus": []},
            "source": {"commit": None, "dirty": None, "describe": None},
            "packages": {"engine": {"python": "3.11.7", "packages": {"torch": "2.13.0+cpu"}}},
            "written_at": "2026-12-01T12:00:00+00:00",
        }  # fmt: skip

    def place(self, engine: str, cell: str, block: int = 1, rep: int = 1, model: str | None = None) -> Path:
        """The folder of one raw result."""
        return self.folder / f"b{block}" / engine / (model or self.models[0]) / cell / f"r{rep}"

    def write_result(self, engine: str, model: str, cell: str, block: int, rep: int) -> None:
        """Write one raw result folder."""
        folder = self.place(engine, cell, block, rep, model)
        folder.mkdir(parents=True)
        seed = block * 100 + rep
        write_records(folder / "records.jsonl", make_records(engine, model, cell, self.counts.get(cell, 8), seed))
        result = RawResult(
            run=self.folder.name, block=block, engine=engine, engine_version="x", engine_digest=digest(engine),
            model=model, model_digest=digest(model), cell=cell, rep=rep, 
            cell_definition={"id": cell} | ({"rate": 4.0} if "poisson" in cell else {}),
            cell_digest=digest(cell), prompts_sha256=digest(f"{cell}{seed}"), command=["aiperf", "profile", cell],
            started_at=f"2026-12-01T10:{block:02d}:{rep:02d}+00:00", tool={"name": "aiperf", "version": "0.13.0"},
            checks=[{"name": "output_lengths", "value": 0, "limit": 0, "ok": True}],
        )  # fmt: skip
        (folder / "result.json").write_text(json.dumps(dataclasses.asdict(result)), encoding="utf-8")

    def write(self) -> RawRun:
        """Write everything."""
        for block in range(1, self.blocks + 1):
            for engine in self.engines:
                for model in self.models:
                    for cell in self.cells:
                        for rep in range(1, self.reps + 1):
                            if (engine, cell) not in self.skip:
                                self.write_result(engine, model, cell, block, rep)
        for model in self.models:
            self.write_check(model, ok=True)
        for engine in self.engines:
            facts = {"engine": engine, "version": "1.2.3", "engine_digest": digest(engine), "ready_s": 12.5, "argv": [],
                     "info": {"settings": {"max_num_seqs": 32}}}  # fmt: skip
            path = self.folder / "servers" / f"{engine}-b1-r1.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(facts), encoding="utf-8")
        (self.folder / "run.json").write_text(json.dumps(self.info, ensure_ascii=False), encoding="utf-8")
        return self

    def write_check(self, model: str, ok: bool) -> None:
        """Write a check program's output."""
        rows = [{"name": "largest state difference", "value": 1e-6 if ok else 0.3, "limit": 0.05, "ok": ok}]
        output = {"schema": "sparkinfer/check/v1", "check": "pack_ckpt_check", "model_digest": digest(model),
                  "engine_digest": digest("sparkinfer"), "device": "cpu", "dtype": "float32", "rows": rows,
                  "ok": ok}  # fmt: skip
        path = self.folder / "checks" / f"pack_ckpt_check-{model}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(output), encoding="utf-8")

    def edit_records(self, engine: str, cell: str, change: Callable[[Record], Record]) -> None:
        """Rewrite one result's records."""
        from sparkinfer_eval.records import read_records

        path = self.place(engine, cell) / "records.jsonl"
        write_records(path, [change(r) for r in read_records(path)])


@pytest.fixture
def raw_run(tmp_path: Path) -> Callable[..., RawRun]:
    """Factory: `raw_run(engines=..., cells=..., ...)` writes a run and returns it."""

    def build(**settings: Any) -> RawRun:
        return RawRun(tmp_path, **settings).write()

    return build


@pytest.fixture
def changes(tmp_path: Path) -> Path:
    """A folder with two fragments."""
    folder = tmp_path / "changes"
    folder.mkdir()
    (folder / "server.md").write_text(
        "---\ncategory: Added\nheadline: the first server\n---\nA server.\n", encoding="utf-8"
    )
    (folder / "mixing.md").write_text(
        "---\ncategory: Changed\nsetting: SPARKINFER_MIXED_CHUNK\nturn off: SPARKINFER_MIXED_CHUNK=0\n---\n"
        "Mixed steps: prefill and decode share a pass.\n",
        encoding="utf-8",
    )
    return folder
