"""Faults in the middle of a run: named with the fix; finished results stay, only what is missing is measured again."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from sparkinfer_eval.report.failures import read_failures

Run = Callable[..., subprocess.CompletedProcess[str]]


def toy_settings(tmp_path: Path, **over: object) -> Path:
    """A settings file that measures the toy engine in two small cells."""
    settings = {
        "profile": "cpu",
        "engines": ["toy"],
        "engine_folder": str(tmp_path),
        "checks": [],
        "scale": "smoke",
        "scale_overrides": {
            "cells": ["chat-c1", "chat-c4"],
            "requests": {"1": 2, "4": 4},
            "warmup_requests": {"1": 1, "4": 1},
        },
        "smoke": {},
        **over,
    }
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def run_folder(checkout: Path, text: str) -> Path:
    """The run's folder, from a path that Snakemake printed."""
    found = re.search(r"results/(0\.[\w.+-]+)/", text)
    assert found is not None, text
    return checkout / "results" / found.group(1)


def sweeps(done: subprocess.CompletedProcess[str]) -> int:
    """How many cells a dry run would measure."""
    found = re.search(r"^sweep\s+(\d+)$", done.stdout, re.MULTILINE)
    return int(found.group(1)) if found else 0


@pytest.mark.aiperf
def test_server_death_fails_one_cell_and_keeps_its_sibling(
    checkout: Path, snakemake: Run, toy_engine: Callable[..., Path], tmp_path: Path
) -> None:
    # Readiness, version, warm-up (3) and a few probes are answered; then it dies under the load generator.
    toy_engine("--hang-chat-stream", "--sign", str(tmp_path / "hanging"), "--die-on-hang")
    config = toy_settings(tmp_path)
    planned = snakemake("release", "-n", "--configfile", str(config))
    assert sweeps(planned) == 2, planned.stdout
    folder = run_folder(checkout, planned.stdout)
    sibling = folder / "b1/toy/spark-tiny-dense/chat-c4/r1/result.json"
    failed = folder / "b1/toy/spark-tiny-dense/chat-c1/r1/result.json"
    done = snakemake(str(failed.relative_to(checkout)), "--retries", "0", "--configfile", str(config), timeout_s=180)
    assert done.returncode != 0
    assert "the server ended while the job ran" in done.stdout
    assert "dying as told" in done.stdout
    assert not failed.exists()
    (failure,) = read_failures(folder)
    assert (failure.engine, failure.cell, failure.block, failure.rep) == ("toy", "chat-c1", 1, 1)
    sibling.parent.mkdir(parents=True)
    sibling.write_text("{}")
    again = snakemake("release", "-n", "--configfile", str(config))
    assert sweeps(again) == 1, again.stdout
    assert "chat-c1" in again.stdout
    assert sibling.read_text() == "{}"


@pytest.mark.aiperf
def test_port_in_use_is_named(checkout: Path, snakemake: Run, toy_engine: Callable[..., Path], tmp_path: Path) -> None:
    import socket

    toy_engine()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = toy_settings(tmp_path, port=port)
        planned = snakemake("release", "-n", "--configfile", str(config))
        result = run_folder(checkout, planned.stdout) / "b1/toy/spark-tiny-dense/chat-c1/r1/result.json"
        done = snakemake(str(result.relative_to(checkout)), "--retries", "0", "--configfile", str(config))
    assert done.returncode != 0
    assert f"port {port} cannot be used" in done.stdout


@pytest.fixture
def small_disk(checkout: Path) -> Iterator[Path]:
    """results/ on a file system of 6 MB, too small for the model."""
    folder = checkout / "results"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_is_named_and_the_run_goes_on_once_there_is_space(
    checkout: Path, snakemake: Run, small_disk: Path, tmp_path: Path
) -> None:
    kept = small_disk / "finished" / "result.json"
    kept.parent.mkdir()
    kept.write_text(json.dumps({"finished": True}))
    # A generated model is written to results/; one of the repository is only linked there.
    model = {"name": "generated", "source": {"generate": "dense"}, "dtype": "bfloat16"}
    over = {"models": [model], "engines": ["sparkinfer"], "engine_folder": "config/engines", "engine_from": "source"}
    target = ("release", "--until", "model", "--configfile", str(toy_settings(tmp_path, **over)))
    done = snakemake(*target, "--retries", "0")
    assert done.returncode != 0
    assert "the disk is full: free some space and start again" in done.stdout
    assert [path for path in (small_disk / "models").glob("*") if path.is_dir()] == []
    assert json.loads(kept.read_text()) == {"finished": True}
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    done = snakemake(*target, "--retries", "0")
    assert done.returncode == 0, done.stdout
    assert json.loads(kept.read_text()) == {"finished": True}
    assert list((small_disk / "models").glob("*/model.safetensors"))
