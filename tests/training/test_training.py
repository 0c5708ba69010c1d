"""The recipe at toy scale on a CPU: it learns, it resumes bit for bit, and it refuses bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sparkinfer_models.dataset import Position, WindowSampler, read_stream, write_stream
from sparkinfer_models.optimizer import orthogonalise, trapezoid
from sparkinfer_models.train_cli import main

STEPS = ["--steps", "14", "--warmup", "2", "--log-every", "7"]
SHAPE = ["--length", "64", "--batch", "4", "--long-length", "128", "--long-share", "0.2"]


def _run(data: Path, out: Path, model: str, *extra: str) -> int:
    return main(["run", "--model", model, "--data", str(data), "--out", str(out), "--toy", "--device", "cpu",
                 *SHAPE, *STEPS, *extra])  # fmt: skip


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_interrupted_and_resumed_training_equals_uninterrupted(model: str, toy_data: Path, tmp_path: Path) -> None:
    assert _run(toy_data, tmp_path / "whole", model) == 0
    assert _run(toy_data, tmp_path / "parts", model, "--stop-at", "5") == 0
    stopped = load_file(tmp_path / "parts" / "model.safetensors")
    assert _run(toy_data, tmp_path / "parts", model, "--resume") == 0
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
    assert any(not torch.equal(tensor, whole[name]) for name, tensor in stopped.items())
    log = [json.loads(line) for line in (tmp_path / "whole" / "training_log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == [7, 14]
    assert log[-1]["length"] == 128
    assert log[-1]["loss"] < log[0]["loss"] < np.log(512) + 0.1


def test_a_time_limit_becomes_a_number_of_steps(toy_data: Path, tmp_path: Path) -> None:
    arguments = ["run", "--model", "dense", "--data", str(toy_data), "--out", str(tmp_path), "--toy", "--device", "cpu"]
    assert main([*arguments, *SHAPE, "--max-seconds", "6", "--log-every", "5", "--warmup", "2"]) == 0
    state = torch.load(tmp_path / "training.pt", weights_only=True)
    assert 10 < state["step"] <= state["recipe"]["steps"]
    windows = state["windows"]
    assert windows[64] * 64 + windows.get(128, 0) * 128 == state["tokens"]


def test_bad_input_is_refused(toy_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(tmp_path / "nowhere", tmp_path / "out", "dense") == 2
    assert "train.u16.xz is missing" in capsys.readouterr().err
    assert _run(toy_data, tmp_path / "out", "dense", "--resume") == 2
    assert "training.pt is missing" in capsys.readouterr().err
    assert _run(toy_data, tmp_path / "out", "dense", "--steps", "0") == 2
    assert "no end otherwise" in capsys.readouterr().err
    assert _run(toy_data, tmp_path / "out", "dense", "--cuda-graphs") == 2
    assert _run(toy_data, tmp_path / "out", "dense", "--long-length", "40000", "--long-share", "1") == 2
    assert "too few" in capsys.readouterr().err
    assert _run(toy_data, tmp_path / "out", "dense", "--long-length", "0") == 2
    assert "--long-length 0: give at least 1" in capsys.readouterr().err
    (tmp_path / "out" / "training_log.jsonl").write_text("{}")
    assert _run(toy_data, tmp_path / "out", "dense") == 2
    assert "of an earlier run: go on with --resume" in capsys.readouterr().err


def test_a_device_that_is_not_there(toy_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(toy_data, tmp_path, "dense", "--device", "cudo") == 2
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert _run(toy_data, tmp_path, "dense", "--device", "cuda") == 3
    assert "finds no CUDA device" in capsys.readouterr().err


def test_stream_round_trip(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 2048, 4097).astype(np.uint16)
    write_stream(tmp_path / "s.u16.xz", ids)
    assert np.array_equal(read_stream(tmp_path / "s.u16.xz"), ids)


def test_sampler_reads_every_window_once_an_epoch_and_depends_on_position_only() -> None:
    ids = np.arange(1000)
    sampler = WindowSampler(ids, seed=4)
    position, seen = Position({}), []
    per_epoch = (len(ids) - 1 - 50) // 50
    for _ in range(per_epoch):
        rows = sampler.batch(position, 50, 1)
        assert np.array_equal(np.diff(rows[0]), np.ones(50))
        seen.append(int(rows[0, 0]))
        position = position.advanced(50, 1)
    assert len(set(seen)) == per_epoch
    # A fresh sampler at the same position, and one that read another length in between, give the same rows.
    later = sampler.batch(position, 50, 3)
    fresh = WindowSampler(ids, seed=4)
    fresh.batch(Position({}), 20, 3)
    assert np.array_equal(fresh.batch(position, 50, 3), later)
    assert not np.array_equal(WindowSampler(ids, seed=5).batch(position, 50, 3), later)


def test_orthogonalise_brings_singular_values_near_one() -> None:
    matrices = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(0))
    for x in (matrices, matrices.transpose(1, 2).contiguous()):
        values = torch.linalg.svdvals(orthogonalise(x, torch.float32))
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_trapezoid_rises_holds_and_ends_at_zero() -> None:
    factors = [trapezoid(step, 100, 10, 0.5) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert set(factors[10:50]) == {1.0}
    assert factors[75] == pytest.approx(0.5)
    assert factors[100] == 0.0
