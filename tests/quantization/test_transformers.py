"""transformers reads our block FP8 on a CPU, dequantised by its own code."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.quantizers import quantizer_finegrained_fp8

from sparkinfer.quantization.dequantise import dequantise_checkpoint


def test_transformers_dequantises_fp8_to_the_same(source, quantise, tmp_path, monkeypatch):
    # It asks for the package accelerate, which spreads models over devices: on one CPU nothing calls it.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    quantise(source(), tmp_path / "q", "fp8")
    dequantise_checkpoint(tmp_path / "q", tmp_path / "plain")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    ).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).state_dict()
    assert theirs.keys() == ours.keys()
    assert [name for name in ours if not torch.equal(theirs[name], ours[name])] == []
    assert len(ours) > 50
