"""Acceptance inside vLLM: its counters, prompts and command line, against a stand-in for its server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from sparkinfer_models.checkpoint import load_network
from sparkinfer_models.drafter import load_drafter
from sparkinfer_models.speculate import Speculator
from sparkinfer_models.vllm_acceptance import Counts, main, parse_counters, summarise

from sparkinfer.errors import ConfigError, EnvironmentProblem

ROOT = Path(__file__).resolve().parents[2]
DENSE = ROOT / "models" / "spark-tiny-dense"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Of a run against the stand-in: it is started as the interpreter that has vLLM."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/training/fake_vllm.py "$@"\n')
    python.chmod(0o755)
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([[1, 2, 3]] * 6))
    options = {"target": DENSE, "drafter": f"{DENSE}-dflash2", "prompts": prompts, "python": python, "tokens": 9,
               "at-once": 2, "log": tmp_path / "log", "json": tmp_path / "out.json"}  # fmt: skip
    return ["run", *(str(item) for name, value in options.items() for item in (f"--{name}", value))]


def test_a_run_reads_the_counters(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["engine"] == "vLLM 0.30.0"
    assert [row["temperature"] for row in document["rows"]] == [0.0, 0.7, 1.0]
    for row in document["rows"]:
        # Nine tokens are two verifications an answer; the warm-up's are not counted.
        assert (row["verifications"], row["mean"], row["drafted_per_step"]) == (12, 3.0, 7.0)
        assert row["per_position"] == [1, 1, 1, 0, 0, 0, 0]
        assert row["standard_error"] == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize(
    ("mode", "words"),
    [("dead", "no such drafter"), ("plain", "does this server speculate"), ("short", "answered with 8 tokens")],
)
def test_what_goes_wrong_is_said(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str, words: str
) -> None:
    monkeypatch.setenv("FAKE_VLLM", mode)
    assert main(arguments) == 3
    assert words in capsys.readouterr().err


def test_bad_input(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--max-model-len", "10"]) == 2
    assert "too short" in capsys.readouterr().err
    (tmp_path / "prompts.json").write_text("[[1, 2.5]]")
    assert main(arguments) == 2
    assert "not a list of lists of token ids" in capsys.readouterr().err


def test_counters_of_several_engines_add_up() -> None:
    text = "".join(
        f'vllm:spec_decode_num_{name}_total{{engine="{engine}"}} {value}\n'
        for engine in (0, 1)
        for name, value in (("drafts", 2), ("draft_tokens", 14), ("accepted_tokens", 5))
    )
    assert parse_counters(text) == Counts(4, 28, 10, ())
    with pytest.raises(EnvironmentProblem, match="num_drafts_total"):
        parse_counters("vllm:spec_decode_num_draft_tokens_total 1\n")


def test_summary_is_the_ratio_with_its_error() -> None:
    row = summarise(0.0, 4, [Counts(10, 70, 20, (10, 10)), Counts(30, 210, 90, (30, 30))])
    assert (row["mean"], row["tokens_per_step"], row["per_position"]) == (2.75, 3.75, [1.0, 1.0])
    # Residuals -7.5 and 7.5: sqrt(112.5 / 1 / 2) / 20.
    assert row["standard_error"] == pytest.approx(0.375)
    with pytest.raises(ConfigError, match="no draft was verified"):
        summarise(0.0, 1, [Counts(0, 0, 0, ())])


def test_greedy_drafts_are_the_same_at_every_temperature() -> None:
    network = load_network(DENSE, torch.float32).requires_grad_(False)
    drafter = load_drafter(Path(f"{DENSE}-dflash2"), torch.float32).requires_grad_(False)
    speculator = Speculator(network, drafter, shared_noise=False, ignore_stop=True)
    prompt = list(range(40, 72))
    decoded = speculator.decode(prompt, 24, 1.0, seed=3)
    assert len(decoded.tokens) == 24
    # Rejected or accepted, the text is the target's own: drafting decides the speed only.
    assert decoded.tokens == Speculator(network, drafter, ignore_stop=True).decode(prompt, 24, 1.0, seed=3).tokens
