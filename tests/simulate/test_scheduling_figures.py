"""The program that records the scheduling figures: what it measures, refuses, and writes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sparkinfer_eval import figure_record, mixing_pairs, paired
from sparkinfer_eval import scheduling_figures as figures
from sparkinfer_eval.cells import load_cells, resolve_cells
from sparkinfer_eval.figure import Figure
from sparkinfer_eval.records import Record
from sparkinfer_eval.toy_model import ToySize, generate

from sparkinfer.errors import ConfigError

torch.set_num_threads(1)
CELLS = Path(__file__).parents[2] / "config" / "cells.yaml"


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
    assert Figure("x", "x", 140.0, "us", 150.0, "below").verdict == "reached"
    assert Figure("x", "x", 160.0, "us", 150.0, "below").verdict == "missed"
    assert Figure("x", "x", 12.0, "x", 10.0).verdict == "reached"
    assert Figure("x", "x", 9.9, "x", 10.0).verdict == "missed"
    assert Figure("x", "x", 9.0, "x").verdict is None


@pytest.mark.parametrize(
    ("interval", "above", "below"),
    [
        ((0.90, 0.99), "missed", "reached"),
        ((0.96, 1.02), "undecided", "undecided"),
        ((0.975, 1.02), "reached", "undecided"),
        ((1.01, 1.30), "reached", "missed"),
    ],
)
def test_an_interval_decides_only_as_a_whole(interval: tuple[float, float], above: str, below: str) -> None:
    for better, verdict in (("above", above), ("below", below)):
        assert Figure("x", "x", 0.98, "x", 1.0, better, interval=interval).verdict == verdict


def test_record_and_page(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "busy_cpus", lambda: 0.25)
    monkeypatch.setattr(figures, "BURST_REPEATS", 1)
    monkeypatch.setattr(figures, "BURST_TOKENS", (32, 128))
    monkeypatch.setattr(figures, "BURST", 8)
    monkeypatch.setattr(figures, "STEP_GOALS", ((4, 1e9, 128, 2, " of 128 tokens, 2 run"), (64, 1e-3, 1024, None, "")))
    arguments = [str(model), "--out", str(tmp_path), "--parts", "scheduler_cost", "burst", "--steps", "20"]
    code = figures.main(arguments)
    record = json.loads((tmp_path / "figures.json").read_text())
    assert code == 1, "a missed goal is an exit code"
    assert [figure["name"] for figure in record["figures"] if figure["verdict"] == "missed"] == [
        "schedule + commit + add, 64 requests"
    ]
    assert record["machine"]["cpus_online"] >= 1
    assert record["busy_cpus_before"] == 0.25
    assert record["command"] == "python eval/scheduling_figures.py " + " ".join(arguments)
    named = {figure["name"]: figure["value"] for figure in record["figures"]}
    packed, single = named["8 prompts of 128 tokens, packed"], named["8 prompts of 128 tokens, one by one"]
    assert named["8 prompts of 128 tokens, packed / one by one"] == pytest.approx(packed / single)
    assert (
        min(
            named["schedule + commit + add, 64 requests"],
            named["schedule + commit + add, 4 requests of 128 tokens, 2 run"],
        )
        > 0
    )
    page = (tmp_path / "figures.md").read_text()
    assert "CPUs busy before: 0.25" in page
    assert "| burst | 8 prompts of 128 tokens, packed |" in page
    assert "random weights" in page
    again = [str(model), "--out", str(tmp_path), "--parts", "scheduler_cost", "--steps", "20", "--keep"]
    assert figures.main(again) == 1
    both = json.loads((tmp_path / "figures.json").read_text())
    kept, measured = ([f for f in r["figures"] if f["part"] == "burst"] for r in (both, record))
    assert kept == measured
    (origin,) = both["kept"]
    assert origin["command"] == record["command"]
    assert {part for part, _ in origin["figures"]} == {"burst"}
    assert both["command"] != record["command"]
    assert f"burst: measured {record['date']}" in (tmp_path / "figures.md").read_text()
    (tmp_path / "figures.json").write_text(json.dumps({**both, "dtype": "float32"}))
    assert figures.main(again) == 2
    assert "are of dtype float32" in capsys.readouterr().err


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
    assert figures.main([*arguments[:-2], "--repeats", "5"]) == 2
    assert "needs at least 6 pairs" in capsys.readouterr().err


def test_mixing_pairs_alternate_on_fresh_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two servers for every pair; runs of a cell side by side, each first as often; ratios are by pair."""
    order: list[str] = []
    started: list[str] = []

    @contextlib.contextmanager
    def served(model: Path, flags: list[str], settings: dict[str, str]) -> Iterator[str]:
        started.append("off" if settings.get("SPARKINFER_MIXED_CHUNK") == "0" else "on")
        yield f"{started[-1]} {len(started)}"

    def loop(url: str, name: str, rows: list[dict], concurrency: int) -> list[Record]:
        assert len({row["phase"] for row in rows}) == 1, "warm-up requests have ended when measured ones begin"
        order.append(url)
        took = 2_000_000_000 if url.startswith("off") else 1_000_000_000
        return [Record(str(n), row["phase"], "", 8, 10, 0, took // 10, took, "length") for n, row in enumerate(rows)]

    monkeypatch.setattr(mixing_pairs.launch, "served", served)
    monkeypatch.setattr(mixing_pairs, "model_digest", lambda model: "sha256:0")
    monkeypatch.setattr(mixing_pairs, "closed_loop", loop)
    monkeypatch.setattr(mixing_pairs, "ChatCounter", lambda model: None)
    monkeypatch.setattr(mixing_pairs, "cell_texts", lambda *_: ([], []))
    monkeypatch.setattr(mixing_pairs, "prompt_rows", lambda *_: [{"phase": "warmup"}] + [{"phase": "profiling"}] * 16)
    monkeypatch.setattr(mixing_pairs.server_probe, "reset_prefix_cache", lambda url: True)
    options = argparse.Namespace(
        repeats=2, model=Path("toy"), cells=CELLS, scale="cpu", mixing_cells=["chat-c16", "chat-c32"], record=None,
        device="cpu", dtype="float32", rounds=1, pairs=None,
    )  # fmt: skip
    speed, wait, *_ = mixing_pairs.mixing(options)
    assert started == ["off", "on", "on", "off"]
    turns = ["off 1", "on 2", "on 2", "off 1", "on 3", "off 4", "off 4", "on 3"]
    assert order == [turn for turn in turns for _ in ("warm-up", "measured")]
    assert (speed.value, wait.value) == (2.0, 0.5)
    assert (speed.verdict, wait.verdict) == ("reached", "reached")
    order.clear()
    options.rounds, options.repeats, options.mixing_cells = 3, 1, ["chat-c16"]
    speed, *_ = mixing_pairs.mixing(options)
    assert order[::2] == ["off 5", "on 6", "on 6", "off 5", "off 5", "on 6"]
    assert "1 pairs of 3 runs each" in speed.note
    assert mixing_pairs.middle([(1.0, 30.0), (9.0, 10.0), (2.0, 20.0)]) == (2.0, 20.0)
    started.clear()
    monkeypatch.setattr(mixing_pairs, "identity", lambda options: {"engine_digest": "sha256:0"})
    options.pairs = tmp_path / "pairs.json"
    for _ in range(3):  # a series that is broken off after each pair
        list(mixing_pairs.mixing(options))
    assert started == ["off", "on", "on", "off", "off", "on"]


def test_a_figure_measured_anew_replaces_only_itself() -> None:
    def record(day: str, *figures: tuple[str, str, float]) -> dict[str, Any]:
        origin = {name: day for name in figure_record.ORIGIN}
        shared: dict[str, Any] = {"model": {}, "device": "cpu", "dtype": "float32", "machine": {}}
        return {**shared, **origin, "figures": [{"part": p, "name": n, "value": v} for p, n, v in figures]}

    first = record("one", ("cost", "a", 1.0), ("mixing", "b", 2.0), ("mixing", "c", 3.0))
    both = figure_record.with_kept(record("two", ("mixing", "b", 9.0)), first, ("cost", "mixing"))
    assert [(f["name"], f["value"]) for f in both["figures"]] == [("a", 1.0), ("b", 9.0), ("c", 3.0)]
    assert [(o["date"], o["figures"]) for o in both["kept"]] == [("one", [["cost", "a"], ["mixing", "c"]])]
    third = figure_record.with_kept(record("three", ("cost", "a", 7.0)), both, ("cost", "mixing"))
    assert [(f["name"], f["value"]) for f in third["figures"]] == [("a", 7.0), ("b", 9.0), ("c", 3.0)]
    assert [(o["date"], o["figures"]) for o in third["kept"]] == [
        ("one", [["mixing", "c"]]),
        ("two", [["mixing", "b"]]),
    ]
    assert [figure_record._named(origin, third) for origin in third["kept"]] == [
        "mixing (but for b)",
        "mixing (but for c)",
    ]


def test_mixing_is_judged_by_its_interval() -> None:
    cell = resolve_cells(load_cells(CELLS), "cpu")["chat-c16"]

    def of(ratios: list[float]) -> list[Figure]:
        return mixing_pairs.figures_of(cell, {"on": [(100 * r, 10 * r) for r in ratios], "off": [(100, 10)] * 9})

    speed, wait = of([0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 1.01, 1.06])
    assert speed.value == pytest.approx(0.955, abs=0.01)
    assert speed.interval is not None
    assert speed.interval[0] < 0.94
    assert 1.0 < speed.interval[1] < 1.06
    assert (speed.verdict, wait.verdict) == ("undecided", "undecided")
    assert f"interval {speed.interval[0]:.3f}..{speed.interval[1]:.3f}" in speed.note
    speed, wait = of([0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99])
    assert (speed.verdict, wait.verdict) == ("missed", "reached")
    few = dataclasses.replace(cell, concurrency=4)
    assert mixing_pairs.figures_of(few, {"on": [(100, 10)], "off": [(100, 10)]})[1].verdict is None


def test_interval_of_the_centre_covers_it() -> None:
    """Cuts as in printed tables of the signed rank test, and the share of symmetric samples whose interval holds."""
    for n, expected in {5: 1, 6: 1, 8: 4, 9: 6, 10: 9, 12: 14, 15: 26, 20: 53}.items():
        assert paired._lower_cut(n) == expected
    value, low, high = paired.centre([math.exp(x) for x in (-3.0, 0.0, 1.0, 2.0, 3.0, 9.0)])
    assert (math.log(low), math.log(high)) == pytest.approx((-3.0, 9.0))
    assert math.log(value) == pytest.approx(1.5)
    rng = random.Random(0)
    held = 0
    for _ in range(1000):
        _, low, high = paired.centre([math.exp(rng.gauss(0.1, 0.5)) for _ in range(9)])
        held += low <= math.exp(0.1) <= high
    assert 0.945 < held / 1000 < 0.98, "0.961 of nine"


def test_pairs_are_gathered_over_runs(tmp_path: Path) -> None:
    path, cell = tmp_path / "pairs.json", {"chat-c4": {"on": (101.04, 9.0), "off": (100.0, 10.0)}}
    for engine in ("a", "b", "a"):
        kept = paired.PairsFile(path, {"engine_digest": engine, "rounds": 1})
        kept.add("today", cell)
    assert kept.of("chat-c4") == {"on": [(101.0, 9.0)] * 2, "off": [(100.0, 10.0)] * 2}
    assert kept.of("chat-c16") == {"on": [], "off": []}
    again = paired.PairsFile(path, {"engine_digest": "a", "rounds": 2})
    assert again.of("chat-c4")["on"] == []
    assert paired.PairsFile(path, {"rounds": 1, "engine_digest": "b"}).of("chat-c4")["on"] == [(101.0, 9.0)]
    for wrong in ("[1]", "{", '[{"identity": {}, "pairs": [{"cells": {"x": {"on": [1], "off": [1, 2]}}}]}]'):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="holds no pairs"):
            paired.PairsFile(path, {})
