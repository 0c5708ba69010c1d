"""Servers started for a comparison as the evaluation starts them (`config/engines/`), and ended with it."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkinfer.errors import ConfigError, EnvironmentProblem
from sparkinfer_eval.lease import client
from sparkinfer_eval.plan.engines import load_engine
from sparkinfer_eval.plan.identity import release_tag, unpack_tag

ROOT = Path(__file__).resolve().parents[3]
LEAST_CONTEXT = 64


@contextmanager
def vllm(folder: Path, context: int, dtype: str = "bfloat16") -> Iterator[tuple[str, str]]:
    """(address, model name) of a vLLM server of the model.

    Raises EnvironmentProblem when vLLM's environment is missing or the server does not start.
    """
    python = ROOT / ".venvs" / "vllm" / "bin" / "python"
    if not python.is_file():
        raise EnvironmentProblem(f"{python} does not exist: make vLLM's environment with `make setup`")
    with _started("vllm", python, ROOT, folder, context, dtype) as found:
        yield found


def chosen_tag(tag: str | None, root: Path = ROOT) -> str:
    """The release `tag`, by default the newest one before this version. Raises ConfigError when there is none yet."""
    found = tag or release_tag(root, "v*")
    if found is None:
        raise ConfigError("there is no release before this version: name a tag or commit, release:MODEL,tag=REVISION")
    return found


@contextmanager
def release(folder: Path, context: int, tag: str, dtype: str = "auto") -> Iterator[tuple[str, str]]:
    """(address, model name) of a server of this engine as it was at a git tag or commit, run from git's own copy.

    Raises:
        ConfigError: the revision holds no engine.
        EnvironmentProblem: the server does not start.
    """
    with tempfile.TemporaryDirectory(prefix="accuracy-") as scratch:
        unpack_tag(ROOT, tag, Path(scratch))
        with _started("previous", Path(sys.executable), Path(scratch), folder, context, dtype) as found:
            yield found


@contextmanager
def _started(
    name: str, python: Path, source: Path, folder: Path, context: int, dtype: str
) -> Iterator[tuple[str, str]]:
    files = ROOT / "config" / "engines" / f"{name}.yaml", ROOT / "workflow" / "schemas" / "engine.schema.yaml"
    # Nothing is timed: no warm-up.
    engine = dataclasses.replace(load_engine(*files), warm_up=())
    with tempfile.TemporaryDirectory(prefix="accuracy-") as scratch:
        state_folder = Path(scratch)
        wanted = client.Wanted(
            engine=engine,
            python=python,
            model=folder.absolute(),
            served_name=folder.name,
            device="cpu",
            dtype=dtype,
            max_model_len=max(context, LEAST_CONTEXT),
            seed=0,
            session="accuracy",
            source=source,
            cache=ROOT / "results" / "cache",
            log=state_folder / f"{name}.log",
            port=None,
            expected_digest=None,
            step_trace=None,
        )
        try:
            state = client.acquire(state_folder, wanted, client.owner_of(os.getpid()))
            yield state.url, state.served_name
        finally:
            client.stop(state_folder)
