"""Ctrl-C, SIGTERM and SIGKILL of the real workflow while a cell runs: server, job and load generator are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from .conftest import marked, none_left, snakemake_command, tree_of

CELL = "chat-c1"


@pytest.fixture
def toy_run(checkout: Path, toy_engine: Callable[..., Path], tmp_path: Path) -> tuple[list[str], str]:
    """Snakemake's command for one cell of the toy engine, whose answers never come, and the result's path."""
    toy_engine("--hang-chat-stream", "--sign", str(tmp_path / "hanging"))
    settings = {
        "profile": "cpu",
        "engines": ["toy"],
        "engine_folder": str(tmp_path),
        "checks": [],
        "scale": "smoke",
        "scale_overrides": {"cells": [CELL], "requests": {"1": 2}, "warmup_requests": {"1": 1}},
        "smoke": {},
    }
    config = tmp_path / "settings.yaml"
    config.write_text(yaml.safe_dump(settings))
    plan = subprocess.run(
        snakemake_command("release", "-n", "--configfile", str(config)),
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    text = plan.stdout + plan.stderr
    result = next(
        (
            word.rstrip(",")
            for word in text.split()
            if word.rstrip(",").endswith(f"toy/spark-tiny-dense/{CELL}/r1/result.json")
        ),
        "",
    )
    assert result, text
    return [*snakemake_command(result), "--retries", "0", "--configfile", str(config)], result


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, timeout_s: float = 120
) -> None:
    """Wait until a condition holds; the workflow must not end before."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.mark.aiperf
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_workflow(
    checkout: Path, toy_run: tuple[list[str], str], mark: str, tmp_path: Path, number: signal.Signals
) -> None:
    command, result = toy_run
    log = tmp_path / "snakemake.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=checkout, stdout=out, stderr=out, start_new_session=True)
    # The load generator is at work: the server has been asked for a first streamed answer.
    wait_for((tmp_path / "hanging").exists, process, log)
    jobs = tree_of(process.pid)
    assert any("aiperf" in command for command in jobs.values()), jobs
    assert any("toy_server" in line for line in marked(mark))
    begun = time.monotonic()
    if number == signal.SIGINT:
        # As a terminal does: to the whole foreground group.
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    process.wait(30)
    assert none_left(mark, 5.0) == []
    deadline = time.monotonic() + 10
    while (left := {p: command for p, command in jobs.items() if p.alive()}) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == {}, log.read_text()
    assert time.monotonic() - begun < 30
    assert process.returncode != 0
    assert not (checkout / result).exists()
