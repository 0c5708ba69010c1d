"""Layers read once, from a stream: the same entries and the same refusals as from a file, and no byte unhashed."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sparkinfer_containers.errors import DigestProblem
from sparkinfer_containers.oci import stream
from sparkinfer_containers.oci.layers import check_layers, check_streams
from sparkinfer_containers.oci.model import LAYER, Descriptor
from sparkinfer_containers.verify.image import check_image

from .test_layers import BAD, bad_layer, header

PIECES = (1, 511, 512, 700, 4096, 1 << 20)


def cut(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


def many_entries(path: Path, form: int) -> None:
    """A layer with what occurs: long names and link targets, empty files, sizes around a block's, folders, links."""
    dice = random.Random(form)
    with tarfile.open(path, "w", format=form) as tar:
        for number in range(60):
            name = f"folder/{'long' * dice.choice([1, 40])}-{number}"
            info = tarfile.TarInfo(name)
            info.type = dice.choice([tarfile.REGTYPE] * 4 + [tarfile.SYMTYPE, tarfile.DIRTYPE])
            if info.issym():
                info.linkname = "x" * dice.choice([5, 150])
            info.size = dice.choice([0, 1, 511, 512, 513, 9000]) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(dice.randbytes(info.size)))


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("size", PIECES)
def test_stream_has_the_entries_of_the_file(tmp_path: Path, form: int, size: int) -> None:
    path = tmp_path / "x.tar"
    many_entries(path, form)
    assert check_layers([("x", path)]) == 60
    assert check_streams([("x", cut(path.read_bytes(), size))]) == 60


@pytest.mark.parametrize("size", PIECES)
@pytest.mark.parametrize("name", BAD)
def test_stream_refuses_a_dangerous_entry(tmp_path: Path, name: str, size: int) -> None:
    bad_layer(tmp_path / "x.tar", BAD[name])
    with pytest.raises(DigestProblem) as of_file:
        check_layers([("x", tmp_path / "x.tar")])
    with pytest.raises(DigestProblem) as of_stream:
        check_streams([("x", cut((tmp_path / "x.tar").read_bytes(), size))])
    assert str(of_stream.value) == str(of_file.value)


@pytest.mark.parametrize("size", PIECES)
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (header("ok") + b"\1" * 512 + header("../evil") + bytes(1024), "malformed entry"),
        (header("ok") + bytes(1024) + header("../evil") + bytes(1024), "bytes after the last one"),
        (header("ok") + bytes(70000) + b"x", "bytes after the last one"),
        (header("ok"), "cut short"),
        (header("ok")[:300], "not a plain tar layer"),
        (b"", "not a plain tar layer"),
    ],
)
def test_stream_is_read_to_its_last_byte(size: int, data: bytes, said: str) -> None:
    with pytest.raises(DigestProblem, match=said):
        check_streams([("x", cut(data, size))])


def test_links_are_remembered_across_streams(tmp_path: Path) -> None:
    bad_layer(tmp_path / "1.tar", [("link", tarfile.SYMTYPE, "/etc")])
    bad_layer(tmp_path / "2.tar", [("link/passwd", tarfile.REGTYPE, "")])
    both = [(name, stream.file_pieces(tmp_path / f"{name}.tar")) for name in ("1", "2")]
    with pytest.raises(DigestProblem, match="through the symbolic link"):
        check_streams(both)


def refuse(count: int, digest: str) -> DigestProblem:
    return DigestProblem(f"served {count} bytes of {digest}")


@pytest.mark.parametrize("size", [3, 1 << 10, 1 << 20])
def test_checked_pieces_are_those_that_were_announced(size: int) -> None:
    data = random.Random(1).randbytes(5000)
    wanted = Descriptor(LAYER, "sha256:" + hashlib.sha256(data).hexdigest(), len(data))
    assert b"".join(stream.checked(stream.gathered(cut(data, size)), wanted, refuse)) == data
    with pytest.raises(DigestProblem, match="served 4999 bytes"):
        list(stream.checked(cut(data[:-1], size), wanted, refuse))
    with pytest.raises(DigestProblem, match="served 5000 bytes"):
        list(stream.checked(cut(data[:-1] + b"\0", size), wanted, refuse))
    with pytest.raises(DigestProblem, match="more than the 5000 bytes"):
        list(stream.checked(cut(data + b"x", size), wanted, refuse))


def test_wrong_digest_is_said_before_a_wrong_entry(tmp_path: Path) -> None:
    """Bytes that are not the announced ones say nothing about the image: the digest is what is wrong."""
    bad_layer(tmp_path / "x.tar", BAD["parent path"])
    wanted = Descriptor(LAYER, "sha256:" + "0" * 64, (tmp_path / "x.tar").stat().st_size)
    with pytest.raises(DigestProblem, match="served"):
        check_streams([("x", stream.checked(stream.file_pieces(tmp_path / "x.tar"), wanted, refuse))])


def test_verification_of_a_registry_keeps_no_layer(attested, registry_host: str) -> None:  # type: ignore[no-untyped-def]
    from sparkinfer_containers.oci.registry import Reference, Registry
    from sparkinfer_containers.ship import push

    digest = push(attested.layout, Reference.parse(f"{registry_host}/toy:1"))
    with Registry(Reference.parse(f"{registry_host}/toy@{digest}")) as registry:
        layers, entries = check_image(registry, digest)
        held = sum(path.stat().st_size for path in Path(registry._scratch.name).iterdir())
    assert (layers, entries) == check_image(attested.layout, digest)
    assert layers == 2
    assert held < 4096  # the config alone
