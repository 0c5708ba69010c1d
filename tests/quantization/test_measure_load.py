"""The measurement of loading reads every weight, and its memory does not grow with the checkpoint on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparkinfer.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]


def test_everything_is_read_and_nothing_copied(source, quantise, tmp_path):
    folder = source(shard_bytes=8 << 20, num_hidden_layers=32, layer_types=None, hidden_size=512)
    done = subprocess.run(
        [sys.executable, str(ROOT / "models/measure_load.py"), str(folder)], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**20
    assert size - 1 < found["mib"] <= size
    assert size > 60
    assert found["host_peak_anonymous"] < 0.3 * size


def test_damage_is_told(source, tmp_path):
    from sparkinfer_models.measure_load import measure_load

    (tmp_path / "config.json").write_text((source() / "config.json").read_text())
    with pytest.raises(CheckpointError, match="holds neither"):
        measure_load(tmp_path, torch.device("cpu"))
