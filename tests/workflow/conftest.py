"""Fixtures of the workflow's tests: a toy engine, a toy model, and a watch for processes left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from sparkinfer_eval.lease.process import ProcessId, descendants

ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).with_name("toy_server.py")


def marked(mark: str) -> list[str]:
    """Command lines of living processes that carry `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if mark in command:
                found.append(f"{entry.name}: {command}")
    return found


def none_left(mark: str, timeout_s: float = 10.0) -> list[str]:
    """Wait until no process carries `mark`; returns those that still do after the timeout."""
    deadline = time.monotonic() + timeout_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.fixture
def mark() -> Iterator[str]:
    """A text that only this test's processes carry in their command line; nothing may be left at the end."""
    text = "spark-test-" + uuid.uuid4().hex
    yield text
    assert none_left(text) == []


@pytest.fixture
def toy_model(tmp_path: Path) -> Path:
    """A folder that passes for a model."""
    folder = tmp_path / "toy-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 512}))
    return folder


@pytest.fixture
def toy_engine(tmp_path: Path, mark: str) -> Callable[..., Path]:
    """Writes an engine file for the toy server; arguments are added to its command."""

    def write(*arguments: str, name: str = "toy", timeout_s: float = 20.0) -> Path:
        path = tmp_path / f"{name}.yaml"
        data = {
            "name": name,
            "title": "Toy",
            "environment": "engine",
            "source": {"kind": "tree"},
            "start": {"argv": ["{python}", str(SERVER), "{port}", mark, *arguments]},
            "ready": {"path": "/health", "timeout_s": timeout_s, "interval_s": 0.05},
            "stop": {"signal": "SIGTERM", "grace_s": 2},
            "version": {"path": "/version", "field": "version"},
            "tokenizer": "model",
            "warm_up": [{"prompt_tokens": 4, "output_tokens": 2, "concurrency": 2}],
        }
        path.write_text(yaml.safe_dump(data))
        return path

    return write


@pytest.fixture
def lease(tmp_path: Path, toy_model: Path) -> Callable[..., list[str]]:
    """Builds the command line of lease.py for the toy model."""

    def build(action: str, engine: Path, *arguments: str) -> list[str]:
        return [
            sys.executable, str(ROOT / "workflow/scripts/lease.py"), action, "--folder", str(tmp_path / "server"),
            "--engine", str(engine), "--python", sys.executable, "--model", str(toy_model), "--max-model-len", "64",
            "--cache", str(tmp_path / "cache"), "--log", str(tmp_path / "server.log"), *arguments,
        ]  # fmt: skip

    return build


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like a checkout but has results, reports and Snakemake's state of its own."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in (
        "Snakefile", "workflow", "profiles", "config", "eval", "sparkinfer", "kernels", "models", "containers",
        "changes", "pyproject.toml", ".venv", ".venvs", "CHANGELOG.md", "Makefile", ".git",
    ):  # fmt: skip
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    return folder


def snakemake_command(*arguments: str) -> list[str]:
    """Command line of the pinned Snakemake."""
    return [str(ROOT / ".venvs/snakemake/bin/snakemake"), *arguments]


@pytest.fixture
def snakemake(checkout: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Snakemake in the checkout and returns what it said (both streams in `stdout`)."""

    def run(*arguments: str, timeout_s: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            snakemake_command(*arguments),
            cwd=checkout,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run


def tree_of(pid: int) -> dict[ProcessId, str]:
    """Every process below `pid`, with its command line."""
    found = {}
    for child in descendants(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found[ProcessId.of(child)] = command
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
