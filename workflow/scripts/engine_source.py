"""Put an engine where its server runs from: an unpacked image, or a copy of the working tree's or a tag's packages.

usage: engine_source.py --digest sha256:... [--tag TAG | --image BUILT --device DEVICE] FOLDER

It is checked against the digest that the run is named after and appears by rename, so that an edit made while
the workflow runs cannot reach a server. Exit codes: 0 done, 2 the source is not what the digest says.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "eval"), str(ROOT / "containers")]

from sparkinfer_containers.image.build import LIBRARY, SOURCE_LABEL  # noqa: E402
from sparkinfer_containers.image.daemon import load  # noqa: E402
from sparkinfer_containers.image.run import unpack_image  # noqa: E402
from sparkinfer_containers.image.runtimes import uses_daemon  # noqa: E402
from sparkinfer_containers.oci.layout import Layout  # noqa: E402
from sparkinfer_eval.plan.identity import PACKAGE_ROOTS, source_tree_digest, unpack_tag  # noqa: E402

from sparkinfer.errors import ConfigError, SparkinferError  # noqa: E402
from sparkinfer.identity import package_files, tree_digest  # noqa: E402


def copy_source(root: Path, tag: str | None, folder: Path) -> None:
    """Copy the packages of the working tree, or of a tag, below `folder`."""
    if tag is not None:
        unpack_tag(root, tag, folder)
        return
    for package in PACKAGE_ROOTS.values():
        shutil.copytree(root / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))


def place(built: Path, digest: str, device: str, folder: Path) -> None:
    """Unpack the image for bubblewrap, or load it into the store of podman or docker."""
    if uses_daemon(device):
        shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps(load(Layout(built / "layout"), digest, device, folder)))
    else:
        unpack(built, digest, folder)


def unpack(built: Path, digest: str, folder: Path) -> None:
    """Unpack the image in `built` (made by the build) and check that its engine is the one that its label names."""
    config = unpack_image(Layout(built / "layout"), digest, folder)
    library = folder / "root" / LIBRARY
    files: dict[str, Path] = {}
    for package in PACKAGE_ROOTS:
        files |= package_files(package, library / package)
    found, said = tree_digest(files), config["config"]["Labels"].get(SOURCE_LABEL)
    if found != said:
        raise ConfigError(
            f"the engine in {digest} is {found}, but the image's label says {said}: build the image again"
        )
    print(json.dumps({"image": digest, "source_digest": found}))


def main(argv: list[str]) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="Copy an engine's source to where its server runs from.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--digest", required=True)
    parser.add_argument("--tag")
    parser.add_argument("--image", type=Path, metavar="BUILT")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--root", type=Path, default=ROOT)
    args = parser.parse_args(argv)
    temporary = args.folder.with_name(f".{args.folder.name}.{os.getpid()}.tmp")
    try:
        if args.image is not None:
            place(args.image, args.digest, args.device, args.folder)
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
