"""What is not what it should be (a pipe, a folder, junk, a name that no file can have): one line and the right code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sparkinfer_containers import attest, statements
from sparkinfer_containers.sign import sign
from sparkinfer_containers.trust import credentials
from sparkinfer_containers.verify import outcome as outcomes
from sparkinfer_containers.verify.cli import main

from .report_parts import texts

ROOT = Path(__file__).parents[2]


def make_odd(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("nowhere")


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_bundle_that_is_no_regular_file_is_refused_unread(signed: Path, check: Any, kind: str) -> None:
    make_odd(signed / "bundles" / "zz.sigstore.json", kind)
    code, outcome = check(signed)
    assert code == 3
    assert f"bundles/zz.sigstore.json is not a regular file but a {kind}" in texts(outcome)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_trusted_root_that_is_no_regular_file(signed: Path, kind: str, tmp_path: Path, capsys: Any) -> None:
    make_odd(tmp_path / "root", kind)
    assert main([str(signed), "--trusted-root", str(tmp_path / "root")]) == 2
    assert f"{tmp_path / 'root'} is not a" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["x" * 5000, "127.0.0.1:1/x@sha256:" + "0" * 5000])
def test_target_of_a_name_that_no_file_can_have(name: str, trusted_root: Path, capsys: Any) -> None:
    assert main([name, "--trusted-root", str(trusted_root)]) == 2
    assert "REFUSED" in capsys.readouterr().out


def test_report_without_provenance_and_sbom_says_so(
    signed: Path, check: Any, about: Callable[[str], list[dict[str, Any]]], state: Path
) -> None:
    """They are not among the files whose digests are signed: their absence is not a difference, but it is said."""
    code, outcome = check(signed)
    assert code == 0
    assert any("bundles/ holds no provenance and no sbom" in line for line in outcome["not_proved"])
    with credentials("private", state=state) as held:
        for item in about(attest.subject_digest(attest.evaluation(signed))):
            attest.put_bundle(signed, item, sign([item], held)[0])
    code, outcome = check(signed)
    assert code == 0, texts(outcome)
    assert not any("bundles/ holds" in line for line in outcome["not_proved"])
    assert {"provenance", "sbom"} <= outcome["signers"].keys()
    assert any(line.startswith("provenance: SLSA Build L1") for line in outcome["proved"])
    (signed / "bundles" / "sbom.sigstore.json").unlink()
    code, outcome = check(signed)
    assert code == 0
    assert any(line.endswith("bundles/ holds no sbom") for line in outcome["not_proved"])


def test_what_else_lies_in_bundles_is_named(signed: Path, check: Any) -> None:
    (signed / "bundles" / "host").mkdir()
    (signed / "bundles" / "host" / "evaluation.sigstore.json").write_text("junk")
    (signed / "bundles" / "notes.txt").write_text("junk")
    code, outcome = check(signed)
    assert code == 0
    said = "anything in what was not read: bundles/host/evaluation.sigstore.json, bundles/notes.txt"
    assert said in outcome["not_proved"]


def _verify(target: Path, trusted_root: Path, stdout: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sparkinfer_containers.verify.cli", str(target)]
    paths = [str(ROOT / name) for name in ("", "kernels", "eval", "containers", "models")]
    return subprocess.run(
        [*command, "--trusted-root", str(trusted_root)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


def test_verdict_stays_where_nobody_reads_it(signed: Path, trusted_root: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    made = _verify(signed, trusted_root, writer)
    assert (made.returncode, made.stderr) == (0, "")
    (signed / "report.json").write_text("{")
    made = _verify(signed, trusted_root, writer)
    os.close(writer)
    assert (made.returncode, made.stderr) == (4, "")


def test_verdict_that_cannot_be_printed_is_no_success(signed: Path, trusted_root: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    made = _verify(signed, trusted_root, full)
    os.close(full)
    assert made.returncode == 2
    assert made.stderr.count("\n") == 1
    assert "could not be printed" in made.stderr


def test_names_of_a_target_cannot_forge_lines(capsys: Any) -> None:
    made = outcomes.Outcome("x\nOK  y\x1b[2J\udcff")
    made.problem(4, "no\nOK  z")
    assert made.to_text().splitlines() == [
        r"REFUSED  x\nOK  y\x1b[2J\udcff",
        r"  - no\nOK  z",
        "Nothing about this target is proved.",
    ]


def _wrong(predicate: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    made = json.loads(json.dumps(predicate))
    *outer, last = path.split(".")
    held = made
    for part in outer:
        held = held[int(part) if isinstance(held, list) else part]
    held[last] = value
    return made


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        (0, "buildDefinition.resolvedDependencies.0.digest", ["x"]),
        (0, "buildDefinition.resolvedDependencies.0.digest", "x"),
        (0, "buildDefinition.externalParameters.variant", "\ud800"),
        (1, "components", 5),
        (1, "components", {"a": 1}),
        (1, "components", "x"),
    ],
)
def test_signed_predicate_of_wrong_form_is_refused(
    attested: Any, signer: Any, about: Any, kind: int, path: str, value: object
) -> None:
    made = about(attested.image.digest)
    made[kind]["predicate"] = _wrong(made[kind]["predicate"], path, value)
    attested.replace_bundles([signer(item) for item in made])
    code, outcome = attested.verify()
    assert code == 3, outcome["problems"]


@pytest.mark.parametrize("field", ["files", "raw_records"])
def test_signed_digest_that_is_no_text(signed: Path, check: Any, signer: Any, raw_results: Path, field: str) -> None:
    made = attest.evaluation(signed, raw_results)
    made["predicate"][field]["report.json"] = {"sha256": 1}
    path = signed / "bundles" / f"{statements.SHORT_NAMES[made['predicateType']]}.sigstore.json"
    path.write_text(signer(made))
    code, outcome = check(signed)
    assert code == 3
    assert f"a digest in {field} is not a text" in texts(outcome)
