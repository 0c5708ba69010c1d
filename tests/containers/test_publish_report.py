"""A measuring host's report signed anew and attached when a release is published, and what is refused then."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sparkinfer_containers import attest
from sparkinfer_containers.trust import credentials

from .report_parts import IMAGE, SOURCE, raw_run_class, render, texts


@pytest.fixture
def release(attested: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: Path) -> Callable[..., Path]:
    """Writes what `attest` works on: an image folder and a checkout with a report (`image`, signed by its host)."""

    def write(measured: str | None = None, signed_by_host: bool = True, raw: bool = True) -> Path:
        digest = measured or attested.image.digest
        container = {"reference": "example.invalid/toy:1", "digest": digest, "measured": True}
        run = raw_run_class()(tmp_path, container=container)
        info = run.info
        for engine in info["engines"]:
            if engine["name"] == "sparkinfer":
                engine["digest"] = digest
        run.write()
        (run.folder / "run.json").write_text(json.dumps(info))
        for path in run.folder.glob("b*/sparkinfer/*/*/r*/result.json"):
            path.write_text(json.dumps({**json.loads(path.read_text()), "engine_digest": digest}))
        (tmp_path / "checkout" / "reports").mkdir(parents=True)
        folder = render(run.folder, tmp_path / "checkout" / "reports" / "run")
        if signed_by_host:
            with credentials("private", state=state) as held:
                attest.sign_report(folder, attest.evaluation(folder, run.folder if raw else None), held)
        image = tmp_path / "image"
        image.mkdir()
        attested.layout.path.rename(image / "layout")
        provenance, sbom = (item["predicate"] for item in about_toy)
        (image / "provenance.json").write_text(json.dumps(provenance))
        (image / "sbom.json").write_text(json.dumps(sbom))
        record = {"variant": "cpu", "name": "sparkinfer-qwen38", "reference": "example.invalid/toy:1"}
        record |= {"digest": attested.image.digest, "source_digest": SOURCE}
        (image / "image.json").write_text(json.dumps(record))
        return folder

    from .conftest import toy_statements

    about_toy = toy_statements(attested.image.digest)
    monkeypatch.setenv("ATTEST_STATE", str(state))
    return write


def attest_command(tmp_path: Path, folder: Path, *options: str) -> int:
    from sparkinfer_containers import cli

    return cli.main(["attest", str(tmp_path / "image"), "--report", str(folder), *options])


def test_publishing_signs_a_hosts_report_anew(release: Any, tmp_path: Path, check: Any) -> None:
    """As the workflow calls it. It has no raw results: their digests are those that the measuring host signed."""
    folder = release()
    bundle = folder / "bundles" / "evaluation.sigstore.json"
    host = bundle.read_bytes()
    first = attest._statement(bundle)["predicate"]
    for _ in range(2):  # a second signing still takes what the host signed
        assert attest_command(tmp_path, folder, "--resign") == 0
        again = attest._statement(bundle)["predicate"]
        assert again == first
        assert again["raw_records"]
        assert again["prompts"]
        assert (folder / "bundles" / "host" / bundle.name).read_bytes() == host
        assert bundle.read_bytes() != host
    code, outcome = check(folder)
    assert code == 0, texts(outcome)
    code, outcome = check(tmp_path / "image" / "layout", "--require-evaluation", first["run"])
    assert code == 0, texts(outcome)


def test_failed_signing_touches_nothing(
    release: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = release()

    def everything() -> dict[str, bytes]:
        roots = (folder, tmp_path / "image")
        return {str(path): path.read_bytes() for root in roots for path in root.rglob("*") if path.is_file()}

    before = everything()
    for name in ("GITHUB_ACTIONS", "ACTIONS_ID_TOKEN_REQUEST_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert attest_command(tmp_path, folder, "--resign", "--trust", "public") == 3
    assert everything() == before


@pytest.mark.parametrize(
    ("options", "change", "code", "said"),
    [
        ({"signed_by_host": False}, "", 2, "signs its report first"),
        ({"raw": False}, "", 2, "no digests of raw records"),
        ({}, "edit", 2, "is not what its host signed"),
        ({}, "forge", 3, "no known root vouches"),
        ({"measured": "sha256:" + "e" * 64}, "", 2, "says nothing about this image"),
    ],
)
def test_report_that_is_not_signed_anew(
    release: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: Any, change: str, code: int, said: str
) -> None:
    folder = release(**options)
    bundle = folder / "bundles" / "evaluation.sigstore.json"
    if change == "edit":
        (folder / "CHANGELOG.md").write_text("better\n")
    elif change == "forge":
        data = json.loads(bundle.read_text())
        data["dsseEnvelope"]["payload"] = data["dsseEnvelope"]["payload"].replace("e", "f", 1)
        bundle.write_text(json.dumps(data))
    assert attest_command(tmp_path, folder, "--resign") == code
    assert said in capsys.readouterr().err
    assert not (folder / "bundles" / "host").exists()


def test_report_of_another_image_is_not_what_a_release_publishes(tmp_path: Path) -> None:
    from sparkinfer_containers.errors import UsageProblem

    def report(name: str, digest: str, measured: bool) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        engines = [{"name": "sparkinfer", "digest": digest}]
        container = {"digest": digest, "measured": measured}
        (folder / "report.json").write_text(json.dumps({"version": "1", "engines": engines, "container": container}))
        return folder

    report("cpu", "sha256:" + "c" * 64, True)
    with pytest.raises(UsageProblem, match="cpu measured the image sha256:cc"):
        attest.find_report(tmp_path, "1", IMAGE)
    source = report("source", SOURCE, False)
    with pytest.raises(UsageProblem, match="source measured the source tree"):
        attest.find_report(tmp_path, "1", IMAGE)
    assert attest.find_report(tmp_path, "1", IMAGE, SOURCE) == source
    with pytest.raises(UsageProblem):
        attest.find_report(tmp_path, "1", IMAGE, "sha256:" + "b" * 64)
    wanted = report("image", IMAGE, True)
    assert attest.find_report(tmp_path, "1", IMAGE) == wanted
    assert attest.find_report(tmp_path, "1", IMAGE, SOURCE) == wanted
    report("twice", IMAGE, True)
    with pytest.raises(UsageProblem, match="image, twice"):
        attest.find_report(tmp_path, "1", IMAGE)
