"""The documentation of verification: its commands run as written, and each attack that it lists has its test."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sparkinfer_containers import cli
from sparkinfer_containers.attest import sign_and_attach
from sparkinfer_containers.image import settings
from sparkinfer_containers.oci.registry import Reference
from sparkinfer_containers.ship import push
from sparkinfer_containers.statements import PROVENANCE
from sparkinfer_containers.trust import credentials
from sparkinfer_containers.verify.cli import main as verify

ROOT = Path(__file__).parents[2]
REGISTRY = "127.0.0.1:5000"
PUBLIC = ("ghcr.io/", "token.actions.githubusercontent.com")


def commands(name: str) -> list[str]:
    """The commands of the code blocks under a page's heading "Verify", lines joined."""
    text = (ROOT / name).read_text(encoding="utf-8")
    (section,) = re.findall(r"^## Verify\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    blocks = "\n".join(re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL))
    lines = blocks.replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


DOCUMENTED = [(page, command) for page in ("README.md", "docs/attestation.md") for command in commands(page)]
OF_REPORTS = [item for item in DOCUMENTED if "INSTANCE" in item[1]]
OF_PUBLIC = [item for item in DOCUMENTED if any(part in item[1] for part in PUBLIC)]
OF_PRIVATE = [item for item in DOCUMENTED if item not in OF_REPORTS and item not in OF_PUBLIC]


def shell(command: str, folder: Path, gh: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder` as a user would who has the environment's programs on the path."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), str(Path(gh).parent), os.environ["PATH"]])
    packages = os.pathsep.join(str(ROOT / part) for part in (".", "containers", "eval"))
    outer = {**os.environ, "PATH": programs, "PYTHONPATH": packages, "GH_CONFIG_DIR": str(folder), **environment}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=outer, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def reader(
    tmp_path: Path, toy: Any, about: Any, registry_host: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, dict[str, str]]:
    """A folder with what a reader has, and what to put in place of the documentation's examples."""
    monkeypatch.setenv("ATTEST_STATE", str(tmp_path / "state"))
    folder = tmp_path / "reader"
    layout = toy(folder / "image" / "layout")
    image = layout.image()
    with credentials("private", claims=cli._claims(settings.load(ROOT, "cpu"))) as held:
        sign_and_attach(layout, image, about(image.digest), held)
    push(layout, Reference.parse(f"{registry_host}/sparkinfer-qwen38:1"))
    shutil.copy(tmp_path / "state" / "trusted_root.json", folder)
    bundles = folder / "reports" / "RUN" / "bundles"
    bundles.mkdir(parents=True)
    (item,) = [
        item
        for item in layout.referrers(image.digest)
        if item.annotations["dev.sigstore.bundle.predicateType"] == PROVENANCE
    ]
    bundle = json.loads(layout.manifest(item.digest))["layers"][0]["digest"]
    shutil.copy(layout.blob_path(bundle), bundles / "provenance.sigstore.json")
    shutil.rmtree(tmp_path / "state")
    root = json.loads((folder / "trusted_root.json").read_text())
    host = root["tlogs"][0]["baseUrl"].removeprefix("https://log.")
    return folder, {REGISTRY: registry_host, "sha256:...": image.digest, "HOST": host}


def test_documented_commands_for_a_private_instance(reader: tuple[Path, dict[str, str]], gh: str) -> None:
    folder, examples = reader
    assert {command.split()[0] for _, command in OF_PRIVATE} == {"sparkinfer-verify", "GH_TOKEN=unused", "python"}
    for page, command in OF_PRIVATE:
        filled = command
        for example, value in examples.items():
            filled = filled.replace(example, value)
        done = shell(filled, folder, gh, NO_PROXY="127.0.0.1")
        assert done.returncode == 0, f"{page}: {filled}\n{done.stdout}{done.stderr}"


def test_documented_commands_for_the_public_instance(gh: str, tmp_path: Path) -> None:
    assert {command.split()[0] for _, command in OF_PUBLIC} == {"sparkinfer-verify", "gh", "python"}
    for page, command in OF_PUBLIC:
        words = shlex.split(command)
        at = next(i for i, word in enumerate(words) if word.startswith(("--", "oci:", "ghcr.io/")))
        shown = shell(shlex.join([*words[:at], "--help"]), tmp_path, gh).stdout
        for word in words:
            assert not word.startswith("--") or re.search(rf"{word}\b", shown), f"{page}: {word}"
            if word.startswith(("oci:", "ghcr.io/")):
                Reference.parse(word.replace("sha256:...", "sha256:" + "0" * 64))


@pytest.mark.parametrize("report", sorted(path.parent.name for path in ROOT.glob("reports/*/report.json")))
def test_committed_report_verifies_with_a_committed_root(
    report: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a fresh clone: this host's own instance is out of reach."""
    monkeypatch.setenv("ATTEST_STATE", str(tmp_path / "none"))
    monkeypatch.chdir(ROOT)
    (command,) = {command for _, command in OF_REPORTS}
    found = []
    for root in sorted((ROOT / "containers" / "trusted_roots").glob("*.json")):
        filled = command.replace("RUN", report).replace("INSTANCE", root.stem)
        assert json.loads(root.read_text())["tlogs"][0]["baseUrl"].startswith(f"https://log.{root.stem}.private.")
        found.append(verify(shlex.split(filled)[1:]))
    assert 0 in found, f"{capsys.readouterr().out}\nadd the trusted_root.json of the host that signed {report}"


def test_each_listed_attack_has_its_test() -> None:
    text = (ROOT / "docs" / "attacks.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 25
    for row in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert named, row
        for file, name in named:
            tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
            functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in functions, f"{file} has no {name}"
