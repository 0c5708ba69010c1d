"""`python -m sparkinfer_containers` with what it cannot use: one line, the documented code, and nothing done before."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sparkinfer_containers import attest, cli, inputs
from sparkinfer_containers.errors import DigestProblem, UsageProblem
from sparkinfer_containers.image import build, rebuild
from sparkinfer_containers.image.run import unpack_image
from sparkinfer_containers.image.start import require_image
from sparkinfer_containers.oci.layout import Layout
from sparkinfer_containers.oci.model import MANIFEST, canonical
from sparkinfer_containers.oci.registry import Reference, Registry
from sparkinfer_containers.private.state import StateFolder

from sparkinfer.errors import ConfigError


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plain `file`, an `empty` folder and one whose image.json is `junk`; building is an error."""
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "image.json").write_text("[]")
    (tmp_path / "object").write_text("{}")

    def begun(*_: Any, **__: Any) -> None:
        raise AssertionError("the work began")

    for module, name in ((build, "build"), (rebuild, "rebuild"), (cli.figures, "measure")):
        monkeypatch.setattr(module, name, begun)
    for name in ("XDG_STATE_HOME", "ATTEST_STATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("run --env NOEQ empty", 2, "--env NOEQ: give NAME=VALUE"),
        ("run --env =x empty", 2, "--env =x: give NAME=VALUE"),
        ("run empty", 4, "empty holds no image"),
        ("run file", 4, "file holds no image"),
        ("serve --unpacked empty empty", 4, "empty holds no image"),
        ("ship none --model empty --work w --record r.json", 2, "none/image.json: No such file"),
        ("ship empty --model empty --work w --record r.json", 2, "empty/image.json: No such file"),
        ("ship junk --model empty --work w --record r.json", 2, "junk/image.json is no JSON object"),
        ("ship junk --model none --work w --record r.json", 2, "--model none is no folder"),
        ("ship junk --model empty --work w --record file/r.json", 2, "file is a file, not a folder"),
        ("ship junk --model empty --work w --record empty", 2, "--record empty is a folder"),
        ("registry file", 2, "registry storage file"),
        ("registry file/x", 2, "registry storage file/x"),
        ("instance --state file", 2, "file cannot be the state folder"),
        ("build --output file/x", 2, "--output: the folder file"),
        ("build --output /proc/x", 2, "--output: the folder /proc"),
        ("build --output b --scratch file", 2, "--scratch file"),
        ("build --output b --deb-cache file", 2, "--deb-cache file"),
        ("build --output b --wheel-cache file/x", 2, "--wheel-cache file/x"),
        ("relock --deb-cache file", 2, "--deb-cache file"),
        ("rebuild-check junk", 2, "junk/layout is not an OCI layout"),
        ("attest junk", 2, "junk/layout is not an OCI layout"),
        ("sign-report empty", 2, "empty is not a complete report"),
        ("sign-report empty --raw none", 2, "--raw none is no folder"),
        ("pull 127.0.0.1:1/x:1 file", 2, "file exists and is no folder"),
        ("pull 127.0.0.1:1/x:1 file/x", 2, "output: the folder"),
        ("trust-config empty", 2, "empty is not a regular file"),
        ("trust-config junk/image.json", 2, "junk/image.json is not a sigstore trusted_root.json"),
        ("trust-config object", 2, "object is not a sigstore trusted_root.json"),
        ("figures --scratch file --output o", 2, "--scratch file"),
        ("figures --scratch s --output file", 2, "--output file"),
        ("figures --scratch s --output o --model none", 2, "--model none is no folder"),
    ],
)
def test_argument_that_cannot_be_used(place: Path, command: str, code: int, said: str, capsys: Any) -> None:
    assert cli.main(command.split()) == code
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert said in shown.err
    assert (shown.err.count("\n"), shown.out) == (1, "")


@pytest.mark.parametrize("port", ["65536", "-1", "x"])
def test_port_out_of_range(place: Path, port: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["instance", f"--port={port}", "--state", "state"])
    assert ended.value.code == 2
    assert "--port" in capsys.readouterr().err
    assert not (place / "state").exists()


