"""A release of the image, as far as a dry run shows it: built first, then measured, signed, shipped and verified."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from .conftest import ROOT, snakemake_command

DIGEST = "sha256:" + "ab" * 32


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of this repository with nothing uncommitted in it, as a user has it."""
    for program in ("bwrap", "docker-registry", "mmdebstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (make release installs it)")
    probe = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--unshare-user", "--unshare-pid", "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("bubblewrap cannot make a sandbox here")
    folder = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", f"file://{ROOT}", str(folder)], check=True)
    return folder


def dry_run(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}  # no GPU, whatever this machine has
    done = subprocess.run(
        snakemake_command("-n", *arguments), cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    return text


def rules(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"^(\w+)\s+(\d+)$", text, re.MULTILINE)}


def test_image_is_built_before_the_run_is_planned(clone: Path) -> None:
    text = dry_run(clone, "release")
    assert "engine of release: the image, which is built first" in text
    jobs = rules(text)
    assert jobs["container_image"] == 1
    assert "sweep" not in jobs

    record = re.search(r"results/images/cpu-[0-9a-f]{12}/image\.json", text)
    assert record is not None
    (clone / record[0]).parent.mkdir(parents=True)
    made = {"digest": DIGEST, "source_digest": DIGEST, "reference": "example.invalid/x:1"}
    (clone / record[0]).write_text(json.dumps(made))
    text = dry_run(clone, "release")
    assert f"engine of release: the image {DIGEST}" in text
    jobs = rules(text)
    assert jobs["sweep"] == 24
    wanted = ("container_attested", "report_signed", "release_shipped", "release_verified", "engine_source", "verdict")
    assert {name: jobs.get(name) for name in wanted} == dict.fromkeys(wanted, 1)
    assert f"results/engines/sparkinfer-{'ab' * 6}.json" in text


def test_source_is_measured_when_asked_for_or_in_a_smoke_run(clone: Path) -> None:
    text = dry_run(clone, "release", "--config", "engine_from=source")
    assert "not the shipped image (the setting engine_from is `source`)" in text
    jobs = rules(text)
    assert jobs["report_signed"] == 1
    assert not {"container_image", "release_shipped"} & jobs.keys()
    jobs = rules(dry_run(clone, "smoke"))
    assert jobs["report_signed"] == 1
    assert "container_image" not in jobs


def test_uncommitted_source_is_not_what_an_image_holds(clone: Path) -> None:
    (clone / "sparkinfer" / "errors.py").open("a").write("# changed\n")
    assert "sparkinfer/errors.py has changes that are not committed" in dry_run(clone, "release")
    done = subprocess.run(
        snakemake_command("-n", "release", "--config", "engine_from=image"),
        cwd=clone, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "engine_from is `image`, but sparkinfer/errors.py" in done.stdout + done.stderr
