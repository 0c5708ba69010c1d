"""Locks keep the hashes that an installation on Linux can need, and no others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
sys.path.insert(0, str(SCRIPTS))
from lock_hashes import installable, needed_only  # noqa: E402

sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        ("a-1.tar.gz", True),
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-py310-none-linux_x86_64.whl", True),
        ("a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("a-1-cp39-abi3-manylinux_2_28_aarch64.whl", True),
        ("a-1-cp310-cp310-manylinux_2_17_x86_64.whl", False),
        ("a-1-cp314-cp314-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp314-abi3-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp313-cp313t-manylinux_2_17_x86_64.whl", False),
        ("a-1-cp312-cp312-musllinux_1_2_x86_64.whl", False),
        ("a-1-cp311-cp311-manylinux_2_17_ppc64le.whl", False),
        ("a-1-cp312-cp312-win_amd64.whl", False),
        ("a-1-cp38-abi3-macosx_11_0_arm64.whl", False),
        ("a-1-pp310-pypy310_pp73-manylinux_2_28_x86_64.whl", False),
    ],
)
def test_installable(filename: str, expected: bool) -> None:
    assert installable(filename) == expected


def test_only_hashes_go() -> None:
    one, two, three = "1" * 64, "2" * 64, "3" * 64
    lock = (
        f"a-b[x]==1 ; python_full_version < '3.13' \\\n    --hash=sha256:{one} \\\n    --hash=sha256:{two}\n"
        f"pywin32==2 \\\n    --hash=sha256:{three}\n"
    )
    files = {one: "a_b-1-cp312-cp312-win_amd64.whl", two: "a_b-1.tar.gz", three: "pywin32-2-cp312-cp312-win_amd64.whl"}
    asked: list[str] = []

    def files_of(name: str) -> dict[str, str]:
        asked.append(name)
        return files

    shorter = needed_only(lock, files_of)
    assert shorter == (
        f"a-b[x]==1 ; python_full_version < '3.13' \\\n    --hash=sha256:{two}\n"
        f"pywin32==2 \\\n    --hash=sha256:{three}\n"
    )
    assert sorted(asked) == ["a-b", "pywin32"]
    # What the index does not know stays.
    assert needed_only(lock, lambda name: {}) == lock
