"""The shipped drafters in vLLM 0.30's own classes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venvs" / "vllm" / "bin" / "python"


@pytest.mark.vllm
@pytest.mark.skipif(not PYTHON.exists(), reason="the vLLM environment is not installed")
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_drafter_loads_in_vllm_and_computes_the_same(name: str) -> None:
    folder = ROOT / "models"
    command = [
        str(PYTHON),
        str(Path(__file__).with_name("drafter_in_vllm.py")),
        str(folder / f"spark-tiny-{name}"),
        str(folder / f"spark-tiny-{name}-dflash2"),
    ]
    path = os.pathsep.join((str(ROOT), str(ROOT / "models")))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    errors = json.loads(line.removeprefix("RESULT "))
    assert len(errors) >= 10
    assert {key: value for key, value in errors.items() if value > 1e-4} == {}
