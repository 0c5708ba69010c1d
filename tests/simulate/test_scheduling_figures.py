"""The program that records the scheduling figures: what it measures, refuses, and writes."""

from __future__ import annotations

import argparse
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from sparkinfer_eval import mixing_pairs
from sparkinfer_eval import scheduling_figures as figures
from sparkinfer_eval.figure import Figure
from sparkinfer_eval.toy_model import ToySize, generate

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "toy"
    size = ToySize(
        hidden=32, heads=2, head_dim=16, linear_key_heads=1, linear_value_heads=2, linear_head_dim=16, ffn=32,
        vocab=512, max_positions=256,
    )  # fmt: skip
    generate("dense", folder, size=size)
    return folder


def test_goals() -> None:
    assert Figure("x", "x", 140.0, "us", 150.0, "below").reached
    assert not Figure("x", "x", 160.0, "us", 150.0, "below").reached
    assert Figure("x", "x", 12.0, "x", 10.0).reached
    assert not Figure("x", "x", 9.0, "x", 10.0).reached
    assert Figure("x", "x", 9.0, "x").reached is None


def test_record_and_page(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "busy_cpus", lambda: 0.25)
    monkeypatch.setattr(figures, "BURST_REPEATS", 1)
    monkeypatch.setattr(figures, "BURST_TOKENS", (32, 128))
    monkeypatch.setattr(figures, "BURST", 8)
    monkeypatch.setattr(figures, "STEP_GOALS", ((4, 1e9), (64, 1e-3)))
    arguments = [str(model), "--out", str(tmp_path), "--parts", "scheduler_cost", "burst", "--steps", "20"]
    code = figures.main(arguments)
    record = json.loads((tmp_path / "figures.json").read_text())
    assert code == 1, "a missed goal is an exit code"
    assert [figure["name"] for figure in record["figures"] if figure["reached"] is False] == [
        "schedule + commit, 64 requests"
    ]
    assert record["machine"]["cpus_online"] >= 1
    assert record["busy_cpus_before"] == 0.25
    assert record["command"] == "python eval/scheduling_figures.py " + " ".join(arguments)
    named = {figure["name"]: figure["value"] for figure in record["figures"]}
    packed, single = named["8 prompts of 128 tokens, packed"], named["8 prompts of 128 tokens, one by one"]
    assert named["8 prompts of 128 tokens, packed / one by one"] == pytest.approx(packed / single)
    assert min(named["schedule + commit, 64 requests"], named["schedule + commit, 4 requests"]) > 0
    page = (tmp_path / "figures.md").read_text()
    assert "CPUs busy before: 0.25" in page
    assert "| burst | 8 prompts of 128 tokens, packed |" in page
    assert "random weights" in page
    capsys.readouterr()


def test_a_busy_machine_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "busy_cpus", lambda: 1.4)
    assert figures.main([str(model), "--out", str(tmp_path), "--parts", "burst"]) == 3
    assert "other programs keep 1.4 CPUs busy" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_busy_cpus_are_those_of_the_sampled_time() -> None:
    def spin() -> None:
        while not stop.is_set():
            pass

    stop = threading.Event()
    thread = threading.Thread(target=spin)
    thread.start()
    busy = figures.busy_cpus(0.5)
    stop.set()
    thread.join()
    assert 0.2 < busy <= (os.cpu_count() or 1)


def test_bad_input(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main([str(tmp_path / "absent"), "--out", str(tmp_path), "--busy", "--parts", "burst"]) == 2
    assert figures.main([str(model), "--out", str(tmp_path), "--busy", "--parts", "prefix_hit"]) == 2
    assert "too short" in capsys.readouterr().err
    arguments = [str(model), "--out", str(tmp_path), "--busy", "--parts", "mixing", "--mixing-cells", "chat-c1"]
    assert figures.main(arguments) == 2
    assert "chat-c1: no closed-loop cell of several clients" in capsys.readouterr().err


def test_mixing_pairs_alternate_and_ratios_are_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparkinfer_eval.cells import load_cells, resolve_cells
    from sparkinfer_eval.records import Record

    cell = resolve_cells(load_cells(Path(__file__).parents[2] / "config" / "cells.yaml"), "cpu")["chat-c16"]
    order: list[str] = []

    def loop(url: str, name: str, rows: list[dict], concurrency: int) -> list[Record]:
        order.append(url)
        took = 2_000_000_000 if url == "off" else 1_000_000_000
        return [Record(str(n), row["phase"], "", 8, 10, 0, took // 10, took, "length") for n, row in enumerate(rows)]

    monkeypatch.setattr(mixing_pairs, "closed_loop", loop)
    monkeypatch.setattr(mixing_pairs.server_probe, "reset_prefix_cache", lambda url: True)
    rows = [{"phase": "warmup"}] + [{"phase": "profiling"}] * 16
    options = argparse.Namespace(repeats=3, model=Path("toy"))
    speed, wait = mixing_pairs.mixing_cell(cell, rows, {"on": "on", "off": "off"}, options)
    assert order == ["off", "on", "on", "off", "off", "on"]
    assert (speed.value, wait.value) == (2.0, 0.5)
    assert speed.reached
    assert wait.reached
