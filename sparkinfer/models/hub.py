"""A model by name: a folder, or a repository of the Hugging Face hub at a pinned commit."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sparkinfer.errors import CheckpointError, ConfigError, EnvironmentProblem

HUB = "OWNER/NAME@COMMIT of the Hugging Face hub"
"""How a help text calls a model that is no folder."""
_HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)@(?P<revision>[^/@]+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")
FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""What is fetched: weights, configs, tokenizer; never code or pickles."""


def resolve_model(model: str) -> Path:
    """The folder of `model`: a path, or `owner/name@commit`, fetched into the hub's local cache if it is not there.

    Raises:
        CheckpointError: there is no such folder, or the revision is no full commit id.
        ConfigError: HF_ENDPOINT is no address.
        EnvironmentProblem: the repository cannot be fetched.
    """
    try:
        folder = Path(model).expanduser()
        if folder.is_dir():
            return folder
    except (OSError, RuntimeError) as error:  # a name that is too long, a folder that is closed, a user who is not
        raise CheckpointError(f"no model folder {model!r}: {error}") from error
    match = _HUB.fullmatch(model)
    if match is None:
        hint = f"; to take it from the hub, write {model}@<commit>" if re.fullmatch(r"[\w.-]+/[\w.-]+", model) else ""
        raise CheckpointError(
            f"no model folder {model!r}: give the path of a folder with config.json and *.safetensors{hint}"
        )
    if not _COMMIT.fullmatch(match["revision"]):
        raise CheckpointError(
            f"{model}: revision {match['revision']!r} is no commit id of 40 hex digits; a branch or tag may change, so"
            " the commit must be given"
        )
    return _fetch(match["id"], match["revision"])


def _fetch(repository: str, revision: str) -> Path:
    import httpx

    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ValueError as error:  # the package reads its addresses while it is imported
        raise ConfigError(f"HF_ENDPOINT={os.environ.get('HF_ENDPOINT', '')!r} is no address: {error}") from error
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        raise EnvironmentProblem(
            f"{repository} at {revision} could not be fetched ({type(error).__name__}): check the id, the commit and"
            " the network, or give a folder"
        ) from error
