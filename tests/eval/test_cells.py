"""config/cells.yaml resolves to the cells of the design at each scale; unknown or contradictory keys are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from sparkinfer_eval.cells import (
    all_ids,
    cell_digest,
    cell_from_definition,
    load_cells,
    longest_request,
    resolve_cells,
)

from sparkinfer.errors import ConfigError

CELLS = Path(__file__).resolve().parents[2] / "config" / "cells.yaml"


@pytest.fixture
def document() -> dict[str, Any]:
    return load_cells(CELLS)


def test_ids_and_full_shapes(document: dict[str, Any]) -> None:
    cells = resolve_cells(document, "full")
    shapes = {"chat": (1024, 256), "long_answer": (128, 1024), "long_prompt": (8192, 128)}
    expected = [f"{shape}-c{c}" for shape in shapes for c in (1, 4, 16, 32)] + ["poisson-r1", "poisson-r2"]
    assert list(cells) == all_ids(document) == expected
    for name, cell in cells.items():
        if cell.kind == "closed":
            shape, concurrency = name.rsplit("-c", 1)
            assert (cell.prompt_tokens, cell.output_tokens) == shapes[shape]
            assert cell.concurrency == int(concurrency)
            assert cell.requests >= cell.concurrency
            assert cell.sampling == {"temperature": 0.0}
        assert cell.ignore_eos
        assert cell.streaming
    r1, r2 = cells["poisson-r1"], cells["poisson-r2"]
    assert (r1.rate, r2.rate, r1.requests, r1.short_share, r1.short_tokens, r1.long_tokens) == (
        1.0,
        2.0,
        80,
        0.2,
        32,
        (128, 768),
    )
    assert r1.sampling == {"temperature": 0.7, "top_p": 0.95, "top_k": 20}
    assert longest_request(cells) == 8192 + 128


def test_scales(document: dict[str, Any]) -> None:
    cpu = resolve_cells(document, "cpu")
    assert len(cpu) == 14
    assert (cpu["chat-c16"].prompt_tokens, cpu["chat-c16"].output_tokens) == (128, 32)
    assert cpu["long_prompt-c1"].prompt_tokens == 1024
    assert cpu["poisson-r2"].rate == 8.0
    assert cpu["poisson-r1"].long_tokens == (16, 96)
    smoke = resolve_cells(document, "smoke")
    assert sum(cell.kind == "closed" for cell in smoke.values()) == 2
    assert sum(cell.kind == "poisson" for cell in smoke.values()) == 1


def test_overrides_and_digest(document: dict[str, Any]) -> None:
    base = resolve_cells(document, "cpu")
    changed = resolve_cells(document, "cpu", {"requests": {4: 40}, "cells": ["chat-c4", "chat-c1"]})
    assert list(changed) == ["chat-c1", "chat-c4"]
    assert changed["chat-c4"].requests == 40
    assert cell_digest(changed["chat-c1"]) == cell_digest(base["chat-c1"])
    assert cell_digest(changed["chat-c4"]) != cell_digest(base["chat-c4"])
    assert len({cell_digest(cell) for cell in base.values()}) == len(base)


def test_definition_round_trips_through_json(document: dict[str, Any]) -> None:
    for cell in resolve_cells(document, "full").values():
        definition = json.loads(json.dumps(cell.definition()))
        assert cell_from_definition(definition) == cell
    with pytest.raises(ConfigError, match="not a cell definition"):
        cell_from_definition({"id": "x", "colour": "red"})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("shapes", "chat", "colour"), "red", "shapes.chat.*colour"),
        (("concurency",), [1], "concurency"),
        (("shapes", "chat", "prompt_tokens"), 0, "shapes.chat.prompt_tokens"),
        (("scales", "cpu", "requests", "4"), "many", r"scales.cpu.requests.4"),
        (("mix", "long_tokens"), [768, 128], "768 is above 128"),
        (("gates", "summary_agreement"), -1, "gates.summary_agreement"),
        (("sampling", "closed", "top_p"), 1.5, "sampling.closed.top_p"),
        (("schema",), "sparkinfer/cells/v0", "schema"),
    ],
)
def test_bad_files_name_the_place(tmp_path: Path, path: tuple[str, ...], value: Any, message: str) -> None:
    document = copy.deepcopy(yaml.safe_load(CELLS.read_text()))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file = tmp_path / "cells.yaml"
    file.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match=message):
        load_cells(file)


def test_bad_scales(document: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown scale 'huge'.*full"):
        resolve_cells(document, "huge")
    with pytest.raises(ConfigError, match="no cell is called chat-c5"):
        resolve_cells(document, "cpu", {"cells": ["chat-c5"]})
    with pytest.raises(ConfigError, match="colour"):
        resolve_cells(document, "cpu", {"colour": 1})
    with pytest.raises(ConfigError, match="does not exist"):
        load_cells(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not YAML"):
        load_cells(tmp_path / "broken.yaml")
    del document["scales"]["cpu"]["requests"]["32"]
    with pytest.raises(ConfigError, match="requests lacks concurrency 32"):
        resolve_cells(document, "cpu")
