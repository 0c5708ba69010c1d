"""Prompts have exactly the cell's tokens as a chat request, are distinct, deterministic, and tied to their digest."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from sparkinfer_eval.arrival_plan import plan_of, poisson_plan
from sparkinfer_eval.cells import Cell, all_ids, load_cells, resolve_cells
from sparkinfer_eval.prompts import ChatCounter, cell_texts, fit, read_prompts, write_prompts

from sparkinfer.errors import CheckpointError, ConfigError

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = load_cells(ROOT / "config" / "cells.yaml")
IDS = all_ids(DOCUMENT)
CELLS = resolve_cells(DOCUMENT, "cpu")


def small(name: str, **change: int) -> Cell:
    return dataclasses.replace(CELLS[name], **({"requests": 8, "warmup_requests": 3} | change))


@pytest.mark.parametrize("name", ["chat-c1", "long_answer-c4", "long_prompt-c16", "poisson-r1"])
def test_exact_length_distinct_and_deterministic(name: str, model: Path, counter: ChatCounter, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    cell = small(name)
    path = write_prompts(model, counter, cell, 0, 1, IDS, tmp_path / "a")
    prompts = read_prompts(path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for row in prompts.rows:
        chat = [{"role": "user", "content": row["text"]}]
        # Two ways of counting: ids straight from the template, and the round trip through text.
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert len(ids) == cell.prompt_tokens
        assert tokenizer.encode(tokenizer.decode(ids)) == ids
        assert row["text"] == row["text"].strip()
    assert len({row["sha256"] for row in prompts.rows}) == len(prompts.rows) == 11
    assert [row["phase"] for row in prompts.rows] == ["warmup"] * 3 + ["profiling"] * 8
    again = write_prompts(model, counter, cell, 0, 1, IDS, tmp_path / "b")
    assert again.read_bytes() == path.read_bytes()
    for seed, block in ((0, 2), (1, 1)):
        other = write_prompts(model, counter, cell, seed, block, IDS, tmp_path / f"c{seed}{block}")
        assert not {row["text"] for row in read_prompts(other).rows} & {row["text"] for row in prompts.rows}


def test_cells_of_a_block_share_no_start(counter: ChatCounter) -> None:
    beginnings: set[str] = set()
    for name in ("chat-c1", "chat-c4", "chat-c16", "chat-c32"):
        warmup, measured = cell_texts(counter, small(name), 0, 1, IDS.index(name), len(IDS))
        mine = {text[:60] for text in warmup + measured}
        assert not mine & beginnings
        beginnings |= mine


def test_fit_stays_exact_next_to_blanks_and_odd_characters(counter: ChatCounter) -> None:
    text = "naïve   café\n\n\n    indented = 1  # ☃ snow 日本\n\n" * 30
    for tokens in range(20, 200, 7):
        found = fit(counter, text, tokens)
        assert found is None or counter.count(found) == tokens
    assert fit(counter, "too short", 500) is None


def test_open_loop_rows_carry_the_plan(model: Path, counter: ChatCounter, tmp_path: Path) -> None:
    cell = dataclasses.replace(CELLS["poisson-r2"], requests=40)
    rows = read_prompts(write_prompts(model, counter, cell, 0, 1, IDS, tmp_path)).phase("profiling")
    assert sum(row["label"] == "short" for row in rows) == 8
    assert all((row["output_length"] == 4) == (row["label"] == "short") for row in rows)
    assert all(16 <= row["output_length"] <= 96 for row in rows if row["label"] == "long")
    times = [row["timestamp"] for row in rows]
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] == pytest.approx(39 / 8.0 * 1000, abs=0.01)
    assert len({row["extra"]["seed"] for row in rows}) == 40


def test_plan_is_poisson_seeded_and_checked() -> None:
    plan = poisson_plan(4000, 2.0, 0.2, 32, (128, 768), "s")
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(plan)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.5, rel=1e-9)
    # Exponential gaps: the standard deviation equals the mean.
    assert deviation == pytest.approx(0.5, rel=0.1)
    assert plan == poisson_plan(4000, 2.0, 0.2, 32, (128, 768), "s")
    assert plan != poisson_plan(4000, 2.0, 0.2, 32, (128, 768), "t")
    for bad in (
        (1, 2.0, 0.2, 32, (1, 2)),
        (9, 0.0, 0.2, 32, (1, 2)),
        (9, 1.0, 0.2, 0, (1, 2)),
        (9, 1.0, 0.2, 1, (2, 1)),
    ):
        with pytest.raises(ConfigError):
            poisson_plan(*bad, "s")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no open-loop cell"):
        plan_of(CELLS["chat-c1"], "s")


def test_impossible_cells_say_why(model: Path, counter: ChatCounter, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chat template's \d+: use a smaller length_divisor"):
        cell_texts(counter, small("chat-c1", prompt_tokens=9), 0, 1, 0, 14)
    with pytest.raises(ConfigError, match=r"corpus gives \d+ prompts.*lower its request count"):
        cell_texts(counter, small("long_answer-c1", requests=100_000), 0, 1, 0, 2000)
    with pytest.raises(CheckpointError, match=r"no tokenizer.json"):
        ChatCounter(tmp_path)
    (tmp_path / "m").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / "m" / name).write_bytes((model / name).read_bytes())
    with pytest.raises(CheckpointError, match="no chat template"):
        ChatCounter(tmp_path / "m")


def test_damaged_files_are_refused(model: Path, counter: ChatCounter, tmp_path: Path) -> None:
    path = write_prompts(model, counter, small("chat-c1"), 0, 1, IDS, tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_prompts(tmp_path / "none.jsonl")
    original = path.read_text()
    path.write_text(original.replace("the", "teh", 1))
    with pytest.raises(ConfigError, match="make it again"):
        read_prompts(path)
    # A file whose warm-up repeats a measured prompt is refused even when its digest is right.
    rows = [json.loads(line) for line in original.splitlines()]
    rows[0].update(text=rows[5]["text"], sha256=rows[5]["sha256"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    meta_path = tmp_path / "chat-c1.meta.json"
    from sparkinfer.identity import file_sha256

    meta = json.loads(meta_path.read_text()) | {"sha256": file_sha256(path)}
    meta_path.write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match="both warm-up and measured"):
        read_prompts(path)
