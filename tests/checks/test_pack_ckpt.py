"""`pack_ckpt_check` passes on the real runner and fails on planted faults."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sparkinfer_eval import check_program, pack_ckpt
from sparkinfer_kernels.gated_delta_rule import reference as gdn

from sparkinfer.runner import batch as runner_batch
from sparkinfer.runner.model_runner import ModelRunner

ROOT = Path(__file__).parents[2]


# Rounding to bfloat16 moves states of random toys by the limit itself; those of a trained model stay far below it.
TRAINED = ROOT / "models" / "spark-tiny-dense"


@pytest.mark.parametrize(
    ("name", "dtype", "layers"), [("dense", "float32", 3), ("moe", "float32", 3), ("trained", "bfloat16", 6)]
)
def test_alone_and_packed_agree(models, tmp_path, name, dtype, layers, capsys):
    out = tmp_path / "check.json"
    folder = TRAINED if name == "trained" else models / name
    assert pack_ckpt.main([str(folder), "--dtype", dtype, "--json", str(out)]) == 0, capsys.readouterr().out
    document = json.loads(out.read_text())
    assert document["ok"]
    assert (document["check"], document["dtype"]) == ("pack_ckpt_check", dtype)
    assert document["model_digest"].startswith("sha256:")
    # 3 + 2 + 3 + 4 + 4 prompts, each a first token, and a state and a window of every linear layer.
    assert len(document["rows"]) == 16 * (1 + 2 * layers)
    assert all(row["value"] <= row["limit"] for row in document["rows"])
    assert "DIFFERS" not in capsys.readouterr().out


def test_the_script_itself(models):
    command = [sys.executable, "eval/pack_ckpt_check.py", str(models / "dense"), "--dtype", "float32"]
    path = {"PYTHONPATH": ":".join(str(ROOT / part) for part in ("", "kernels", "eval")), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=ROOT, env=path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "all 112 rows agree" in done.stdout


def swapped_scatter(starts, lengths, cuts, device):
    """Plants a layout fault: outputs and inputs of two prompts' first chunks change places in a pack."""
    layout = gdn.chunk_layout(starts, lengths, cuts, device)
    if len(lengths) > 1:
        layout.gather[: 2 * gdn.CHUNK] = layout.gather[: 2 * gdn.CHUNK].roll(gdn.CHUNK)
    return layout


def early_save(starts, lengths, cuts, device):
    """Plants an off-by-one: in a pack the checkpoint is taken one token early."""
    layout = gdn.chunk_layout(starts, lengths, cuts, device)
    if len(lengths) > 1:
        for saves in layout.saves:
            saves[:] = [(row, save, max(1, tokens - 1)) for row, save, tokens in saves]
    return layout


@pytest.mark.parametrize("fault", [swapped_scatter, early_save])
def test_a_planted_layout_fault_is_caught(models, monkeypatch, capsys, fault):
    monkeypatch.setattr(runner_batch, "chunk_layout", fault)
    assert pack_ckpt.main([str(models / "dense"), "--dtype", "float32"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_a_missing_snapshot_is_caught(models, monkeypatch, capsys):
    original = runner_batch.BatchBuilder.build

    def build(self, plan):
        step = original(self, plan)
        if len(plan.rows) > 1:
            step.batch.prefill.saves.clear()
            for saves in step.batch.prefill.chunks.saves:
                saves.clear()
        return step

    monkeypatch.setattr(runner_batch.BatchBuilder, "build", build)
    assert pack_ckpt.main([str(models / "dense"), "--dtype", "float32"]) == 1
    assert "1e+09" in capsys.readouterr().out


def test_a_window_of_the_wrong_prompt_is_caught(models, monkeypatch):
    original = runner_batch.BatchBuilder.build

    def build(self, plan):
        step = original(self, plan)
        saves = step.batch.prefill.saves
        if len(saves) > 1:
            saves[0], saves[1] = (saves[1][0], *saves[0][1:]), (saves[0][0], *saves[1][1:])
        return step

    monkeypatch.setattr(runner_batch.BatchBuilder, "build", build)
    assert pack_ckpt.main([str(models / "dense"), "--dtype", "float32"]) == 1


@pytest.mark.parametrize("fault", ["not written", "of another prompt"])
def test_a_fault_of_the_step_that_the_engine_runs_is_caught(models, monkeypatch, capsys, fault):
    """Checkpoints go wrong in `execute` only, as those of a captured pass would: the pass for logits is right."""
    original = ModelRunner.execute

    def execute(self, plan):
        result = original(self, plan)
        if len(plan.rows) > 1:
            first, second = (row.checkpoints[0].snapshot for row in plan.rows[:2])
            wrong = pack_ckpt.UNWRITTEN if fault == "not written" else self.caches.snapshot_state[second].clone()
            with torch.inference_mode():
                self.caches.snapshot_state[first] = wrong
        return result

    monkeypatch.setattr(ModelRunner, "execute", execute)
    assert pack_ckpt.main([str(models / "dense"), "--dtype", "float32"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_exit_codes_for_bad_input(models, tmp_path, capsys):
    assert pack_ckpt.main([str(tmp_path / "absent")]) == 2
    assert pack_ckpt.main([str(tmp_path)]) == 2
    assert pack_ckpt.main([str(models / "dense"), "--json", str(tmp_path / "no" / "x.json")]) == 2
    assert pack_ckpt.main([str(models / "attention")]) == 4
    assert "no linear-attention layer" in capsys.readouterr().err


def test_a_check_that_does_not_apply_says_so_in_its_json(models, tmp_path):
    path = tmp_path / "check.json"
    assert pack_ckpt.main([str(models / "attention"), "--json", str(path)]) == 4
    document = json.loads(path.read_text())
    assert document["ok"] is None
    assert document["rows"] == []
    assert "no linear-attention layer" in document["not_applicable"]


def test_a_check_without_rows_is_no_pass(models, capsys):
    options = check_program.parser("empty", None).parse_args([str(models / "dense")])
    assert check_program.run("empty", options, lambda _: ("float32", [])) == 1


def test_lengths_scale_to_the_context():
    assert pack_ckpt.scaled_lengths(4096) == (1076, 1077, 777)
    short = pack_ckpt.scaled_lengths(300)
    assert max(short) < 300
    assert short[1] > short[2]
    for length in (17, 32, 33, 48, 49, 1076, 1077, 777):
        position = pack_ckpt.checkpoint_position(length)
        assert position % 16 == 0
        assert 16 <= position < length
        assert position <= length - 16 or length < 48


def test_runner_class_is_the_engine_s_own():
    assert pack_ckpt.ModelRunner is ModelRunner
