"""The recorded figures of the container: the page is what the program writes, and a slow step is no result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sparkinfer_containers import cli, figures
from sparkinfer_containers.image import settings
from sparkinfer_eval.report.document import to_markdown

from sparkinfer.errors import EnvironmentProblem

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "reports" / "container"


def test_recorded_page_follows_from_the_recorded_figures() -> None:
    made = json.loads((RECORDED / "figures.json").read_text())
    assert made["schema"] == figures.SCHEMA
    assert made["reproduced"] is True
    assert made["unpacked_bytes"] < 700e6
    for step, limit in figures.LIMITS.items():
        assert made["seconds"][step] < limit
    assert (RECORDED / "README.md").read_text() == to_markdown(figures.blocks(made))


def test_page_of_the_cuda_image_follows_from_its_figures() -> None:
    made = json.loads((RECORDED / "cuda13.json").read_text())
    assert made["reproduced"] is True
    assert made["image"]["variant"] == "cuda13"
    for step, limit in figures.LIMITS.items():
        assert made["seconds"][step] < limit
    assert "sparkinfer doctor in the image" in made["seconds"]
    assert (RECORDED / "cuda13.md").read_text() == to_markdown(figures.blocks(made))


def test_the_page_names_the_command_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(cli.figures, "measure", lambda *given: seen.append(given[-1]))
    monkeypatch.setattr(cli.figures, "write", lambda *_: None)
    given = ["figures", "--variant", "cuda13", "--scratch", str(tmp_path / "work"), "--output", "a folder"]
    assert cli.main(given) == 0
    assert cli.main([*given, "--shown", "snakemake x"]) == 0
    wanted = "python -m sparkinfer_containers figures --variant cuda13 --scratch work --output 'a folder'"
    assert seen == [wanted, "snakemake x"]


@pytest.mark.parametrize(("verify_s", "differ", "said"), [(10.5, [], "verify took"), (1.0, ["layer 1: x"], "differs")])
def test_slow_step_or_another_digest_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify_s: float, differ: list[str], said: str
) -> None:
    def build(recipe: Any, repository: Path, output: Path, caches: Any) -> dict[str, Any]:
        for folder in (caches.debs, caches.wheels):
            folder.mkdir()
        return {}

    def ship(image: Path, model: Path, work: Path) -> dict[str, Any]:
        work.mkdir()
        return {"seconds": {"verify": verify_s}, "level": "integrity only"}

    monkeypatch.setattr(figures.build, "build", build)
    monkeypatch.setattr(figures.rebuild, "rebuild", lambda *_: differ)
    monkeypatch.setattr(figures.ship, "ship", ship)
    with pytest.raises(EnvironmentProblem, match=said):
        figures.measure(settings.load(ROOT, "cpu"), ROOT, tmp_path, tmp_path, lambda folder: None, "x")
    assert list(tmp_path.iterdir()) == []
