"""What the container starts: find the model, then become `sparkinfer serve` (or the sub-command given).

Environment: SPARKINFER_MODEL (a folder, or OWNER/NAME on the hub), SPARKINFER_MODEL_REVISION (the hub commit, 40 hex
digits), SPARKINFER_HOST, SPARKINFER_PORT. Without SPARKINFER_MODEL the image's own preset counts:
SPARKINFER_PRESET_FOLDER where a model is mounted there, else SPARKINFER_PRESET_HUB. All other SPARKINFER_* variables
are the engine's settings and pass through.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from sparkinfer.errors import ConfigError, EnvironmentProblem, SparkinferError

MODELS = Path("/models")
PRESET = tuple(f"SPARKINFER_PRESET_{name}" for name in ("FOLDER", "HUB", "REVISION", "DRAFTER"))
OWN = ("SPARKINFER_MODEL", "SPARKINFER_MODEL_REVISION", "SPARKINFER_HOST", "SPARKINFER_PORT", *PRESET)
_HUB_ID = re.compile(r"(?!.*(?:--|\.\.|\.git\Z))\b[A-Za-z0-9._-]{1,96}\b/\b[A-Za-z0-9._-]{1,96}\b\Z")
"""What the hub's client takes for OWNER/NAME, so that a path like ../x is not handed to it."""
COMMIT = re.compile(r"[0-9a-f]{40}\Z")


def find_model(name: str, revision: str, models: Path = MODELS) -> Path:
    """The model's folder: given, or fetched into `models` at a pinned revision. Raises ConfigError."""
    folder = _readable(name)
    if folder:
        return folder
    if name.startswith("/") or not _HUB_ID.match(name):
        raise ConfigError(
            f"SPARKINFER_MODEL={_short(name)} is no folder in this container: mount one "
            f"(-v /path/to/model:{MODELS}/name:ro), "
            "or name a hub model as OWNER/NAME with SPARKINFER_MODEL_REVISION"
        )
    if not COMMIT.match(revision):
        raise ConfigError(
            f"SPARKINFER_MODEL={name} is fetched at a pinned revision only: set SPARKINFER_MODEL_REVISION to the "
            f"model's commit (40 hexadecimal digits), not {revision!r}"
        )
    return fetch_model(name, revision, models)


def _short(name: str) -> str:
    return repr(name if len(name) <= 200 else f"{name[:200]}...")


def _readable(name: str) -> Path | None:
    """The folder `name`, or None where there is none. Raises ConfigError for one that this user may not read.

    Absolute: `serve` would take a relative name like -x for an option.
    """
    folder = Path(name).absolute()
    try:
        if folder.is_dir():
            next(folder.iterdir(), None)
            return folder
    except PermissionError as error:
        raise ConfigError(
            f"model folder {name}: the container's user ({os.getuid()}) may not read {error.filename}. On the host "
            "give others the right to read (chmod -R o+rX) the folder that is mounted, or run the container with --user"
        ) from error
    except OSError as error:  # a name that no file can have, a file system that does not answer
        raise ConfigError(f"model folder {_short(name)}: {error.strerror}: name a folder under {MODELS}") from error
    return None


def preset_model(own: Mapping[str, str], models: Path = MODELS) -> list[str]:
    """Arguments for `serve`: the preset's model, mounted or fetched, and its drafter.

    Raises ConfigError where no model is mounted and no revision to fetch is known.
    """
    name, hub = own["SPARKINFER_PRESET_FOLDER"], own["SPARKINFER_PRESET_HUB"]
    if not name:
        raise ConfigError(f"SPARKINFER_MODEL is not set: a folder under {MODELS}, or OWNER/NAME on the hub")
    drafter = ["--draft-model", own["SPARKINFER_PRESET_DRAFTER"]] if own["SPARKINFER_PRESET_DRAFTER"] else []
    folder = _readable(name)
    if folder:
        return [str(folder), *drafter]
    if not hub:
        raise ConfigError(f"no model is mounted at {name} and this image names none on the hub: set SPARKINFER_MODEL")
    revision = own["SPARKINFER_MODEL_REVISION"] or own["SPARKINFER_PRESET_REVISION"]
    if not COMMIT.match(revision):
        raise ConfigError(
            f"no model is mounted at {name} (-v /path/to/model:{name}:ro), and {hub} is fetched at a pinned revision "
            f"only: set SPARKINFER_MODEL_REVISION to its commit (40 hexadecimal digits), not {revision!r}"
        )
    # Known in the API by the folder's name either way.
    return [str(fetch_model(hub, revision, models)), "--served-model-name", Path(name).name, *drafter]


def fetch_model(name: str, revision: str, models: Path) -> Path:
    """Fetch a hub model once; a later start finds it. Raises EnvironmentProblem when it cannot be had."""
    target = models / f"{name.replace('/', '--')}@{revision[:12]}"
    marker = target / ".complete"
    if marker.is_file():
        return target
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        snapshot_download(name, revision=revision, local_dir=target)
        marker.touch()
    except HFValidationError as error:
        raise ConfigError(f"{name} is no name of a hub model (OWNER/NAME): {error}") from error
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise EnvironmentProblem(
            f"{name} at {revision} could not be fetched into {models} ({error}): check the network and that the volume "
            "is writable for the container's user, or mount the model"
        ) from error
    return target


def arguments(given: Sequence[str], environment: MutableMapping[str, str], models: Path = MODELS) -> list[str]:
    """Arguments for `sparkinfer`; takes this module's own variables out of `environment`."""
    own = {name: environment.pop(name, "") for name in OWN}
    host, port = own["SPARKINFER_HOST"] or "0.0.0.0", own["SPARKINFER_PORT"] or "8000"
    if given and not given[0].startswith("-"):
        if given[0] != "serve":
            return list(given)
        # The container's address first: options that are given come later and win.
        return ["serve", "--host", host, "--port", port, *given[1:]]
    if own["SPARKINFER_MODEL"]:
        model = [str(find_model(own["SPARKINFER_MODEL"], own["SPARKINFER_MODEL_REVISION"], models))]
    else:
        model = preset_model(own, models)
    return ["serve", *model, "--host", host, "--port", port, *given]


def main() -> None:
    """Entry point: replaces this process by the engine's, so that signals from init reach it."""
    try:
        chosen = arguments(sys.argv[1:], os.environ)
    except SparkinferError as error:
        print(f"sparkinfer container: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    os.execv(sys.executable, [sys.executable, "-m", "sparkinfer.cli", *chosen])


if __name__ == "__main__":
    main()
