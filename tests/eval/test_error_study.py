"""The study of fast arithmetic, over plain twins of the GPU's kernels on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from sparkinfer_eval.error_study import VARIANTS, logit_error, main

from sparkinfer.models.config import load_config
from sparkinfer.models.loader import open_source
from sparkinfer.models.qwen3_5_gpu import GpuModel, GpuOptions
from sparkinfer.runner.gpu_runner import GpuRunner
from sparkinfer.runner.memory import MemoryPlan
from tests.models.conftest import build_reference
from tests.models.gpu_twins import twin_ops


def opened(folder, options, limits, longest):
    """As on a GPU, of float32 twins: an FP8 output matrix is all that they compute differently."""
    config = load_config(folder)
    plain = replace(options, fp8_prefill=False, fp8_kv=False, bf16_state=False)
    with torch.inference_mode():
        model = GpuModel(
            config, open_source(folder, config), device=torch.device("cpu"), ops=twin_ops(), options=plain,
            max_positions=longest, max_rows=limits.max_rows, dtype=torch.float32,
        )  # fmt: skip
        if options.bf16_state:  # A planted error: the third layer's feed-forward block is a little off.
            weight = model.layers[2].mlp.down.weights[0]
            weight.values = weight.values * 1.01
    blocks = limits.max_num_seqs * -(-longest // 16)
    memory = MemoryPlan.for_model(
        config, dtype="float32", num_slots=limits.max_num_seqs, num_kv_blocks=blocks, num_snapshots=0
    )
    return GpuRunner(model, memory, limits, max_model_len=-(-longest // 16) * 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("study") / "dense"
    build_reference("dense").save_pretrained(where)
    return where


def test_errors_begin_where_they_arise(folder, tmp_path, capsys):
    out = tmp_path / "study.json"
    sizes = ["--prompts", "3", "--tokens", "20", "--steps", "4"]
    assert main([str(folder), *sizes, "--json", str(out)], opened) == 0
    document = json.loads(out.read_text())
    found = {one["variant"]: one for one in document["variants"]}
    assert list(found) == list(VARIANTS)
    layers = 2 * load_config(folder).num_layers
    for one in found.values():
        for phase in ("prompt", "decode"):
            assert len(one[f"{phase}_layers"]) == layers
    assert found["rounding"]["prompt"]["positions"] == 60
    assert found["rounding"]["decode"]["positions"] == 12
    assert max(found["rounding"]["prompt_layers"] + found["rounding"]["decode_layers"]) < 1e-4
    assert max(found["head fp8"]["decode_layers"]) == 0
    assert found["head fp8"]["decode"]["kl"] > 1e-7
    for phase in ("prompt_layers", "decode_layers"):
        planted = found["state bfloat16"][phase]
        # Two a layer: the first five lie before the planted error.
        assert max(planted[:5]) == 0
        assert 1e-4 < planted[5] < 0.011
    assert "| state bfloat16 |" in capsys.readouterr().out


def test_bad_input_is_one_line(folder, capsys, tmp_path):
    for arguments, text in (
        ([str(tmp_path / "none")], "not a folder"),
        ([str(folder), "--steps", "0"], "at least 1"),
        ([str(folder), "--tokens", "5000"], "positions"),
        ([str(folder), "--device", "cpu"], "for a GPU"),
    ):
        assert main(arguments) in (2, 3)
        error = capsys.readouterr().err
        assert text in error
        assert error.count("\n") == 1


def test_logit_error_is_the_divergence():
    exact = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    same = logit_error(exact + 5.0, exact)
    assert same.kl < 1e-6
    assert same.top1 == 1.0
    other = logit_error(torch.tensor([[2.0, 1.0, 0.0], [3.0, 0.0, 0.0]]), exact)
    p, q = exact[0].softmax(0), exact[0].flip(0).softmax(0)
    assert other.kl == pytest.approx(float((p * (p / q).log()).sum()) / 2, rel=1e-5)
    assert other.top1 == 0.5


def test_defaults_are_no_variant():
    assert [name for name, options in VARIANTS.items() if options == GpuOptions()] == ["rounding"]
