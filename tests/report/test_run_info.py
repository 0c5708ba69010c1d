"""run.json: declared fields, collected facts, refusals."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sparkinfer_eval.report.machine import GPU_FIELDS, environment_packages, machine_facts, parse_gpu_query
from sparkinfer_eval.report.run_info import collect, read_declaration, read_run_info, write_json
from sparkinfer_eval.report.text import machine_line

from sparkinfer.errors import ConfigError, EnvironmentProblem

REPOSITORY = Path(__file__).resolve().parents[2]
DECLARATION = {
    "run": "0.1.0-cpu-0a1b2c3d",
    "version": "0.1.0",
    "profile": "cpu",
    "scale": {"statement": "CPU-scale run: lengths divided by 8.", "full": False},
    "engines": [{"name": "sparkinfer", "label": "sparkinfer 0.1.0", "version": "0.1.0",
                 "digest": "sha256:" + "a" * 64, "command": ["sparkinfer", "serve"]}],
    "models": [{"name": "m", "label": "m", "digest": "sha256:" + "b" * 64, "random_weights": True}],
    "cells": ["chat-c1"],
    "checks": [],
    "blocks": 1,
    "reps": 1,
}  # fmt: skip


def test_collected_facts_describe_this_machine_and_name_no_host():
    facts = machine_facts()
    assert facts["cpus_usable"] >= 1
    assert facts["memory_bytes"] > 2**28
    text = json.dumps(facts)
    assert socket.gethostname() not in text or len(socket.gethostname()) < 4
    assert str(Path.home()) not in text
    assert "CPUs" in machine_line(facts)


def test_run_info_round_trip(tmp_path):
    info = collect(dict(DECLARATION), {"engine": Path(sys.executable)}, REPOSITORY)
    write_json(tmp_path / "run.json", info)
    assert read_run_info(tmp_path / "run.json") == info
    assert "pytest" in info["packages"]["engine"]["packages"]
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_command_writes_run_json(tmp_path):
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(DECLARATION))
    done = subprocess.run(
        [sys.executable, REPOSITORY / "eval" / "run_info.py", "--spec", spec, "--output", tmp_path / "r" / "run.json",
         "--environment", f"again={sys.executable}"],
        capture_output=True, text=True, check=False,
        env={"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'eval'}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(read_run_info(tmp_path / "r" / "run.json")["packages"]) == {"engine", "again"}


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "neither JSON nor YAML"), ("[1]", "must hold one object"), ("machine: {}", "unknown fields machine")],
)
def test_bad_declarations(tmp_path, text, message):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_declaration(path)


def test_missing_declaration(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_declaration(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("field", "value"),
    [("run", "../x"), ("blocks", "1"), ("engines", []), ("cells", []), ("scale", {"statement": "", "full": False})],
)
def test_declared_fields_are_validated(field, value):
    with pytest.raises(ConfigError, match=f"run-v1:\n  {field}"):
        collect(DECLARATION | {field: value}, {}, REPOSITORY)


def test_environment_that_does_not_run():
    with pytest.raises(EnvironmentProblem, match="does not run"):
        environment_packages(Path("/nonexistent/python"))


def test_gpu_rows():
    row = ["NVIDIA H200", "GPU-1", "580.95", "96.00", "143771", "1980", "3201", "1980", "3201", "700.00", "120.5", "31",
           "Enabled", "Enabled", "0x0000000000000000"]  # fmt: skip
    gpus = parse_gpu_query(", ".join(row) + "\n")
    assert gpus == [dict(zip(GPU_FIELDS, row, strict=True))]
    assert "driver 580.95" in machine_line({"gpus": gpus})
    with pytest.raises(ValueError, match="3 fields"):
        parse_gpu_query("a, b, c\n")
