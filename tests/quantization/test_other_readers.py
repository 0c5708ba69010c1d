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
RULES = (
    ("self_attn", Format.FP8),
    ("linear_attn.out_proj", None),
    ("layers.1.mlp.experts", Format.FP8),
    ("lm_head", Format.NVFP4),
)


@pytest.mark.vllm
@pytest.mark.skipif(not PYTHON.exists(), reason="the vLLM environment is not installed")
def test_compressed_tensors_and_vllm_read_what_we_write(source, multimodal, quantise, tmp_path):
    for prefix, folder in (("", source("toy-moe")), ("mm-", multimodal("toy-moe"))):
        quantise(folder, tmp_path / f"{prefix}nvfp4")
        quantise(folder, tmp_path / f"{prefix}fp8", "fp8")
        quantise(folder, tmp_path / f"{prefix}mixed", rules=RULES)
    names = [f"{prefix}{kind}" for prefix in ("", "mm-") for kind in ("nvfp4", "fp8", "mixed")]
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels"))
    command = [str(PYTHON), str(Path(__file__).with_name("oracles_in_vllm.py"))]
    done = subprocess.run(
        [*command, *(str(tmp_path / name) for name in names)],
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
    assert list(result["decisions"]) == names
    for name, found in result["decisions"].items():
        assert found["count"] > 200
        assert found["wrong"] == [], name
        assert found["others"] == (8 if name.startswith("mm-") else 0)
