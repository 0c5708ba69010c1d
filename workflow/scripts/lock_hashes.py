"""Leave only the hashes in a lock that an installation can need: a sixth of the bytes, and nothing installs otherwise.

Kept are source archives and wheels for Linux (glibc, x86-64 and 64-bit Arm) and CPython 3.11 to 3.13, or for any; and
every hash that the index does not know. The environments are made on Linux with these interpreters only (`Makefile`).
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

INDEX = "https://pypi.org/simple"
MINORS = (11, 12, 13)
_PIN = re.compile(r"(?m)^([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?==([^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_PLATFORM = re.compile(r"(any|(many)?linux[0-9_]*_(x86_64|aarch64))")


def installable(filename: str) -> bool:
    """Whether pip could choose this file on Linux with a supported interpreter."""
    if not filename.endswith(".whl"):
        return True
    python, abi, platform = filename.removesuffix(".whl").split("-")[-3:]
    if not any(_PLATFORM.fullmatch(one) for one in platform.split(".")):
        return False
    abis = abi.split(".")
    # Free-threaded builds have an ABI of their own (cp313t).
    if all(one.startswith("cp") and one.endswith("t") for one in abis):
        return False
    for tag in python.split("."):
        if tag == "py3":
            return True
        found = re.fullmatch(r"(cp|py)3(\d+)", tag)
        if found is not None:
            minor, any_later = int(found[2]), found[1] == "py" or "abi3" in abis
            if minor in MINORS or (any_later and minor < MINORS[0]):
                return True
    return False


def index_files(name: str) -> dict[str, str]:
    """File names of a package by sha256, from PIP_INDEX_URL or PyPI; raises OSError or ValueError."""
    index = (os.environ.get("PIP_INDEX_URL") or INDEX).rstrip("/")
    address = f"{index}/{re.sub(r'[-_.]+', '-', name).lower()}/"
    request = urllib.request.Request(address, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        listed = json.load(answer)
    return {file["hashes"]["sha256"]: file["filename"] for file in listed["files"] if "sha256" in file["hashes"]}


def needed_only(lock: str, files_of: Callable[[str], dict[str, str]] = index_files) -> str:
    """The lock without hashes of files that no supported machine takes.

    A package of which no file fits (one for Windows alone) keeps what it has.

    Args:
        lock: text of a requirements file with hashes, as uv writes it.
        files_of: file names of a package by sha256.

    Raises:
        OSError: the index cannot be read.
        ValueError: the index answers with something else.
    """
    # Each package: its line, then its hashes.
    first, *rest = re.split(r"(?m)^(?=[A-Za-z0-9])", lock)
    names = [found[1] for found in map(_PIN.match, rest) if found is not None]
    with ThreadPoolExecutor(8) as pool:
        known = dict(zip(names, pool.map(files_of, names), strict=True))
    return first + "".join(map(partial(_shortened, known), rest))


def _shortened(known: Mapping[str, Mapping[str, str]], block: str) -> str:
    pin = _PIN.match(block)
    if pin is None:
        return block
    files = known[pin[1]]
    hashes = _HASH.findall(block)
    kept = [one for one in hashes if one not in files or installable(files[one])] or hashes
    head = block.split(" \\\n")[0].rstrip("\n")
    return " \\\n    ".join([head, *(f"--hash=sha256:{one}" for one in kept)]) + "\n"
