"""Symbol tables leave a shared library; what is loaded stays as it was."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from sparkinfer_containers.image.symbols import drop_symbols
from sparkinfer_containers.image.wheels import LeftOut, strip

SOURCE = """
static int twice(int x) { return 2 * x; }
__thread int counter = 3;
const char *text = "loaded";
int answer(int x) { return twice(x) + counter; }
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (apt-get install gcc)")
    (tmp_path / "x.c").write_text(SOURCE)
    made = tmp_path / "libx.so"
    subprocess.run([compiler, "-g", "-O1", "-shared", "-fPIC", "-o", made, tmp_path / "x.c"], check=True)
    return made


def loaded_bytes(path: Path) -> list[bytes]:
    """The content of every segment that a program header names."""
    data = path.read_bytes()
    start, count = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
    headers = [struct.unpack_from("<IIQQQQQQ", data, start + 56 * i) for i in range(count)]
    # The first segment holds the file header, whose pointer to the section table moves.
    return [data[max(header[2], 64) : header[2] + header[5]] for header in headers]


def test_library_is_smaller_and_works(library: Path) -> None:
    before, size = loaded_bytes(library), library.stat().st_size
    mode = library.stat().st_mode
    saved = drop_symbols(library)
    assert saved == size - library.stat().st_size > 1000
    assert library.stat().st_mode == mode
    assert loaded_bytes(library) == before
    assert b"twice" not in library.read_bytes()
    loaded = ctypes.CDLL(str(library))
    assert loaded.answer(20) == 43
    assert ctypes.c_char_p.in_dll(loaded, "text").value == b"loaded"
    first = library.read_bytes()
    assert drop_symbols(library) == 0
    assert library.read_bytes() == first


def test_same_as_the_tool(library: Path, tmp_path: Path) -> None:
    """Neither the dynamic symbols nor the sections that stay differ from what `strip --strip-unneeded` leaves."""
    if shutil.which("strip") is None or shutil.which("readelf") is None:
        pytest.skip("binutils are not installed")
    theirs = tmp_path / "theirs.so"
    subprocess.run(["strip", "--strip-unneeded", "-o", theirs, library], check=True)
    drop_symbols(library)

    def shown(path: Path, *options: str) -> str:
        return subprocess.run(["readelf", "-W", *options, path], capture_output=True, text=True, check=True).stdout

    def names(path: Path) -> list[str]:
        return [line.split("] ")[1].split()[0] for line in shown(path, "-S").splitlines() if "] ." in line]

    assert shown(library, "--dyn-syms", "-d", "-l") == shown(theirs, "--dyn-syms", "-d", "-l")
    assert names(library) == names(theirs)


def test_file_that_is_laid_out_otherwise_is_left_alone(library: Path, tmp_path: Path) -> None:
    data = bytearray(library.read_bytes())
    start = struct.unpack_from("<Q", data, 32)[0]
    struct.pack_into("<Q", data, start + 32, len(data))  # the first segment now reaches to the end of the file
    library.write_bytes(data)
    assert drop_symbols(library) == 0
    assert library.read_bytes() == data
    other = tmp_path / "script.so"
    other.write_text("INPUT(libx.so)\n")
    assert drop_symbols(other) == 0
    assert other.read_text() == "INPUT(libx.so)\n"


def test_cache_behind_a_hard_link_is_not_changed(library: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.so"
    kept.hardlink_to(library)
    before = kept.read_bytes()
    (gone,) = strip(tmp_path, ["libx.so", "absent/*.so"])
    assert gone == LeftOut("libx.so", "symbol and debug sections", 1, len(before) - library.stat().st_size)
    assert kept.read_bytes() == before
