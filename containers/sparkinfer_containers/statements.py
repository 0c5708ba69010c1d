"""in-toto statements that a release carries: predicate types, their builders and the checks a verifier makes.

The project's own predicates are documented in docs/predicates/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparkinfer_containers import checks
from sparkinfer_containers.errors import SignatureProblem

STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
SBOM = "https://cyclonedx.org/bom"
PREDICATES = "https://github.com/gittensor-ai-lab/sparkinfer/predicates"
EVALUATION = f"{PREDICATES}/evaluation/v1"
EVALUATION_SOURCE = f"{PREDICATES}/evaluation-source/v1"
BUILD_TYPE = f"{PREDICATES}/image-build/v1"

SELF_BUILDER = f"{PREDICATES}/builder/self-hosted/v1"
"""builder.id of a build on the release engineer's own machine: SLSA Build L1, self-attested."""

SHORT_NAMES = {
    PROVENANCE: "provenance",
    SBOM: "sbom",
    EVALUATION: "evaluation",
    EVALUATION_SOURCE: "evaluation-source",
}
EVALUATION_SCHEMA = "v1.1"
"""Version that is signed now. The type's URI holds the first number only: docs/predicates/evaluation-v1.md."""
KNOWN_SCHEMAS = ("v1", "v1.1")
"""Versions that are read; `v1` has no `checks`."""
_HEX64 = re.compile(r"[0-9a-f]{64}\Z")


def bare_sha256(digest: str) -> str:
    """The 64 hex characters of `sha256:<hex>`. Raises ValueError for anything else."""
    value = digest.removeprefix("sha256:")
    if not _HEX64.match(value):
        raise ValueError(f"{digest!r} is not a sha256 digest: expected sha256: and 64 lower-case hex characters")
    return value


def statement(name: str, digest: str, predicate_type: str, predicate: Mapping[str, Any]) -> dict[str, Any]:
    """A statement about exactly one subject."""
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": bare_sha256(digest)}}],
        "predicateType": predicate_type,
        "predicate": dict(predicate),
    }


def provenance(
    *,
    external_parameters: Mapping[str, Any],
    dependencies: Sequence[Mapping[str, Any]],
    builder_id: str,
    invocation_id: str,
    internal_parameters: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """SLSA provenance v1. `dependencies` are ResourceDescriptors with digests: sources, locks, debs, wheels."""
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": dict(external_parameters),
            "internalParameters": dict(internal_parameters or {}),
            "resolvedDependencies": [dict(item) for item in dependencies],
        },
        "runDetails": {"builder": {"id": builder_id}, "metadata": {"invocationId": invocation_id}},
    }


def _field(value: Any, path: str, kind: type) -> Any:
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            raise SignatureProblem(f"provenance lacks {path}")
        value = value[part]
    if not isinstance(value, kind) or not value:
        raise SignatureProblem(f"provenance field {path} is empty or not a {kind.__name__}")
    return value


def check_provenance(predicate: Mapping[str, Any]) -> str:
    """Check the SLSA fields of a provenance predicate and return builder.id. Raises SignatureProblem."""
    build_type = _field(predicate, "buildDefinition.buildType", str)
    if build_type != BUILD_TYPE:
        raise SignatureProblem(f"provenance buildType is {build_type}, expected {BUILD_TYPE}")
    _field(predicate, "buildDefinition.externalParameters", dict)
    for item in _field(predicate, "buildDefinition.resolvedDependencies", list):
        digests = item.get("digest") if isinstance(item, dict) else None
        named = isinstance(digests, dict) and all(isinstance(value, str) and value for value in digests.values())
        if not digests or not named:
            raise SignatureProblem(f"provenance names a dependency without a digest: {item!r:.200}")
    builder: str = _field(predicate, "runDetails.builder.id", str)
    return builder


def evaluation_schema(version: str, *, source: bool) -> str:
    """The `schema` of an evaluation predicate in a version."""
    return f"sparkinfer/{'evaluation-source' if source else 'evaluation'}/{version}"


def check_evaluation(predicate: Mapping[str, Any], *, source: bool) -> None:
    """Check the required fields of the project's evaluation predicates. Raises SignatureProblem."""
    known = [evaluation_schema(version, source=source) for version in KNOWN_SCHEMAS]
    if predicate.get("schema") not in known:
        raise SignatureProblem(
            f"evaluation predicate has schema {predicate.get('schema')!r}, expected {' or '.join(known)}"
        )
    holds_checks = predicate["schema"] != known[0]
    wanted: dict[str, type] = {
        "run": str,
        "models": list,
        "prompts": list,
        "files": dict,
        "cells": list,
        "decision_rules": list,
    }
    wanted |= {"raw_records": dict, "machine": dict, "baseline": dict, "git": dict, "not_the_shipped_image": bool}
    wanted |= {"checks": list} if holds_checks else {}
    for name, kind in wanted.items():
        if not isinstance(predicate.get(name), kind):
            raise SignatureProblem(f"evaluation predicate field {name} is missing or not a {kind.__name__}")
    if not all(isinstance(cell, dict) for cell in predicate["cells"]):
        raise SignatureProblem("evaluation predicate: an item of cells is not an object")
    if predicate["not_the_shipped_image"] is not source:
        raise SignatureProblem("evaluation predicate contradicts its type about the shipped image")
    for name in ("files", "raw_records"):
        if not all(isinstance(digest, str) for digest in predicate[name].values()):
            raise SignatureProblem(f"evaluation predicate: a digest in {name} is not a text")
    for required in ("report.json", "requests.parquet"):
        if required not in predicate["files"]:
            raise SignatureProblem(f"evaluation predicate does not name the digest of {required}")
    if holds_checks:
        checks.require_sound(predicate["checks"])
