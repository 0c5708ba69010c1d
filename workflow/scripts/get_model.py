"""Bring a model into place: generate it, fetch it at a pinned commit, or take a local folder.

usage: get_model.py --source JSON --definition JSON --folder FOLDER --manifest FOLDER.json

The manifest names what the folder is (its definition) and its digest. Exit codes: 0 done, 2 bad input, 3 no network.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "eval")]

from sparkinfer_eval.lease.state import write_json  # noqa: E402

from sparkinfer.errors import ConfigError, EnvironmentProblem, SparkinferError  # noqa: E402
from sparkinfer.identity import model_digest  # noqa: E402


def generate(source: dict[str, Any], folder: Path) -> None:
    """Run the generator into `folder`."""
    command = [sys.executable, str(ROOT / "models" / "generate.py"), source["generate"], str(folder)]
    command += ["--seed", str(source.get("seed", 0))]
    for name, value in source.get("size", {}).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    print(done.stderr, end="", file=sys.stderr)
    if "No space left on device" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if done.returncode != 0:
        raise ConfigError("the model could not be generated: see the message above")


def fetch(source: dict[str, Any], folder: Path) -> None:
    """Download a hub repository at its pinned commit into `folder`. Raises EnvironmentProblem without a network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        snapshot_download(source["hub"], revision=source["revision"], local_dir=folder)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise EnvironmentProblem(
            f"{source['hub']} at {source['revision']} could not be fetched ({type(error).__name__}): check the id, the "
            "commit and the network, or place the files in a folder and name that as the model's source"
        ) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def place(source: dict[str, Any], definition: dict[str, Any], folder: Path) -> None:
    """Make `folder` hold the model; a local folder becomes a symbolic link."""
    if folder.is_symlink():
        folder.unlink()
    if "missing" in definition:
        raise ConfigError(
            f"the model folder {ROOT / definition['missing']} does not exist: put the checkpoint there, or set the "
            "model's source to a hub id with its commit, or to another folder (config/profiles/); then start again"
        )
    if "folder" in source:
        target = (ROOT / source["folder"]).resolve()
        if not (target / "config.json").is_file():
            raise ConfigError(f"{target} is not a model folder (no config.json): put the checkpoint there")
        shutil.rmtree(folder, ignore_errors=True)
        folder.symlink_to(target)
        return
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        generate(source, temporary) if "generate" in source else fetch(source, temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.replace(folder)
    finally:
        # The generator's own temporary folder too, which a full disk leaves behind.
        for leftover in folder.parent.glob(f".*{temporary.name}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)


def main(argv: list[str]) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="Bring a model into place.")
    parser.add_argument("--source", type=json.loads, required=True)
    parser.add_argument("--definition", type=json.loads, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--manifest", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        args.folder.parent.mkdir(parents=True, exist_ok=True)
        place(args.source, args.definition, args.folder)
        digest = model_digest(args.folder.resolve())
        if "digest" in args.definition and args.definition["digest"] != digest:
            raise ConfigError(f"{args.folder} has changed since the workflow started: start it again")
        write_json(args.manifest, {"definition": args.definition, "model_digest": digest, "source": args.source})
    except SparkinferError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print("error: the disk is full: free some space and start again; finished results are kept", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
