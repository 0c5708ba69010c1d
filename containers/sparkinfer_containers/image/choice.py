"""Which engine a release measures: the image of this checkout, or, on a host that cannot take it, the source tree."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkinfer.errors import EnvironmentProblem
from sparkinfer.identity import file_sha256, json_digest, short
from sparkinfer_containers.image.runtimes import runtime, uses_daemon
from sparkinfer_containers.image.settings import Recipe, load
from sparkinfer_containers.image.tools import APT_HELPER, run
from sparkinfer_containers.image.wheels import commit_of, inputs

VARIANT_OF = {"cpu": "cpu", "cuda": "cuda13"}
BUILDER = ("image/*.py", "oci/layers.py", "oci/layout.py", "oci/model.py")
NOT_BUILDER = ("choice.py", "run.py", "daemon.py", "runtimes.py", "start.py", "rebuild.py", "difference.py")


@dataclass(frozen=True, slots=True)
class Choice:
    """What is measured. `digest` is None for the source tree, and then `reason` says why.

    `pending` is the record of an image that has to be built before its digest, and so the run's name, is known.
    """

    digest: str | None
    reason: str
    pending: str | None = None
    record: str | None = None

    def container(self) -> dict[str, Any]:
        """The `container` part of run.json."""
        if self.record is None or self.digest is None:
            return {"measured": False, "reason": self.reason}
        made = json.loads(Path(self.record).read_text(encoding="utf-8"))
        shown = {name: made[name] for name in ("reference", "digest", "source_digest")}
        return {**shown, "measured": True, "attested": True}


def image_key(repository: Path, recipe: Recipe) -> tuple[str, str]:
    """(first digits of a digest over all that decides the image, the commit whose files go in).

    Raises EnvironmentProblem when the folder is no full git checkout.
    """
    commit, _ = commit_of(repository, recipe)
    folder = recipe.containers / "sparkinfer_containers"
    builder = {path for pattern in BUILDER for path in folder.glob(pattern) if path.name not in NOT_BUILDER}
    files = [
        recipe.containers / "image.toml",
        recipe.debian_lock,
        recipe.python_lock,
        recipe.backend_lock,
        *sorted(builder),
    ]
    digests = {path.relative_to(recipe.containers).as_posix(): file_sha256(path) for path in files}
    return short(json_digest([recipe.name, recipe.variant.name, commit, digests]), 12), commit


def image_folder(repository: Path, device: str) -> tuple[str, str]:
    """(`results/images/<variant>-<key>`, the commit that is built) for a device; key and commit `none` without git."""
    recipe = load(repository, VARIANT_OF[device])
    try:
        key, commit = image_key(repository, recipe)
    except EnvironmentProblem:
        key = commit = "none"
    return f"results/images/{recipe.variant.name}-{key}", commit


def choose(repository: Path, wanted: str, device: str) -> Choice:
    """Decide for `engine_from` = auto, image or source. Raises EnvironmentProblem for `image` where it cannot be."""
    if wanted == "source":
        return Choice(None, "the setting engine_from is `source`")
    recipe = load(repository, VARIANT_OF[device])
    folder, _ = image_folder(repository, device)
    record = repository / folder / "image.json"
    obstacle = checkout_obstacle(repository, recipe) or runtime_obstacle(device)
    if obstacle is None and not record.is_file():
        obstacle = build_obstacle()
    if obstacle is not None:
        if wanted == "image":
            raise EnvironmentProblem(f"engine_from is `image`, but {obstacle}")
        return Choice(None, obstacle)
    if not record.is_file():
        return Choice(None, "the image is not built yet", pending=f"{folder}/image.json")
    made = json.loads(record.read_text(encoding="utf-8"))
    return Choice(made["digest"], "this host can run the image", record=f"{folder}/image.json")


def checkout_obstacle(repository: Path, recipe: Recipe) -> str | None:
    """Why no image can stand for this checkout: the image holds committed files only."""
    try:
        commit_of(repository, recipe)
        changed = run(["git", "-C", str(repository), "status", "--porcelain", "--", *inputs(recipe)])
    except EnvironmentProblem as error:
        return f"no image can be built from this folder: {str(error).splitlines()[0]}"
    if changed:
        names = [line[3:] for line in changed.splitlines()]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"{names[0]}{more} has changes that are not committed, and an image holds committed files only"
    return None


def runtime_obstacle(device: str) -> str | None:
    """Why this machine cannot run the image or serve it from a registry."""
    if platform.machine() != "x86_64":
        return f"the image is for x86-64, this machine is {platform.machine()}"
    if shutil.which("docker-registry") is None:
        return "docker-registry is not installed (apt-get install docker-registry)"
    if uses_daemon(device):
        try:
            runtime(device)
        except EnvironmentProblem as error:
            return str(error)
        return None if shutil.which("skopeo") else "skopeo is not installed (apt-get install skopeo)"
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed (apt-get install bubblewrap)"
    probe = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-user", "--uid", "10001"]
    probe += ["--gid", "10001", "--unshare-pid", "--as-pid-1", "--unshare-ipc", "--unshare-uts", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        return f"bubblewrap cannot make a sandbox here ({done.stderr.strip()[-120:]})"
    return None


def build_obstacle() -> str | None:
    """Why this machine cannot build an image."""
    if shutil.which("mmdebstrap") is None:
        return "mmdebstrap is not installed (apt-get install mmdebstrap)"
    if not APT_HELPER.exists():
        return "an image can be built on Debian or Ubuntu only"
    if os.geteuid() != 0 and shutil.which("newuidmap") is None:
        return "building the image takes root, or the package uidmap"
    return None
