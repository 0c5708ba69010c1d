"""The batched reference loop gives the plain loop's tokens and acceptance."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sparkinfer_models.checkpoint import load_network
from sparkinfer_models.drafter import load_drafter
from sparkinfer_models.drafter_cli import main
from sparkinfer_models.speculate import Speculator, gumbel_noise
from sparkinfer_models.speculate_batched import BatchedSpeculator, gumbel_rows

from sparkinfer.identity import file_sha256

ROOT = Path(__file__).resolve().parents[2]


def test_noise_is_the_plain_loops() -> None:
    seeds, positions = torch.tensor([[0, 3], [2**40, 7]]), torch.tensor([[5, 129], [1000, 0]])
    rows = gumbel_rows(seeds, positions, 300)
    for place in np.ndindex(2, 2):
        expected = gumbel_noise(int(seeds[place]), int(positions[place]), 300)
        torch.testing.assert_close(rows[place], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["spark-tiny-dense", "spark-tiny-moe"])
@pytest.mark.parametrize(
    ("temperature", "options"),
    [
        (0.0, {}),
        (0.7, {"shared_noise": False, "ignore_stop": True}),
        (1.0, {"selector": False}),
    ],
)
def test_tokens_and_acceptance_are_the_plain_loops(name: str, temperature: float, options: dict[str, bool]) -> None:
    network = load_network(ROOT / "models" / name, torch.float32).requires_grad_(False)
    drafter = load_drafter(ROOT / "models" / f"{name}-dflash2", torch.float32).requires_grad_(False)
    random = np.random.default_rng(5)
    prompts = [random.integers(40, 2000, 70).tolist(), [*range(100, 170)], [7, 8, 9, 10, 11, 12, 13] * 10]
    plain = Speculator(network, drafter, **options)
    expected = [plain.decode(prompt, 20, temperature, seed) for seed, prompt in enumerate(prompts)]
    found = BatchedSpeculator(network, drafter, **options).decode(prompts, 20, temperature, [0, 1, 2])
    assert [d.tokens for d in found] == [d.tokens for d in expected]
    assert [d.accepted for d in found] == [d.accepted for d in expected]


def test_a_stop_token_ends_its_row_only() -> None:
    network = load_network(ROOT / "models" / "spark-tiny-dense", torch.float32).requires_grad_(False)
    drafter = load_drafter(ROOT / "models" / "spark-tiny-dense-dflash2", torch.float32).requires_grad_(False)
    prompts = [[*range(100, 170)], [7, 8, 9, 10, 11, 12, 13] * 10]
    plain, batched = Speculator(network, drafter), BatchedSpeculator(network, drafter)
    # What the first row says at its fifth place is made a stop token.
    token = plain.decode(prompts[0], 5, 0.0, 0).tokens[-1]
    plain.stop = batched.stop = (token,)
    expected = [plain.decode(prompt, 16, 0.0, seed) for seed, prompt in enumerate(prompts)]
    found = batched.decode(prompts, 16, 0.0, [0, 1])
    assert len(expected[0].tokens) <= 5
    assert expected[0].tokens[-1] == token
    assert [(d.tokens, d.accepted) for d in found] == [(d.tokens, d.accepted) for d in expected]


def test_measure_writes_the_sums_of_every_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.json", tmp_path / "out.json"
    prompts.write_text(json.dumps([[*range(40 + i, 72 + i)] for i in range(3)]))
    dense = ROOT / "models" / "spark-tiny-dense"
    options = {"target": dense, "drafter": f"{dense}-dflash2", "prompts-file": prompts, "tokens": 12, "json": out}
    command = ["measure", *(str(item) for name, value in options.items() for item in (f"--{name}", value))]
    assert main([*command, "--temperatures", "0.7", "--compare", "2"]) == 0
    document = json.loads(out.read_text())
    (row,) = document["rows"]
    assert document["argv"][:4] == ["train_drafter.py", "measure", "--target", "spark-tiny-dense"]
    assert document["date"].endswith("Z")
    assert document["machine"]["cpus_online"]
    assert document["target_sha256"] == file_sha256(dense / "model.safetensors")
    assert document["drafter_sha256"] == file_sha256(Path(f"{dense}-dflash2") / "model.safetensors")
    assert (row["identical"], row["compared"], len(row["sums"])) == (2, 2, 3)
    assert row["mean"] == pytest.approx(sum(a for a, _ in row["sums"]) / sum(b for _, b in row["sums"]), abs=1e-4)
    assert main([*command, "--batch", "1", "--ignore-stop"]) == 2
    assert "nothing to compare" in capsys.readouterr().err
