"""Kernels of a trial run are compiled by threads, each once, and found by the launches after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_trial_s_kernels_are_compiled_once_and_then_found(tmp_path: Path) -> None:
    # A process of its own: here kernels may be interpreted, which replaces the functions that compile.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    program = [sys.executable, str(Path(__file__).with_name("gpu_compile_kernels.py"))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["first"] == 3
    assert found["compiled"] == {"scaled": 2, "summed": 1}
    assert isinstance(found["second"], str)
    assert "Driver" in found["second"]
