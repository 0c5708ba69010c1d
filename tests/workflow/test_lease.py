"""The lease: reuse, replacement, what happens when the server or the owner dies, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sparkinfer_eval.report.failures import read_failures

from .conftest import marked, none_left

PRINT_STATE = ("--", "cat", "{state}")


def call(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    """Run lease.py with this test as the owner of the server."""
    environment = {**os.environ, "EVALUATION_WORKFLOW_PID": str(os.getpid())}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, **options)  # type: ignore[call-overload,no-any-return]


def state_of(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """The state that `cat {state}` printed after the first line."""
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout[done.stdout.index("{") :])  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def stop_server(tmp_path: Path, lease: Callable[..., list[str]], toy_engine: Callable[..., Path], mark: str) -> object:
    yield
    assert call(lease("stop", toy_engine())).returncode == 0


def test_same_server_is_reused_and_another_session_replaces_it(lease, toy_engine, mark):
    engine = toy_engine()
    first = state_of(call(lease("run", engine, *PRINT_STATE)))
    assert first["version"] == "1.2.3"
    assert first["status"] == "ready"
    again = state_of(call(lease("run", engine, *PRINT_STATE)))
    assert again["server"] == first["server"]
    other = state_of(call(lease("run", engine, "--session", "b1", *PRINT_STATE)))
    assert other["server"] != first["server"]
    assert len([line for line in marked(mark) if "toy_server" in line and "unshare" not in line]) == 1


def test_stop_ends_server_and_grandchild(lease, toy_engine, mark):
    engine = toy_engine("--ignore-term")
    state_of(call(lease("run", engine, *PRINT_STATE)))
    assert len(marked(mark)) >= 2
    assert call(lease("stop", engine)).returncode == 0
    assert none_left(mark, 3.0) == []


def test_server_that_dies_at_start_says_why(lease, toy_engine):
    done = call(lease("run", toy_engine("--die-at-start"), *PRINT_STATE))
    assert done.returncode == 3
    assert "exit code 5" in done.stderr
    assert "no such weights" in done.stderr


def test_server_that_never_answers_is_given_up(lease, toy_engine):
    done = call(lease("run", toy_engine("--slow", "60", timeout_s=1.0), *PRINT_STATE))
    assert done.returncode == 3
    assert "did not answer /health within 1 s" in done.stderr


def test_server_that_dies_mid_cell_fails_the_cell_and_is_noted(lease, toy_engine, tmp_path):
    # Readiness, version, two warm-up requests and one chat are five answers; the cell's own request is the last.
    engine = toy_engine("--die-after", "6")
    ask = "import sys, time, urllib.request as u; u.urlopen(sys.argv[1] + '/health').read(); time.sleep(30)"
    record = ("--record", str(tmp_path / "run"), "--engine-name", "toy", "--model-name", "m", "--cell", "chat-c1")
    begun = time.monotonic()
    done = call(lease("run", engine, *record, "--", sys.executable, "-c", ask, "{url}"))
    assert time.monotonic() - begun < 25
    assert done.returncode == 3
    assert "the server ended while the job ran" in done.stderr
    assert "dying as told" in done.stderr
    (failure,) = read_failures(tmp_path / "run")
    assert (failure.engine, failure.cell) == ("toy", "chat-c1")
    assert "exit code 7" in failure.reason
    fresh = toy_engine()
    assert state_of(call(lease("run", fresh, *PRINT_STATE)))["status"] == "ready"


def test_failed_command_keeps_its_code_and_reason(lease, toy_engine, tmp_path):
    engine = toy_engine()
    script = "import sys; print('error: 3 of 8 requests failed', file=sys.stderr); sys.exit(4)"
    record = ("--record", str(tmp_path / "run"), "--engine-name", "toy", "--model-name", "m", "--cell", "c")
    done = call(lease("run", engine, *record, "--", sys.executable, "-c", script))
    assert done.returncode == 4
    assert read_failures(tmp_path / "run")[0].reason == "error: 3 of 8 requests failed"
    assert call(lease("run", engine, "--", "true")).returncode == 0


def test_fixed_port_in_use_names_port_and_fix(lease, toy_engine):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = call(lease("run", toy_engine(), "--port", str(port), *PRINT_STATE))
    assert done.returncode == 3
    assert f"port {port} cannot be used" in done.stderr
    assert "setting `port`" in done.stderr


def test_missing_model_and_no_owner(lease, toy_engine, tmp_path):
    engine = toy_engine()
    done = call([*lease("acquire", engine), "--model", str(tmp_path / "nowhere")])
    assert done.returncode == 2
    assert "is not a model folder" in done.stderr
    bare = {k: v for k, v in os.environ.items() if k != "EVALUATION_WORKFLOW_PID"}
    alone = subprocess.run(lease("acquire", engine), capture_output=True, text=True, env=bare, check=False)
    assert alone.returncode == 3
    assert "--owner-pid" in alone.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_owner_gone_means_server_job_and_grandchild_gone(lease, toy_engine, mark, number):
    job = lease(
        "run",
        toy_engine(),
        "--",
        sys.executable,
        "-c",
        "import time; print('running', flush=True); time.sleep(60)",
        mark,
    )
    program = (
        "import os, subprocess, sys; os.environ['EVALUATION_WORKFLOW_PID'] = str(os.getpid());"
        "subprocess.run(sys.argv[1:], start_new_session=True)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program, *job], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    while "running" not in owner.stdout.readline():
        assert owner.poll() is None
    owner.send_signal(number)
    owner.wait(10)
    assert none_left(mark, 5.0) == []


def test_killed_watchdog_takes_the_server_along(lease, toy_engine, mark):
    state = state_of(call(lease("run", toy_engine(), *PRINT_STATE)))
    os.kill(state["watchdog"]["pid"], signal.SIGKILL)  # type: ignore[index]
    left = none_left(mark, 5.0)
    assert [line for line in left if "toy_server" in line] == []


def test_state_of_another_living_workflow_is_respected(lease, toy_engine, tmp_path):
    engine = toy_engine()
    state_of(call(lease("run", engine, *PRINT_STATE)))
    program = (
        "import os, subprocess, sys; os.environ['EVALUATION_WORKFLOW_PID'] = str(os.getpid());"
        "sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *lease("run", engine, *PRINT_STATE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "the device is in use" in done.stderr
