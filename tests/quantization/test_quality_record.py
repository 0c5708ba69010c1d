"""reports/quantization: the recorded files are those that the quantizer writes today; the table shows the record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sparkinfer_models.quality_table import BEGIN, END, main, table, uncalibrated_digest

from sparkinfer.identity import model_digest
from sparkinfer.quantization.quantizer import Options, Quantizer
from sparkinfer.quantization.schemes import Format

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "reports" / "quantization"
RECORD = json.loads((FOLDER / "results.json").read_text())


def test_every_form_is_recorded_and_the_table_is_the_record_s() -> None:
    forms = {(entry["model"], entry["format"]) for entry in RECORD}
    assert forms >= {(f"spark-tiny-{m}", kind) for m in ("dense", "moe") for kind in ("nvfp4", "fp8")}
    shown = (FOLDER / "README.md").read_text().partition(f"{BEGIN}\n")[2].partition(END)[0]
    assert shown == table(RECORD)


@pytest.mark.parametrize("model", ["spark-tiny-dense", "spark-tiny-moe"])
@pytest.mark.parametrize("kind", ["fp8", "nvfp4", "nvfp4 --no-search"])
def test_the_record_is_of_what_the_quantizer_writes(model: str, kind: str, tmp_path: Path) -> None:
    """What calibration decides has the recorded bits on the recorded kind of CPU; on others its sums differ in their
    last bits, and what needs no calibration is compared."""
    entry = next(entry for entry in RECORD if (entry["model"], entry["format"]) == (model, kind))
    assert entry["source_digest"] == model_digest(ROOT / "models" / model), "measure again: the model has changed"
    made = tmp_path / "q"
    Quantizer(
        ROOT / "models" / model, made, Options(format=Format(kind.split()[0]), search="no-search" not in kind)
    ).run()
    if kind != "nvfp4":
        assert entry["uncalibrated_digest"] == uncalibrated_digest(made), "measure again: the quantizer has changed"
    if kind == "fp8" or entry["cpu_capability"] == torch.backends.cpu.get_cpu_capability():
        assert entry["model_digest"] == model_digest(made), "measure again: the quantizer has changed"


def test_a_comparison_of_other_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("no place for a table\n")
    source = ROOT / "models" / "spark-tiny-dense"
    Quantizer(source, tmp_path / "spark-tiny-dense-fp8", Options(format=Format.FP8)).run()
    figures = dict.fromkeys(
        ("positions", "kl", "kl_p99", "kl_max", "top1", "top1_plain", "near_ties", "answers", "answers_equal"), 1
    )
    document = {
        "engines": {
            "a": {"model": "spark-tiny-dense-fp8", "model_digest": "sha256:0", "engine_digest": "sha256:1"},
            "b": {"model": "spark-tiny-dense", "model_digest": model_digest(source)},
        },
        "figures": {**figures, "loss_a": 1.0, "loss_b": 1.0, "parted_at": None},
        "settings": {"answer_tokens": 64},
        "source": {"commit": None},
        "held_out": "0",
        "date": "today",
        "command": "eval/accuracy.py",
    }
    path = tmp_path / "comparison.json"
    arguments = [str(path), "--checkpoints", str(tmp_path), "--sources", str(ROOT / "models"), "--out", str(tmp_path)]
    path.write_text(json.dumps(document))
    assert main(arguments) == 2
    assert "spark-tiny-dense-fp8 is not what" in capsys.readouterr().err
    document["engines"]["a"]["model_digest"] = model_digest(tmp_path / "spark-tiny-dense-fp8")
    path.write_text(json.dumps(document))
    assert main(arguments) == 2
    assert "has no place for the table" in capsys.readouterr().err
    (tmp_path / "README.md").write_text(f"# Quality\n{BEGIN}\nold\n{END}\nmore\n")
    assert main(arguments) == 0
    written = json.loads((tmp_path / "results.json").read_text())
    assert (tmp_path / "README.md").read_text() == f"# Quality\n{BEGIN}\n{table(written)}{END}\nmore\n"
    assert "| FP8 blocks | 3.4 | 2.718 | 1.0000 |" in table(written)
    document["engines"]["b"]["model"] = "another"
    path.write_text(json.dumps(document))
    assert main(arguments) == 2
    assert "is no comparison of a quantised form with its source" in capsys.readouterr().err
