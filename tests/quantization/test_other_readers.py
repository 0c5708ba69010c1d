"""Our checkpoints in the hands of compressed-tensors and of vLLM 0.30's own config classes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from sparkinfer.quantization.schemes import Format

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venvs" / "vllm" / "bin" / "python"
RULES = (("self_attn", Format.FP8), ("linear_attn.out_proj", None), ("layers.1.mlp.experts", Format.FP8))


@pytest.mark.vllm
@pytest.mark.skipif(not PYTHON.exists(), reason="the vLLM environment is not installed")
def test_compressed_tensors_and_vllm_read_what_we_write(source, quantise, tmp_path):
    folder = source("toy-moe")
    quantise(folder, tmp_path / "nvfp4")
    quantise(folder, tmp_path / "fp8", "fp8")
    quantise(folder, tmp_path / "mixed", rules=RULES)
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels"))
    command = [str(PYTHON), str(Path(__file__).with_name("oracles_in_vllm.py"))]
    done = subprocess.run(
        [*command, *(str(tmp_path / name) for name in ("nvfp4", "fp8", "mixed"))],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    unpacked = result["compressed_tensors"]
    assert unpacked["count"] > 200
    assert unpacked["repacked"]
    # Theirs divides by the reciprocal of the global scale: a rounding or two of fp32.
    assert unpacked["worst"] < 1e-6
    for found in result["decisions"].values():
        assert found["count"] > 200
        assert found["wrong"] == []
