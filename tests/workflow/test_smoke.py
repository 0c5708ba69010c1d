"""One real smoke release: both engines, AIPerf, Poisson arrivals, the check, the report; a second run does nothing."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import ROOT

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.vllm
@pytest.mark.aiperf
@pytest.mark.timeout(1200)
def test_smoke_release_end_to_end_and_nothing_to_do_again(checkout: Path, snakemake: Run) -> None:
    (checkout / "results").mkdir()
    # Compiled graphs of the baseline may be shared with earlier runs.
    cache = ROOT / "results" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    (checkout / "results" / "cache").symlink_to(cache)
    command = ["make", "smoke", "ARGS=--config profile=cpu"]
    environment = {**os.environ, "ATTEST_STATE": str(checkout.parent / "attest")}
    first = subprocess.run(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert first.returncode == 0, first.stdout[-6000:]
    (report,) = (checkout / "reports").iterdir()
    assert report.name.startswith("0.1.0-cpu-smoke-")
    for name in ("CHANGELOG.md", "RELEASE_NOTE.md", "report.json", "report.html", "requests.parquet", "commands.txt"):
        assert (report / name).stat().st_size > 0, name
    assert "not the shipped image (the setting engine_from is `source`)" in first.stdout
    assert "not the shipped image" in (report / "CHANGELOG.md").read_text()
    (bundle,) = (report / "bundles").iterdir()
    assert bundle.name == "evaluation-source.sigstore.json"
    verified = json.loads((checkout / "results" / report.name / "signed.json").read_text())
    assert verified["ok"]
    assert verified["evaluations"] == [report.name]
    data = json.loads((report / "report.json").read_text())
    assert data["schema"] == "sparkinfer/report/v1"
    measured = {(cell["engine"], cell["cell"]) for cell in data["cells"] if cell["metric"] == "output_tok_s"}
    cells = ("chat-c4", "long_answer-c1", "poisson-r1")
    assert measured >= {(engine, cell) for engine in ("sparkinfer", "vllm") for cell in cells}
    again = subprocess.run(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert again.returncode == 0
    assert "Nothing to be done" in again.stdout
    page = checkout / "workflow-report.html"
    made = snakemake("smoke", "--config", "profile=cpu", "--report", str(page))
    assert made.returncode == 0, made.stdout
    assert page.stat().st_size > 100_000
    assert not (checkout / "results/.server/server.json").exists()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                assert str(checkout) not in (entry / "cmdline").read_bytes().decode(errors="replace"), entry
            except (FileNotFoundError, ProcessLookupError):
                continue
