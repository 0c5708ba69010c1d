"""A run of this host as one archive, and back into a checkout's `results/`, where the report rules read it."""

from __future__ import annotations

import json
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError
from sparkinfer_eval.cells import cell_from_definition
from sparkinfer_eval.host.cells import cells_of, run_folder, settings_of
from sparkinfer_eval.host.site import Host
from sparkinfer_eval.plan.identity import folder_digest, has_random_weights, project_version, source_tree_digest
from sparkinfer_eval.report.machine import source_facts
from sparkinfer_eval.report.run_info import collect as complete
from sparkinfer_eval.report.run_info import read_run_info, write_json

LARGE = ("profile_export_raw.jsonl.gz", "profile_export_console.txt", "profile_export_console.ansi")
"""Left out of the archive: every streamed chunk once more (times of all tokens are in records.jsonl)."""
NOTES = {
    "fast": "as exact, with recurrent states kept in bfloat16",
    "exact": "arithmetic as the checkpoint stores it, KV cache in its dtype, float32 recurrent states",
}
TITLES = {"sparkinfer": "sparkinfer", "vllm": "vLLM"}


def declare(host: Host, run: str, statement: str, overrides: Mapping[str, Any], checks: list[str]) -> dict[str, Any]:
    """`run.json` of a run, from what lies in its folder and this machine. Raises ConfigError when it holds nothing."""
    folder = run_folder(host, run)
    servers = [json.loads(path.read_text("utf-8")) for path in sorted((folder / "servers").glob("*.json"))]
    if not servers:
        raise ConfigError(f"{folder} holds no measured server: measure cells first")
    models = sorted({path.name for path in folder.glob("b*/*/*") if path.is_dir()})
    environments = {"engine": host.launcher("sparkinfer")}
    if any(server["engine"] == "vllm" for server in servers):
        environments["vllm"] = host.launcher("vllm")
    if host.aiperf.is_dir():
        environments["aiperf"] = host.launcher("aiperf")
    declared = {
        "run": run,
        "version": project_version(host.root),
        "profile": "h200",
        "scale": {"statement": statement, "full": False, "settings": settings_of(host, overrides)},
        "engines": list({server["engine"]: _engine(server) for server in servers}.values()),
        "models": [_model(host, name) for name in models],
        "cells": [cell.id for cell in cells_of(host, "all", overrides)],
        "checks": checks,
        "blocks": 1,
        "reps": 1,
        "commands": [],
        "container": {"measured": False, "reason": "measured from the source tree on a host that runs no containers"},
    }
    return complete(declared, environments, host.root)


def _engine(server: Mapping[str, Any]) -> dict[str, Any]:
    kind, _, column = server["engine"].partition("-")
    label = f"{TITLES[kind]} {server['version']}" + (f" ({column})" if column else "")
    note = {} if kind == "vllm" else {"note": NOTES[column or "exact"]}
    return {
        "name": server["engine"],
        "label": label,
        "version": server["version"],
        "digest": server["engine_digest"],
        "command": server["command"],
        **note,
    }


def _model(host: Host, name: str) -> dict[str, Any]:
    folder = host.model(name)
    return {
        "name": name,
        "label": name,
        "digest": folder_digest(folder, host.work / "digests"),
        "random_weights": has_random_weights(folder),
        "source": "models/random_checkpoint.py, seed 0" if has_random_weights(folder) else f"models/{name}",
    }


def pack(host: Host, run: str, out: Path, statement: str, overrides: Mapping[str, Any], checks: list[str]) -> Path:
    """Write `<out>/<run>.tar.xz` with all raw results, `run.json`, check outputs and logs; returns it."""
    folder = run_folder(host, run)
    info = declare(host, run, statement, overrides, checks)
    write_json(folder / "run.json", info)
    for check in checks:
        for model in info["models"]:
            path = host.work / "logs" / f"{check}-{model['name']}.json"
            if path.is_file():
                (folder / "checks").mkdir(exist_ok=True)
                shutil.copy(path, folder / "checks" / path.name)
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    for path in (host.work / "logs").glob("*.log"):
        shutil.copy(path, logs / path.name)
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{run}.tar.xz"
    with tarfile.open(target, "w:xz", preset=6) as archive:
        for path in _files(folder):
            archive.add(path, f"{run}/{path.relative_to(folder)}", recursive=False)
    return target


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in LARGE and not any(part.startswith(".") for part in path.parts):
            yield path


def bring_in(root: Path, archive: Path, results: Path) -> Path:
    """Unpack an archive of `pack` as `results/<run>`, with the commit that this checkout proves it was measured from.

    Raises ConfigError when it is no such archive, the run is there already, a result does not fit its cell, or the
    engine that was measured is not the one of this checkout.
    """
    with tempfile.TemporaryDirectory(dir=_made(results)) as name:
        try:
            with tarfile.open(archive, "r:xz") as packed:
                packed.extractall(name, filter="data")
        except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
            raise ConfigError(f"{archive} cannot be unpacked ({error}): name an archive of `collect`") from error
        folders = list(Path(name).iterdir())
        if len(folders) != 1:
            raise ConfigError(f"{archive} holds {len(folders)} folders, not one run: name an archive of `collect`")
        (folder,) = folders
        target = results / folder.name
        if target.exists():
            raise ConfigError(f"{target} exists already: remove it to bring it in again")
        info = read_run_info(folder / "run.json")
        for path in folder.glob("b*/*/*/*/r*/result.json"):
            cell_from_definition(json.loads(path.read_text("utf-8"))["cell_definition"])
        # A copy of a working tree may lie in a repository that knows nothing of its changes: the digest decides.
        if info["source"]["commit"] is None or info["source"]["dirty"]:
            info["source"] = _proved(root, info)
            write_json(folder / "run.json", info)
        folder.rename(target)
    return target


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _proved(root: Path, info: Mapping[str, Any]) -> dict[str, Any]:
    """This checkout's commit, where its engine has the digest that the run names."""
    measured = {e["digest"] for e in info["engines"] if e["name"].partition("-")[0] == "sparkinfer"}
    here = source_tree_digest(root)
    if measured != {here}:
        raise ConfigError(
            f"the run measured an engine of digest {', '.join(sorted(measured))}, this checkout's is {here}: bring it "
            "in from a checkout of the commit that was measured"
        )
    return source_facts(root)
