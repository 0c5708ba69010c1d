"""Fixtures of the server tests; their helpers lie beside them (importlib mode does not put the folder on the path)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sparkinfer_eval.toy_model import generate

from sparkinfer.server.tokenizer import ServerTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from running_server import SIZE, Running, start, start_echo


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    generate("dense", folder, 0, SIZE)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> ServerTokenizer:
    return ServerTokenizer(model_dir)


@pytest.fixture(scope="session")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The real server, shared: tests leave it idle."""
    log = tmp_path_factory.mktemp("server") / "log"
    flags = [
        "--port",
        "0",
        "--dtype",
        "float32",
        "--max-num-seqs",
        "8",
        "--kv-cache-mb",
        "16",
        "--snapshot-pool-mb",
        "16",
    ]
    with start(["-m", "sparkinfer.cli", "serve", str(model_dir), *flags], log) as running:
        yield running


@pytest.fixture(scope="session")
def echo(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The echoing server, shared."""
    with start_echo(model_dir, tmp_path_factory.mktemp("echo") / "log", '{"step_s": 0.001}') as running:
        yield running
