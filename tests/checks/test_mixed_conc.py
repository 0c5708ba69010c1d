"""`mixed_conc_check` passes on the real server, and fails on one whose mixed steps have a fault."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from sparkinfer_eval import launch, mixed_conc
from sparkinfer_eval.agreement import Answer
from sparkinfer_eval.mixed_conc import Launched
from sparkinfer_eval.toy_model import ToySize, generate

PLANTED = Path(__file__).with_name("planted_server.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "dense"
    size = ToySize(
        hidden=64, heads=2, head_dim=32, linear_key_heads=1, linear_value_heads=2, linear_head_dim=32, ffn=96,
        vocab=1024, max_positions=800,
    )  # fmt: skip
    generate("dense", folder, size=size)
    return folder


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Tests share two cores: threads that wait for each other would take minutes."""
    inner = launch.environment
    monkeypatch.setattr(launch, "environment", lambda settings: {**inner(settings), "SPARKINFER_THREADS": "1"})


def test_mixing_changes_no_token(model, tmp_path, capsys):
    out = tmp_path / "check.json"
    assert mixed_conc.main([str(model), "--dtype", "float32", "--json", str(out)]) == 0, capsys.readouterr().out
    document = json.loads(out.read_text())
    assert (document["check"], document["dtype"], document["ok"]) == ("mixed_conc_check", "float32", True)
    rows = {row["name"]: row["value"] for row in document["rows"]}
    assert rows["mixing on: mixed steps (at least)"] >= 1
    assert rows["mixing off: mixed steps"] == 0
    assert "warm logprobs: answers that differ of 8" in rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_of_mixed_steps_is_caught(model, monkeypatch, capsys, dtype):
    monkeypatch.setattr(launch, "COMMAND", (sys.executable, str(PLANTED), "serve"))
    assert mixed_conc.main([str(model), "--dtype", dtype]) == 1
    differing = [line for line in capsys.readouterr().out.splitlines() if "DIFFERS" in line]
    assert any("answers that differ" in line for line in differing)
    assert not any("mixed steps" in line for line in differing)


def launched(tops: list[dict[bytes, float]], tokens: list[bytes], mixed: int = 1) -> Launched:
    """24 equal answers in both waves."""
    return Launched([[Answer(tokens, tops)] * mixed_conc.CHATS] * 2, mixed, 100.0)


def test_near_ties_may_part_in_16_bits_only():
    off = launched([{b"a": -0.70, b"b": -0.71}], [b"a"], 0)
    on = launched([{b"a": -0.71, b"b": -0.70}], [b"b"])
    assert all(row.ok for row in mixed_conc.rows_of(off, on, 0.02))
    failed = [row.name for row in mixed_conc.rows_of(off, on, 0.0) if not row.ok]
    assert "cold greedy: answers that differ of 8" in failed
    assert "warm seeded: answers that differ of 8" in failed
    assert any("logprob" in name for name in failed)


def test_launches_that_did_not_do_their_part_are_no_pass():
    same = launched([{b"a": -0.1}], [b"a"], 0)
    assert [row.name for row in mixed_conc.rows_of(same, same, 0.02) if not row.ok] == [
        "mixing on: mixed steps (at least)"
    ]


def test_turns_scale_to_the_context():
    system, turns = mixed_conc.turn_lengths(16384)
    assert (system, min(turns), max(turns), len(turns)) == (200, 4, 1500, 24)
    system, turns = mixed_conc.turn_lengths(800)
    assert system + max(turns) + mixed_conc.OUTPUT < 800
    with pytest.raises(mixed_conc.NotApplicable):
        mixed_conc.turn_lengths(100)


def test_bad_input(models, tmp_path, capsys):
    assert mixed_conc.main([str(tmp_path / "absent")]) == 2
    assert mixed_conc.main([str(models / "dense")]) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_a_server_that_does_not_start_says_why(model, capsys):
    assert mixed_conc.main([str(model), "--device", "abacus"]) == 2
    assert "abacus" in capsys.readouterr().err
