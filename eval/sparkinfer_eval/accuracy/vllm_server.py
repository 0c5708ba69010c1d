"""vLLM started for a comparison as the evaluation starts it (`config/engines/vllm.yaml`), and ended with it."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkinfer.errors import EnvironmentProblem
from sparkinfer_eval.lease import client
from sparkinfer_eval.plan.engines import load_engine

ROOT = Path(__file__).resolve().parents[3]
LEAST_CONTEXT = 64


@contextmanager
def started(folder: Path, context: int, dtype: str = "bfloat16") -> Iterator[tuple[str, str]]:
    """(address, model name) of a server of the model.

    Raises EnvironmentProblem when vLLM's environment is missing or the server does not start.
    """
    python = ROOT / ".venvs" / "vllm" / "bin" / "python"
    if not python.is_file():
        raise EnvironmentProblem(f"{python} does not exist: make vLLM's environment with `make setup`")
    files = ROOT / "config" / "engines" / "vllm.yaml", ROOT / "workflow" / "schemas" / "engine.schema.yaml"
    # Nothing is timed: no warm-up.
    engine = dataclasses.replace(load_engine(*files), warm_up=())
    with tempfile.TemporaryDirectory(prefix="accuracy-") as scratch:
        state_folder = Path(scratch)
        log = state_folder / "vllm.log"
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
            source=ROOT,
            cache=ROOT / "results" / "cache",
            log=log,
            port=None,
            expected_digest=None,
            step_trace=None,
        )
        try:
            state = client.acquire(state_folder, wanted, client.owner_of(os.getpid()))
            yield state.url, state.served_name
        finally:
            client.stop(state_folder)
