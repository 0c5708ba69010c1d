"""`train.py evaluate` and `train.py card`: figures against a plain computation, and a card that holds them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from sparkinfer_models import evaluate as evaluation
from sparkinfer_models.checkpoint import load_network
from sparkinfer_models.dataset import read_stream
from sparkinfer_models.evaluate import network_loss
from sparkinfer_models.sources import Document, Source
from sparkinfer_models.train_cli import main


@pytest.fixture(scope="module")
def trained(toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy model folder with a tokenizer-free data folder beside it."""
    folder = tmp_path_factory.mktemp("trained")
    arguments = ["--length", "64", "--batch", "4", "--long-length", "128", "--steps", "6", "--log-every", "3"]
    assert main(["run", "--model", "dense", "--data", str(toy_data), "--out", str(folder), "--toy", "--device", "cpu",
                 *arguments]) == 0  # fmt: skip
    return folder


def _corpus(data: Path) -> None:
    held = read_stream(data / "held_out.u16.xz")
    sizes = {"train": {"tokens": 18000, "bytes": 54000}}
    for name in ("held_out", "unseen", "held_out_chat"):
        (data / f"{name}.u16.xz").write_bytes((data / "held_out.u16.xz").read_bytes())
        sizes[name] = {"tokens": len(held), "bytes": 3 * len(held)}
    summary = {
        "streams": sizes,
        "sources": [{"kind": "pypi", "name": "pkg", "version": "1.2", "licence": "MIT", "train_bytes": 54000}],
        "train_bytes_by_kind": {"python": 54_000_000},
        "dropped_near_duplicates": 3,
        "held_out_percent": 1.5,
        "unseen_packages": ["bottle"],
    }
    (data / "corpus.json").write_text(json.dumps(summary))


def test_evaluate_and_card(trained: Path, toy_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _corpus(toy_data)
    command = ["evaluate", "--model", str(trained), "--data", str(toy_data), "--device", "cpu", "--context", "100"]
    assert main([*command, "--limit", "901", "--json", str(trained / "evaluation.json")]) == 0
    result = json.loads((trained / "evaluation.json").read_text())
    row = result["scores"][0]
    ids = read_stream(toy_data / "held_out.u16.xz")[:901]
    network = load_network(trained, torch.float32)
    total, right = 0.0, 0
    with torch.no_grad():
        for start in range(0, 900, 100):
            window = torch.from_numpy(ids[start : start + 101].astype("int64"))[None]
            logits = network.logits(network(window[:, :-1]).hidden)[0].log_softmax(-1)
            total -= float(logits.gather(1, window[0, 1:, None]).sum())
            right += int((logits.argmax(-1) == window[0, 1:]).sum())
    assert row["loss"] == pytest.approx(total / 900, rel=1e-4)
    assert row["top1"] == pytest.approx(right / 900)
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2) / 3)
    described = ["--run-command", "python models/train.py run", "--machine", "a test", "--software", "torch",
                 "--date", "today"]  # fmt: skip
    assert main(["card", str(trained), "--data", str(toy_data), *described]) == 0
    card = (trained / "README.md").read_text()
    assert f"{row['perplexity']:.2f}" in card
    assert "| pkg | 1.2 | PyPI | MIT | 54 |" in card
    assert result["weights_sha256"] in card
    (trained / "evaluation.json").write_text(json.dumps({**result, "weights_sha256": "0"}))
    assert main(["card", str(trained), "--data", str(toy_data), *described]) == 2
    assert "was not measured with the weights" in capsys.readouterr().err
    assert (trained / "training_curve.png").stat().st_size > 1000
    (trained / "evaluation.json").unlink()
    assert main(["card", str(trained), "--data", str(toy_data), *described]) == 2
    assert "evaluation.json is missing" in capsys.readouterr().err


def test_a_short_last_window_is_scored_too(trained: Path) -> None:
    network = load_network(trained, torch.float32)
    ids = torch.randint(0, 512, (231,), generator=torch.Generator().manual_seed(0)).numpy().astype("uint16")
    whole, _ = network_loss(network, ids, 100)
    parts = [network_loss(network, ids[start : start + 101], 100)[0] for start in (0, 100)]
    last = network_loss(network, ids[200:], 100)[0]
    assert whole == pytest.approx((sum(parts) * 100 + last * 30) / 230, rel=1e-5)


def test_packages_are_scored_alone_and_together_without_licences(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {"one": ["one.py", "x-1.dist-info/licenses/LICENSE"], "two": ["two.py"], "none": ["licenses/MIT"]}
    sources = [Source("pypi", name, "1", "f", "0", "MIT", 10**6) for name in texts]
    monkeypatch.setattr(evaluation, "load_sources", lambda: sources)
    monkeypatch.setattr(evaluation, "fetch", lambda source, folder: folder)
    body = "value = 1\n" * 9
    monkeypatch.setattr(
        evaluation, "documents", lambda s, _: [Document(s.name, f"{s.name}/{n}", "python", body) for n in texts[s.name]]
    )
    out = tmp_path / "e.json"
    model = Path(__file__).resolve().parents[2] / "models" / "spark-tiny-dense"
    command = ["evaluate", "--model", str(model), "--device", "cpu", "--context", "32", "--json", str(out), "--package"]
    assert main([*command, "one", "two"]) == 0
    rows = {row["stream"]: row for row in json.loads(out.read_text())["scores"]}
    assert rows["one"] == {**rows["two"], "stream": "one"}
    assert rows["one and two"]["tokens"] == 2 * rows["one"]["tokens"] + 1
    for names, words in ((["none"], "no readable document"), (["three"], "no such package")):
        assert main([*command, *names]) == 2
        assert words in capsys.readouterr().err
    assert main(command[:3]) == 2
    assert "give --data" in capsys.readouterr().err
