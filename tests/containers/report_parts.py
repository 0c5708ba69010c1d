"""Reports for the tests of signing and verifying them: raw results, a rendered folder, the verifier's outcome."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sparkinfer_containers import attest
from sparkinfer_containers.trust import credentials
from sparkinfer_containers.verify.cli import main
from sparkinfer_eval.report.writer import write_report

ROOT = Path(__file__).parents[2]
IMAGE = "sha256:" + "e" * 64
SOURCE = "sha256:" + "5" * 64


def raw_run_class() -> Any:
    """The generator of raw results that the report's own tests use."""
    spec = importlib.util.spec_from_file_location("report_conftest", ROOT / "tests" / "report" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.RawRun


@pytest.fixture(scope="module")
def raw_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = raw_run_class()(tmp_path_factory.mktemp("raw"), blocks=2)
    return Path(run.write().folder)


def render(raw: Path, target: Path) -> Path:
    changes = target.parent / "changes"
    changes.mkdir(exist_ok=True)
    write_report(raw, target, ROOT, changes)
    return target


@pytest.fixture(scope="module")
def rendered(raw_results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render(raw_results, tmp_path_factory.mktemp("report") / "report")


@pytest.fixture(scope="module")
def signed_master(rendered: Path, raw_results: Path, state: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(rendered, tmp_path_factory.mktemp("signed") / "report"))
    with credentials("private", state=state) as held:
        attest.sign_report(folder, attest.evaluation(folder, raw_results), held)
    return folder


@pytest.fixture
def signed(signed_master: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(signed_master, tmp_path / "report"))


@pytest.fixture
def check(trusted_root: Path, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs sparkinfer-verify on a folder; exit code and outcome."""

    def run(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
        report = tmp_path / "outcome.json"
        code = main([str(folder), "--trusted-root", str(trusted_root), "--json", str(report), *options])
        outcome = json.loads(report.read_text())
        assert outcome["exit_code"] == code
        if code:
            assert outcome["proved"] == []
            assert outcome["level"] == "none"
        return code, outcome

    return run


def texts(outcome: dict[str, Any]) -> str:
    return "\n".join(problem["text"] for problem in outcome["problems"])
