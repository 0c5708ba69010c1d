"""What a set of verified statements about one subject says together: completeness, contradictions, SLSA level."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sparkinfer_containers.errors import DigestProblem, SignatureProblem
from sparkinfer_containers.oci.model import canonical
from sparkinfer_containers.statements import (
    EVALUATION,
    EVALUATION_SOURCE,
    PROVENANCE,
    SBOM,
    SELF_BUILDER,
    SHORT_NAMES,
    check_evaluation,
    check_provenance,
)
from sparkinfer_containers.verify.bundle import Verified

HOSTED_BUILDER = "https://github.com/actions/runner/github-hosted"


def _claim(found: Verified) -> tuple[str, bytes]:
    """What must be unique, and its content: one build definition and builder, one SBOM, one evaluation per run."""
    if found.predicate_type == PROVENANCE:
        details = found.predicate.get("runDetails")
        builder = details.get("builder") if isinstance(details, dict) else None
        return found.predicate_type, canonical([found.predicate.get("buildDefinition"), builder])
    if found.predicate_type in (EVALUATION, EVALUATION_SOURCE):
        return f"{found.predicate_type}#{found.predicate.get('run')}", canonical(found.predicate)
    return found.predicate_type, canonical(found.predicate)


def refuse_contradictions(statements: Sequence[Verified]) -> None:
    """Raises SignatureProblem when two statements say different things about the same matter."""
    said: dict[str, bytes] = {}
    for found in statements:
        what, content = _claim(found)
        if said.setdefault(what, content) != content:
            name = SHORT_NAMES[found.predicate_type]
            raise SignatureProblem(f"two {name} attestations contradict each other about {found.subject_digest}")


def require(statements: Sequence[Verified], *types: str) -> None:
    """Raises DigestProblem naming the attestations that are missing."""
    missing = [SHORT_NAMES[kind] for kind in types if kind not in {found.predicate_type for found in statements}]
    if missing:
        raise DigestProblem(f"missing attestation: {', '.join(missing)}")


def check_fields(found: Verified) -> None:
    """Raises SignatureProblem when a predicate lacks a field that its type requires."""
    try:
        canonical(found.predicate)
        json.dumps(found.predicate, indent=1)  # as --json writes it: nesting that was read can be too deep to write
    except (ValueError, RecursionError) as error:
        name = SHORT_NAMES[found.predicate_type]
        raise SignatureProblem(f"the predicate of the {name} statement is no plain JSON: {error}") from error
    if found.predicate_type == PROVENANCE:
        check_provenance(found.predicate)
    elif found.predicate_type == SBOM:
        components = found.predicate.get("components")
        if found.predicate.get("bomFormat") != "CycloneDX" or not isinstance(components, list) or not components:
            raise SignatureProblem("the SBOM is not a CycloneDX document with components")
    else:
        check_evaluation(found.predicate, source=found.predicate_type == EVALUATION_SOURCE)


def of_build(found: Verified, *, public: bool) -> str:
    """What a provenance or an SBOM proves, as one line. Raises SignatureProblem like `slsa_level`."""
    if found.predicate_type == PROVENANCE:
        return f"provenance: {slsa_level(found, public=public)}"
    return f"SBOM: {len(found.predicate['components'])} components listed"


def slsa_level(found: Verified, *, public: bool) -> str:
    """The SLSA build level that a provenance supports, in words. Raises SignatureProblem for a builder it cannot have.

    L2 needs a hosted platform that signs: the public trust root and a certificate that says so. Everything else is L1.
    """
    builder = check_provenance(found.predicate)
    if builder == SELF_BUILDER:
        return "SLSA Build L1, self-attested: built and signed on the release engineer's own machine"
    if builder == HOSTED_BUILDER:
        if not (public and found.hosted_runner):
            raise SignatureProblem("provenance claims a hosted builder, but the signing certificate does not say so")
        return "SLSA Build L2: built and signed on the CI provider's hosted machine"
    raise SignatureProblem(f"provenance names the unknown builder {builder}")
