"""A small model folder, small cells and their prompts, shared by the load-generation tests."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import yaml
from sparkinfer_eval.cells import Cell, all_ids, load_cells, resolve_cells
from sparkinfer_eval.prompts import ChatCounter, PromptSet, read_prompts, write_prompts
from sparkinfer_eval.toy_model import ToySize, generate

# pytest's importlib mode puts no test folder on the path; the scripted server has a name of its own.
sys.path.insert(0, str(Path(__file__).resolve().parent))
ROOT = Path(__file__).resolve().parents[2]
# Small cells, with limits on timing that a busy test machine cannot break; each such gate has a test of its own.
SCALE = {
    "length_divisor": 16,
    "requests": {1: 4, 4: 12, 16: 4, 32: 4},
    "arrival_requests": 20,
    "rate_factor": 20.0,
    "start_delay_share": 0.95,
    "arrival_rate": 0.5,
    "request_timeout_s": 5,
    "timeout_s": 60,
}


@pytest.fixture(scope="session")
def cells_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    document = yaml.safe_load((ROOT / "config" / "cells.yaml").read_text())
    document["scales"]["smoke"] |= SCALE
    path = tmp_path_factory.mktemp("config") / "cells.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "toy"
    generate("dense", folder, size=ToySize(hidden=32, ffn=32, linear_head_dim=16))
    return folder


@pytest.fixture(scope="session")
def counter(model: Path) -> ChatCounter:
    return ChatCounter(model)


@pytest.fixture(scope="session")
def small_cells(cells_file: Path) -> dict[str, Cell]:
    return resolve_cells(load_cells(cells_file), "smoke")


@pytest.fixture(scope="session")
def small_prompts(
    model: Path, counter: ChatCounter, small_cells: dict[str, Cell], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, PromptSet]:
    folder = tmp_path_factory.mktemp("prompts")
    ids = all_ids(load_cells(ROOT / "config" / "cells.yaml"))
    return {
        name: read_prompts(write_prompts(model, counter, small_cells[name], 0, 1, ids, folder))
        for name in ("chat-c4", "poisson-r1")
    }


@pytest.fixture
def small_cell(small_cells: dict[str, Cell]) -> Cell:
    return dataclasses.replace(small_cells["chat-c4"])
