"""A model by name: folders, and hub ids that must carry a commit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sparkinfer.errors import CheckpointError, EnvironmentProblem
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
