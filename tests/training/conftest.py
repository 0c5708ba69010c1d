"""Shared fixtures: a toy token stream, and the shipped models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sparkinfer_models.dataset import write_stream

MODELS = Path(__file__).resolve().parents[2] / "models"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Toy shapes are slower on several threads, and one thread keeps reductions in one order."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `train.py prepare` writes it, with a stream that repeats itself and so can be learnt."""
    folder = tmp_path_factory.mktemp("toy-data")
    random = np.random.default_rng(0)
    stream = np.tile(random.integers(4, 500, 1500), 12).astype(np.uint16)
    # Exchanges: user header, question, assistant header (1, 300, 301), answer.
    stream[::60], stream[20::60], stream[21::60], stream[22::60] = 1, 1, 300, 301
    write_stream(folder / "train.u16.xz", stream)
    write_stream(folder / "held_out.u16.xz", stream[:3000])
    return folder
