"""A model by name: folders, and hub ids that must carry a commit."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from sparkinfer_eval.accuracy.engines import parse_spec

from sparkinfer import bench, profiling
from sparkinfer.errors import CheckpointError, EnvironmentProblem
from sparkinfer.models import hub
from sparkinfer.models.hub import resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_folder_is_taken_as_it_is(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no/such", r"write no/such@<commit>"),
        ("/no/such/folder", r"no model folder"),
        ("owner/name@main", r"revision 'main' is no commit id of 40 hex digits"),
        (f"owner/name@{COMMIT[:12]}", r"is no commit id"),
    ],
)
def test_what_is_no_model_says_what_to_give(model, message):
    with pytest.raises(CheckpointError, match=message):
        resolve_model(model)


def test_a_commit_in_the_cache_needs_no_network(tmp_path, monkeypatch):
    """The layout of the hub's cache: snapshots by commit."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--owner--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    import huggingface_hub

    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: real(*a, cache_dir=tmp_path, local_files_only=True, **k)
    )
    assert resolve_model(f"owner/name@{COMMIT}") == snapshot
    other = COMMIT[::-1]
    with pytest.raises(EnvironmentProblem, match=f"owner/name at {other} could not be fetched"):
        resolve_model(f"owner/name@{other}")


@pytest.mark.parametrize(
    ("endpoint", "code", "text"), [("http://[", 2, "HF_ENDPOINT"), ("http://127.0.0.1:9", 3, "network")]
)
def test_an_endpoint_that_answers_nothing_is_one_line(endpoint, code, text):
    program = "import sys; from sparkinfer.cli import main; sys.exit(main(sys.argv[1:]))"
    result = subprocess.run(
        [sys.executable, "-c", program, "serve", f"owner/name@{COMMIT}"], env={**os.environ, "HF_ENDPOINT": endpoint},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == code
    assert text in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.fixture
def fetched(checkpoint, monkeypatch):
    """A hub id, and the folder it is fetched into."""
    folder, _ = checkpoint("dense")
    monkeypatch.setattr(hub, "_fetch", lambda *given: {("owner/name", COMMIT): folder}[given])
    return f"owner/name@{COMMIT}", folder


@pytest.mark.parametrize("program", [bench, profiling])
def test_steps_of_a_model_of_the_hub(fetched, program, tmp_path):
    arguments = ["--decode", "1", "--context", "9", "--prefill", "9", "--steps", "1", "--json", str(tmp_path / "f")]
    assert program.main([fetched[0], *arguments]) == 0
    assert json.loads((tmp_path / "f").read_text())["model"] == f"name@{COMMIT}"


def test_other_programs_take_models_of_the_hub(fetched, monkeypatch, capsys):
    name, folder = fetched
    assert parse_spec(f"transformers:{name},dtype=float32").folder == folder
    monkeypatch.setattr(sys, "argv", ["measure_load.py", name])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(Path(__file__).parents[2] / "models/measure_load.py"), run_name="__main__")
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["tensors"] > 10
