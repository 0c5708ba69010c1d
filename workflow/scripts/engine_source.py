"""Put an engine's source where its server runs from: a copy of the working tree's packages, or of a release tag's.

usage: engine_source.py --digest sha256:... [--tag TAG] FOLDER

The copy is checked against the digest that the run is named after and appears by rename, so that an edit made while
the workflow runs cannot reach a server. Exit codes: 0 done, 2 the source is not what the digest says.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "eval")]

from sparkinfer_eval.plan.identity import PACKAGE_ROOTS, source_tree_digest, tag_archive  # noqa: E402

from sparkinfer.errors import ConfigError, SparkinferError  # noqa: E402


def copy_source(root: Path, tag: str | None, folder: Path) -> None:
    """Copy the packages of the working tree, or of a tag, below `folder`."""
    if tag is not None:
        with tarfile.open(fileobj=io.BytesIO(tag_archive(root, tag))) as archive:
            for member in archive.getmembers():
                data = archive.extractfile(member)
                if data is not None:
                    target = folder / member.name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(data.read())
        return
    for package in PACKAGE_ROOTS.values():
        shutil.copytree(root / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))


def check_image(digest: str, folder: Path) -> None:
    """The engine runs from an unpacked image: nothing is copied, the image must be the one that the run names."""
    unpacked = os.environ.get("ATTEST_UNPACKED_IMAGE", "")
    marker = Path(unpacked) / "digest"
    if not unpacked or not marker.is_file() or marker.read_text(encoding="ascii") != digest:
        raise ConfigError(
            f"SPARKINFER_IMAGE_DIGEST={digest}, but ATTEST_UNPACKED_IMAGE={unpacked!r} is not that image unpacked: "
            "take both from `python -m sparkinfer_containers unpack IMAGE FOLDER --exports`, or unset both"
        )
    folder.mkdir(parents=True, exist_ok=True)


def main(argv: list[str]) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="Copy an engine's source to where its server runs from.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--digest", required=True)
    parser.add_argument("--tag")
    parser.add_argument("--root", type=Path, default=ROOT)
    args = parser.parse_args(argv)
    temporary = args.folder.with_name(f".{args.folder.name}.{os.getpid()}.tmp")
    try:
        if args.digest == os.environ.get("SPARKINFER_IMAGE_DIGEST"):
            check_image(args.digest, args.folder)
            return 0
        shutil.rmtree(temporary, ignore_errors=True)
        copy_source(args.root, args.tag, temporary)
        found = source_tree_digest(temporary)
        if found != args.digest:
            raise ConfigError(
                f"the engine's source is {found}, but this run is named after {args.digest}: it has changed since the "
                "workflow started; start it again"
            )
        shutil.rmtree(args.folder, ignore_errors=True)
        temporary.replace(args.folder)
    except SparkinferError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
