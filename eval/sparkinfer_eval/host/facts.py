"""What a running server says of itself, kept with a run's results."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx

from sparkinfer.errors import ConfigError, EnvironmentProblem
from sparkinfer_eval.host.servers import Running
from sparkinfer_eval.host.site import Host
from sparkinfer_eval.report.run_info import write_json

PATHS = {"sparkinfer": "/v1/info", "vllm": "/version"}


def of_server(host: Host, run_folder: Path, server: Running) -> dict[str, Any]:
    """Engine, version, digest, seconds to ready, resolved settings and command of a server; asked once in a run.

    Raises EnvironmentProblem when it does not answer.
    """
    path = run_folder / "servers" / f"{server.name}-{server.model}-1.json"
    if path.exists():
        return dict(json.loads(path.read_text("utf-8")))
    try:
        answer = httpx.get(server.url + PATHS[server.engine], timeout=120.0, trust_env=False)
        answer.raise_for_status()
        info = answer.json()
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        raise EnvironmentProblem(f"{server.url}{PATHS[server.engine]} does not answer: {error}") from error
    found = {
        "engine": server.name,
        "version": str(info["version"]),
        "engine_digest": info["engine_digest"] if server.engine == "sparkinfer" else bundle_digest(host.vllm),
        "ready_s": server.ready_s,
        "info": info,
        "command": plain(host, server.command),
    }
    write_json(path, found)
    return found


def plain(host: Host, words: list[str]) -> list[str]:
    """A command line without this host's paths: they are named WORK and ROOT."""
    known = {str(host.work): "WORK", str(host.root): "ROOT"}
    found = []
    for word in words:
        for path, name in known.items():
            word = word.replace(path, name)
        found.append(word)
    return ["python", *found[1:]] if found and Path(words[0]).is_absolute() else found


def bundle_digest(folder: Path) -> str:
    """The digest of an unpacked bundle: over the RECORD files of its distributions, which list every file's sha256.

    Raises ConfigError when there is none.
    """
    records = sorted(folder.glob("*.dist-info/RECORD"))
    if not records:
        raise ConfigError(f"{folder} holds no installed distribution: unpack the bundle with `gpu_host.py setup`")
    digest = hashlib.sha256()
    for record in records:
        digest.update(f"{record.parent.name}\n".encode() + record.read_bytes())
    return f"sha256:{digest.hexdigest()}"
