"""`sparkinfer bench` on a tiny model."""

from __future__ import annotations

import json

import pytest

from sparkinfer.bench import main
from sparkinfer.errors import ConfigError


def test_bench_prints_and_writes_what_it_measured(checkpoint, tmp_path, capsys):
    folder, _ = checkpoint("moe")
    out = tmp_path / "bench.json"
    lengths = ["--decode", "1,3", "--context", "20", "--prefill", "30,2x17", "--steps", "3", "--repeats", "2"]
    assert main([str(folder), *lengths, "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    measured = [(row["phase"], row["requests"], row["tokens_each"]) for row in document["rows"]]
    assert measured == [("decode", 1, 20), ("decode", 3, 20), ("prefill", 1, 30), ("prefill", 2, 17)]
    assert all(row["median_ms"] >= row["min_ms"] > 0 for row in document["rows"])
    assert document["schema"] == "sparkinfer/bench/v1"
    assert not document["random_weights"]
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_bench_refuses_a_gpu_s_arithmetic_on_a_cpu(checkpoint):
    folder, _ = checkpoint("dense")
    with pytest.raises(ConfigError, match="--state-dtype bfloat16 is for a GPU"):
        main([str(folder), "--state-dtype", "bfloat16"])


def test_bench_refuses_lengths_beyond_the_model(checkpoint):
    folder, _ = checkpoint("dense")
    with pytest.raises(ConfigError, match="more than the model's 512 positions"):
        main([str(folder), "--prefill", "600"])
