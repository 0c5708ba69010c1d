"""Layers: deterministic writing, and every entry that could reach outside the root refused."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sparkinfer_containers.errors import DigestProblem
from sparkinfer_containers.oci.layers import check_layers, unpack, write_layer
from sparkinfer_containers.oci.layout import Layout
from sparkinfer_containers.oci.model import CONFIG, LAYER, MANIFEST, canonical

from sparkinfer.identity import file_sha256


def tree(root: Path) -> None:
    (root / "b" / "c").mkdir(parents=True)
    (root / "b" / "c" / "run.sh").write_text("#!/bin/sh\n")
    (root / "b" / "c" / "run.sh").chmod(0o700)
    (root / "a").write_text("text")
    (root / "link").symlink_to("b/c/run.sh")


def test_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    digests = set()
    for number, umask in enumerate((0o022, 0o077)):
        before = os.umask(umask)
        try:
            tree(tmp_path / str(number))
        finally:
            os.umask(before)
        os.utime(tmp_path / str(number) / "a", (number, time.time()))
        write_layer(tmp_path / f"{number}.tar", tmp_path / str(number), "opt/x", 1_700_000_000)
        digests.add(file_sha256(tmp_path / f"{number}.tar"))
    assert len(digests) == 1


def test_entries_have_normal_owners_and_modes(tmp_path: Path) -> None:
    tree(tmp_path / "tree")
    write_layer(tmp_path / "x.tar", tmp_path / "tree", "opt/x", 7)
    with tarfile.open(tmp_path / "x.tar") as tar:
        found = {entry.name: entry for entry in tar}
    assert list(found) == ["opt", "opt/x", "opt/x/a", "opt/x/b", "opt/x/b/c", "opt/x/b/c/run.sh", "opt/x/link"]
    assert {(entry.uid, entry.gid, entry.mtime) for entry in found.values()} == {(0, 0, 7)}
    assert found["opt/x/b/c/run.sh"].mode == 0o755
    assert found["opt/x/a"].mode == 0o644


def test_unpack_gives_back_the_files(tmp_path: Path) -> None:
    tree(tmp_path / "tree")
    write_layer(tmp_path / "x.tar", tmp_path / "tree", "opt/x", 7)
    unpack([("x", tmp_path / "x.tar")], tmp_path / "root")
    assert (tmp_path / "root/opt/x/link").read_text() == "#!/bin/sh\n"
    assert os.access(tmp_path / "root/opt/x/b/c/run.sh", os.X_OK)


def test_special_files_are_not_packed(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    os.mkfifo(tmp_path / "tree" / "fifo")
    with pytest.raises(DigestProblem, match="fifo"):
        write_layer(tmp_path / "x.tar", tmp_path / "tree", "x", 0)


Entry = tuple[str, bytes, str]
"""Name, tar type, link target."""

BAD = {
    "parent path": [("../etc/passwd", tarfile.REGTYPE, "")],
    "parent inside": [("a/../../b", tarfile.REGTYPE, "")],
    "absolute path": [("/etc/passwd", tarfile.REGTYPE, "")],
    "link climbs out": [("a/link", tarfile.SYMTYPE, "../../outside")],
    "absolute link climbs out": [("link", tarfile.SYMTYPE, "/../../outside")],
    "through a link": [("link", tarfile.SYMTYPE, "/etc"), ("link/passwd", tarfile.REGTYPE, "")],
    "through a link, dotted": [("link", tarfile.SYMTYPE, "etc"), ("x/../link/passwd", tarfile.REGTYPE, "")],
    "folder over a link": [("link", tarfile.SYMTYPE, "/etc"), ("link", tarfile.DIRTYPE, "")],
    "hard link outside": [("hard", tarfile.LNKTYPE, "../../etc/shadow")],
    "hard link absolute": [("hard", tarfile.LNKTYPE, "/etc/shadow")],
    "hard link to a link": [("link", tarfile.SYMTYPE, "etc"), ("hard", tarfile.LNKTYPE, "link")],
    "hard link to nothing": [("hard", tarfile.LNKTYPE, "missing")],
    "device": [("dev/sda", tarfile.BLKTYPE, "")],
    "character device": [("dev/mem", tarfile.CHRTYPE, "")],
    "fifo": [("fifo", tarfile.FIFOTYPE, "")],
    "file over a folder": [("d", tarfile.DIRTYPE, ""), ("d/x", tarfile.REGTYPE, ""), ("d", tarfile.REGTYPE, "")],
    "link over an implied folder": [("d/x", tarfile.REGTYPE, ""), ("d", tarfile.SYMTYPE, "e")],
    "folder over a file": [("d", tarfile.REGTYPE, ""), ("d", tarfile.DIRTYPE, "")],
    "below a file": [("d", tarfile.REGTYPE, ""), ("d/x", tarfile.REGTYPE, "")],
    "hard link to itself": [("f", tarfile.REGTYPE, ""), ("f", tarfile.LNKTYPE, "f")],
    "whiteout": [("etc/.wh.passwd", tarfile.REGTYPE, "")],
}


def bad_layer(path: Path, entries: list[Entry]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, kind, target in entries:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info, io.BytesIO())


@pytest.mark.parametrize("name", BAD)
def test_dangerous_entry_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    bad_layer(tmp_path / "x.tar", BAD[name])
    with pytest.raises(DigestProblem):
        check_layers([("x", tmp_path / "x.tar")])
    with pytest.raises(DigestProblem):
        unpack([("x", tmp_path / "x.tar")], tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_link_of_one_layer_catches_an_entry_of_the_next(tmp_path: Path) -> None:
    bad_layer(tmp_path / "1.tar", [("link", tarfile.SYMTYPE, "/etc")])
    bad_layer(tmp_path / "2.tar", [("link/passwd", tarfile.REGTYPE, "")])
    with pytest.raises(DigestProblem, match="through the symbolic link"):
        check_layers([("1", tmp_path / "1.tar"), ("2", tmp_path / "2.tar")])


@pytest.mark.parametrize("name", ["parent path", "through a link", "hard link outside"])
def test_signed_image_with_a_dangerous_layer_is_refused(
    tmp_path: Path, name: str, attested: Any, signer: Callable[..., str], about: Callable[[str], Any]
) -> None:
    """Signed correctly by the right signer, and still refused."""
    layout = Layout.create(tmp_path / "bad")
    bad_layer(tmp_path / "x.tar", BAD[name])
    layer = layout.add_file(LAYER, tmp_path / "x.tar")
    config = layout.add(CONFIG, canonical({"rootfs": {"type": "layers", "diff_ids": [layer.digest]}}))
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config.to_json(), "layers": [layer.to_json()]}
    layout.tag(layout.add(MANIFEST, canonical(manifest)), "bad:1")
    attested.layout, attested.image = layout, layout.image()
    attested.replace_bundles([signer(item) for item in about(attested.image.digest)])
    code, outcome = attested.verify()
    assert code == 4
    assert layer.digest in outcome["problems"][0]["text"]


def test_diff_ids_must_be_the_layers(
    tmp_path: Path, attested: Any, signer: Callable[..., str], about: Callable[[str], Any]
) -> None:
    layout, manifest = attested.layout, json.loads(attested.layout.manifest(attested.image.digest))
    config = json.loads(layout.blob_path(manifest["config"]["digest"]).read_bytes())
    config["rootfs"]["diff_ids"].reverse()
    manifest["config"] = layout.add(CONFIG, canonical(config)).to_json()
    index = json.loads((layout.path / "index.json").read_text())
    index["manifests"] = []
    (layout.path / "index.json").write_text(json.dumps(index))
    attested.image = layout.tag(layout.add(MANIFEST, canonical(manifest)), "toy:1")
    attested.replace_bundles([signer(item) for item in about(attested.image.digest)])
    code, outcome = attested.verify()
    assert code == 4
    assert "diff_ids" in outcome["problems"][0]["text"]


def header(name: str) -> bytes:
    """The header block of an empty file."""
    return tarfile.TarInfo(name).tobuf()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (header("ok") + b"\1" * 512 + header("../evil") + bytes(1024), "malformed entry"),
        (header("ok") + bytes(1024) + header("../evil") + bytes(1024), "bytes after the last one"),
        (header("ok") + bytes(10240) + b"x", "bytes after the last one"),
        (header("ok"), "cut short"),
        (header("ok")[:300], "not a plain tar layer"),
    ],
)
def test_layer_is_read_to_its_last_byte(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(DigestProblem, match=said):
        check_layers([("x", tmp_path / "x.tar")])


def test_layer_cut_short_inside_a_file(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        info = tarfile.TarInfo("big")
        info.size = 5000
        tar.addfile(info, io.BytesIO(bytes(5000)))
    whole = (tmp_path / "x.tar").read_bytes()
    for size in (700, 2048, 4096, 5632):
        (tmp_path / "x.tar").write_bytes(whole[:size])
        with pytest.raises(DigestProblem):
            check_layers([("x", tmp_path / "x.tar")])


@pytest.mark.parametrize("command", ["unpack", "pull"])
def test_folder_with_other_files_is_left_alone(
    attested: Any, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from sparkinfer_containers import cli

    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    # For `pull` a registry that does not answer: the folder is refused before anything is fetched.
    source = str(attested.layout.path) if command == "unpack" else f"127.0.0.1:9/x@{attested.image.digest}"
    assert cli.main([command, source, str(folder)]) == 2
    assert "nothing in it was touched" in capsys.readouterr().err
    (folder / "digest").write_text(attested.image.digest.replace("a", "b"))
    assert cli.main([command, source, str(folder)]) == 2
    assert (folder / "thesis.txt").read_text() == "years of work"
    assert [path.name for path in tmp_path.glob(".home*")] == []


def test_unpacked_image_makes_way_for_another(attested: Any, toy: Callable[..., Layout], tmp_path: Path) -> None:
    from sparkinfer_containers import cli

    other = toy(tmp_path / "other", text="other\n")
    (tmp_path / "new").mkdir()
    assert cli.main(["unpack", str(attested.layout.path), str(tmp_path / "new")]) == 0
    assert cli.main(["unpack", str(other.path), str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "digest").read_text() == other.image().digest
    assert (tmp_path / "new" / "root" / "srv" / "text").read_text() == "other\n"


def test_working_folder_of_ship_is_not_a_users_folder(tmp_path: Path) -> None:
    from sparkinfer_containers.errors import UsageProblem
    from sparkinfer_containers.image.folders import working

    folder = tmp_path / "work"
    working(folder)
    (folder / "registry").mkdir()
    working(folder)
    assert not (folder / "registry").exists()
    (folder / "notes").write_text("x")
    with pytest.raises(UsageProblem, match="nothing in it was touched"):
        working(folder)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "registry").mkdir()
    with pytest.raises(UsageProblem):
        working(tmp_path / "plain")
    assert (folder / "notes").exists()
    assert (tmp_path / "plain" / "registry").exists()
