"""Cards and reports against the records that they are made from, and what the records must show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from sparkinfer_models.acceptance_table import LIMIT, difference
from sparkinfer_models.card import drafter_card, language_model_card

ROOT = Path(__file__).resolve().parents[2]
MODELS, ACCEPTANCE = ROOT / "models", ROOT / "reports" / "acceptance"
TARGETS = ("spark-tiny-dense", "spark-tiny-moe")
ROW = re.compile(r"^\| (\S+) \| (\S+) \| (PyPI|Debian 12) \| (.+) \| (\d+) \|$", re.M)


def run_of(card: str) -> dict[str, str]:
    """What a card says of its training run."""
    found = re.search(r"## Training\n`(.+)`\non (.+), (torch .+), ([\d-]+): ", card)
    assert found
    return dict(zip(("command", "machine", "software", "date"), found.groups(), strict=True))


def corpus_of(card: str) -> dict[str, object]:
    """What a card takes from `corpus.json`, which is not shipped."""
    counts = re.search(r"(\d+) tokens \((\d+) bytes; prose (\d+) MB, python (\d+) MB;(?s:.+?); (\d+) near-", card)
    assert counts
    tokens, size, prose, python, dropped = map(int, counts.groups())
    kinds = {"PyPI": "pypi", "Debian 12": "deb"}
    return {
        "streams": {"train": {"tokens": tokens, "bytes": size}},
        "train_bytes_by_kind": {"prose": prose * 10**6, "python": python * 10**6},
        "dropped_near_duplicates": dropped,
        "held_out_percent": 1.5,
        "unseen_packages": ["bottle", "nox", "werkzeug"],
        "sources": [
            {"name": n, "version": v, "kind": kinds[kind], "licence": licence, "train_bytes": int(kb) * 1000}
            for n, v, kind, licence, kb in ROW.findall(card)
        ],
    }


@pytest.mark.parametrize("name", TARGETS)
def test_cards_are_what_the_card_program_writes(name: str, tmp_path: Path) -> None:
    card = (MODELS / name / "README.md").read_text()
    (tmp_path / "corpus.json").write_text(json.dumps(corpus_of(card)))
    assert language_model_card(MODELS / name, tmp_path / "corpus.json", run_of(card)) == card
    drafter = MODELS / f"{name}-dflash2"
    card = (drafter / "README.md").read_text()
    assert drafter_card(drafter, name, run_of(card)) == card


def test_the_records_show_what_was_asked_for() -> None:
    for name in TARGETS:
        rows = json.loads((MODELS / f"{name}-dflash2" / "acceptance.json").read_text())["rows"]
        assert next(row["mean"] for row in rows if row["temperature"] == 0) >= 2.5
        evaluation = json.loads((MODELS / name / "evaluation.json").read_text())
        grams = {row["stream"]: row["perplexity"] for row in evaluation["five_gram"]}
        assert all(2 * row["perplexity"] < grams[row["stream"]] for row in evaluation["scores"])


@pytest.mark.parametrize(("vllm", "reference"), [("dense-vllm-cpu-16", "dense-reference-cpu-16"),
                                                 ("moe-vllm-cpu-32", "moe-reference-cpu-32")])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_acceptance_inside_vllm_agrees_with_the_reference(vllm: str, reference: str, dtype: str) -> None:
    first, second = (json.loads((ACCEPTANCE / f"{n}.json").read_text()) for n in (vllm, f"{reference}-{dtype}"))
    assert first["prompts_sha256"] == second["prompts_sha256"]
    rows = {row["temperature"]: row for row in second["rows"]}
    found = [difference(row["temperature"], row, rows[row["temperature"]]) for row in first["rows"]]
    assert found
    assert all(d.paired and abs(d.z) <= LIMIT for d in found)