def test_file_that_turns_out_unreadable_is_the_machine_s_fault(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(_: Path) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(cli, "trust_root", fail)
    assert cli.main(["trust-config", "file"]) == 3
    assert capsys.readouterr().err == "error: somewhere cannot be read or written: No space left on device\n"


def _image(place: Path, toy: Callable[..., Layout]) -> tuple[Path, Layout]:
    folder = place / "image"
    folder.mkdir()
    layout = toy(folder / "layout")
    fields = dict.fromkeys(("commit", "variant", "name", "source_digest"), "x")
    record = {**fields, "variant": "cpu", "name": "sparkinfer-qwen38", "reference": "h/n:1", "unpacked_bytes": 1}
    (folder / "image.json").write_text(json.dumps({**record, "digest": layout.image().digest}))
    return folder, layout


def test_ship_asks_for_its_trust_root_and_record_first(place: Path, toy: Any, capsys: Any, monkeypatch: Any) -> None:
    _image(place, toy)
    (place / "w").mkdir()
    (place / "w" / "mine").write_text("")
    command = ["ship", "image", "--model", "empty", "--work", "w", "--record", "r.json", "--trusted-root"]
    assert cli.main([*command, "file"]) == 2
    assert "file is not a sigstore trusted_root.json" in capsys.readouterr().err
    assert (place / "w" / "mine").exists()


@pytest.mark.parametrize("layout", [None, ()])
def test_ship_without_a_layout(place: Path, toy: Any, layout: Any, capsys: Any) -> None:
    folder, _ = _image(place, toy)
    shutil.rmtree(folder / "layout")
    if layout is not None:
        (folder / "layout").mkdir()
    assert cli.main(["ship", "image", "--model", "empty", "--work", "w", "--record", "r.json"]) == 2
    assert "image/layout is not an OCI layout" in capsys.readouterr().err
    assert not (place / "w").exists()


@pytest.mark.parametrize("change", [{"unpacked_bytes": None}, {"reference": "h/n"}])
def test_ship_asks_first_for_what_it_records_last(place: Path, toy: Any, change: Any, capsys: Any) -> None:
    folder, _ = _image(place, toy)
    path = folder / "image.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert cli.main(["ship", "image", "--model", "empty", "--work", "w", "--record", "r.json"]) == 2
    assert "image.json lacks a tag or unpacked_bytes" in capsys.readouterr().err
    assert not (place / "w").exists()


def test_revision_is_sought_before_anything_is_fetched(place: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(place)

    def begun(*_: Any, **__: Any) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr(build.debs, "fetch", begun)
    monkeypatch.setattr(build.wheels, "fetch", begun)
    command = ["build", "--output", "b", "--deb-cache", "d", "--wheel-cache", "e", "--revision", "none"]
    assert cli.main(command) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: --revision none is no commit of ")
    assert shown.count("\n") == 1


@pytest.mark.parametrize("trace", ["none/steps.jsonl", "file/steps.jsonl", "empty"])
def test_step_trace_of_serve_that_cannot_be_written(place: Path, monkeypatch: Any, trace: str, capsys: Any) -> None:
    def begun(*_: Any, **__: Any) -> None:
        raise AssertionError("the container began")

    monkeypatch.setattr(cli, "start", begun)
    monkeypatch.setenv("SPARKINFER_STEP_TRACE", trace)
    _unpacked(place / "unpacked")
    assert cli.main(["serve", "--unpacked", "unpacked", "empty", "--port", "1"]) == 2
    assert f"SPARKINFER_STEP_TRACE: {trace}" in capsys.readouterr().err


def test_rebuild_check_asks_for_its_record_first(place: Path, toy: Any, capsys: Any) -> None:
    _image(place, toy)
    assert cli.main(["rebuild-check", "image", "--record", "file/r"]) == 2
    assert "file is a file, not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "", "{}", "[]", "\udcff", '{"runDetails": 5}', "[" * 100_000])
def test_attest_with_a_damaged_provenance(place: Path, toy: Any, content: str | None, capsys: Any) -> None:
    folder, _ = _image(place, toy)
    if content is not None:
        (folder / "provenance.json").write_bytes(content.encode(errors="surrogateescape"))
    assert cli.main(["attest", "image", "--builder", "x"]) == 2
    assert "provenance.json" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": 5}', "\udcff"])
def test_image_record_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "image.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UsageProblem, match="a folder that `build` made"):
        inputs.image_record(tmp_path, "name")


def _unpacked(folder: Path) -> Path:
    (folder / "root").mkdir(parents=True)
    (folder / "digest").write_text("sha256:" + "0" * 64)
    config = {"config": {"Entrypoint": ["x"], "User": "1:1", "Env": [], "WorkingDir": "/"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("digest", b"\xff"),
        ("digest", b""),
        ("digest", b"sha256:short"),
        ("config.json", None),
        ("config.json", b"[]"),
        ("config.json", b'{"config": 5}'),
        ("config.json", b'{"config": {"Entrypoint": ["x"], "User": "1:1", "Env": []}}'),
        ("container.json", b"{"),
        ("container.json", b'{"device": "cpu"}'),
        ("config.json", b"\xff"),
        ("root", None),
    ],
)
def test_damaged_unpacked_image(tmp_path: Path, name: str, content: bytes | None) -> None:
    folder = _unpacked(tmp_path / "image")
    assert require_image(folder) == "sha256:" + "0" * 64
    path = folder / name
    if content is not None:
        path.write_bytes(content)
    elif path.is_dir():
        path.rmdir()
    else:
        path.unlink()
    with pytest.raises(DigestProblem, match="holds no image"):
        require_image(folder)


def test_unpacking_that_lost_a_part_is_made_anew(tmp_path: Path, toy: Any) -> None:
    layout = toy(tmp_path / "layout")
    digest = layout.image().digest
    for lost in ("root", "config.json"):
        unpack_image(layout, digest, tmp_path / "out")
        path = tmp_path / "out" / lost
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        unpack_image(layout, digest, tmp_path / "out")
        assert (tmp_path / "out" / "root" / "srv" / "text").read_text() == "hello\n"
        assert (tmp_path / "out" / "config.json").is_file()


def test_damaged_key_of_the_private_instance(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "state")
    handle = os.open(tmp_path / "state" / "ct.key", os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(handle, b"junk")
    os.close(handle)
    with pytest.raises(ConfigError, match=r"ct\.key is not a private key"):
        state.key("ct", None)  # type: ignore[arg-type]  # it is not made


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"dsseEnvelope": {"payload": "e30="}}', '{"dsseEnvelope": 5}'])
def test_damaged_bundle_is_not_taken_for_a_signature(rendered: Path, tmp_path: Path, content: str) -> None:
    folder = Path(shutil.copytree(rendered, tmp_path / "report"))
    made = attest.evaluation(folder)
    attest.put_bundle(folder, made, content)
    with pytest.raises(UsageProblem, match=r"evaluation-source\.sigstore\.json"):
        attest.kept_bundle(folder, made)


@pytest.mark.parametrize("content", ["", "[]", "5", "\udcff", '{"version": "1"}', '{"version": "1", "engines": 5}'])
def test_damaged_report_is_not_published(tmp_path: Path, content: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.json").write_bytes(content.encode(errors="surrogateescape"))
    for step in (lambda: attest.evaluation(tmp_path / "run"), lambda: attest.find_report(tmp_path, "1", "sha256:0")):
        with pytest.raises(UsageProblem):
            step()
    with pytest.raises(UsageProblem):
        attest.host_evaluation(tmp_path / "run", [])


@pytest.mark.parametrize("content", ["[]", "{}", '{"model": "m", "cell": "c", "block": 1, "prompts_sha256": 5}'])
def test_damaged_result_is_not_signed(tmp_path: Path, content: str) -> None:
    path = tmp_path / "b1" / "e" / "m" / "c" / "r1" / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(UsageProblem, match=r"result\.json"):
        attest.prompt_digests(tmp_path)


@pytest.mark.parametrize("change", [{"layers": 5}, {"layers": [5]}, {"config": 5}])
def test_damaged_manifest_is_not_pushed(tmp_path: Path, toy: Any, change: dict[str, Any]) -> None:
    layout = toy(tmp_path / "layout")
    manifest = json.loads(layout.manifest(layout.image().digest))
    damaged = layout.add(MANIFEST, canonical({**manifest, **change}))
    with Registry(Reference.parse("127.0.0.1:1/x:1")) as registry, pytest.raises(DigestProblem):
        registry.push_image(layout, damaged)
