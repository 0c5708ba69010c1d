"""From an image and a report folder to signed, attached attestations."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError
from sparkinfer.identity import file_sha256
from sparkinfer_containers import checks, inputs
from sparkinfer_containers.errors import DigestProblem, SignatureProblem, UsageProblem
from sparkinfer_containers.oci.layout import Layout
from sparkinfer_containers.oci.model import (
    BUNDLE,
    BUNDLE_LIMIT,
    EMPTY,
    MANIFEST,
    Descriptor,
    parse_object,
    parts_of,
    referrer_manifest,
)
from sparkinfer_containers.sign import encode, sign
from sparkinfer_containers.statements import (
    EVALUATION,
    EVALUATION_SCHEMA,
    EVALUATION_SOURCE,
    KNOWN_SCHEMAS,
    SHORT_NAMES,
    check_evaluation,
    evaluation_schema,
    statement,
)
from sparkinfer_containers.trust import Credentials, trust_root
from sparkinfer_containers.verify.bundle import BundleVerifier, ExpectedSigner
from sparkinfer_containers.verify.report import ENGINE, report_files, subject_of


def prompt_digests(raw_results: Path | None) -> list[dict[str, str]]:
    """Digest of the prepared prompt set of every cell and model, from the run's raw results (empty without them)."""
    found: dict[tuple[str, str, int], str] = {}
    for path in sorted(raw_results.glob("b*/*/*/*/r*/result.json")) if raw_results else []:
        data = inputs.json_object(path, "a result of the run")
        try:
            found[(data["model"], data["cell"], data["block"])] = data["prompts_sha256"].removeprefix("sha256:")
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageProblem(f"{path} is not a result of the run: {error!r}") from error
    return [
        {"model": model, "cell": cell, "block": str(block), "sha256": value}
        for (model, cell, block), value in sorted(found.items())
    ]


RAW_PARTS = ("b[0-9]*/**/*", "checks/*", "accuracy/*", "servers/*", "prompts/**/*", "failures/**/*", "run.json")
"""What of a run's raw results is evidence: records, results, exports, checks, the ledger. Logs are not."""


def raw_digests(raw_results: Path | None) -> dict[str, str]:
    """sha256 of every raw file of the run, by path relative to the run's folder (empty without the folder)."""
    if raw_results is None:
        return {}
    found = {path for pattern in RAW_PARTS for path in raw_results.glob(pattern) if path.is_file()}
    return {path.relative_to(raw_results).as_posix(): f"sha256:{file_sha256(path)}" for path in sorted(found)}


def evaluation(
    report_folder: Path, raw_results: Path | None = None, earlier: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The evaluation statement of a report: about the image it measured, else about the source tree.

    `earlier` is the predicate that the measuring host signed: where its raw results are not at hand, the digests of
    prompts and raw records are taken from it.

    Form: docs/predicates/evaluation-v1.md. Raises UsageProblem when the folder is not a complete report, or its checks
    are not those of the raw results.
    """
    report, digest, source = _report(report_folder)
    changed = checks.differences_from_raw(raw_results, report) if raw_results else []
    if changed:
        raise UsageProblem(f"{report_folder} was not rendered from {raw_results}: {'; '.join(changed)}")
    baselines = [engine for engine in report["engines"] if engine["name"] != ENGINE]
    predicate = {
        "schema": evaluation_schema(EVALUATION_SCHEMA, source=source),
        "run": report["run"],
        "version": report["version"],
        "profile": report["profile"],
        "scale": report["scale"],
        "measured": report["measured"],
        "not_the_shipped_image": source,
        "models": [{key: model[key] for key in ("name", "digest", "random_weights")} for model in report["models"]],
        "prompts": prompt_digests(raw_results) or (earlier or {}).get("prompts", []),
        "raw_records": raw_digests(raw_results) or (earlier or {}).get("raw_records", {}),
        "files": {name: f"sha256:{file_sha256(file)}" for name, file in report_files(report_folder).items()},
        "cells": report["cells"],
        "checks": checks.to_sign(report),
        "decision_rules": [],
        "machine": report["machine"],
        "baseline": {engine["name"]: engine for engine in baselines},
        "git": report["source"],
        "self_attested": True,
    }
    container = report.get("container") or {}
    name = f"sparkinfer-source-{report['version']}" if source else str(container["reference"]).split("@")[0]
    return statement(name, digest, EVALUATION_SOURCE if source else EVALUATION, predicate)


def _report(folder: Path) -> tuple[dict[str, Any], str, bool]:
    """report.json of a folder, the digest that its figures are about, and whether that is a source tree's."""
    from sparkinfer_containers.verify import numbers  # pyarrow and the evaluation: only needed for a report

    try:
        report = numbers.load(folder)
        digest, source = subject_of(report)
        if not source:
            str(report["container"]["reference"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ConfigError, DigestProblem) as error:
        raise UsageProblem(f"{folder} is not a complete report: {error}") from error
    return report, digest, source


def find_report(reports: Path, version: str, digest: str, source_digest: str | None = None) -> Path:
    """The report folder that a release publishes: the one of `version` that measured the image `digest`.

    `source_digest` accepts a report of that source tree instead, where none measured the image. A report of another
    image or another source is never taken. Raises UsageProblem when there is none or the choice is open.
    """
    of_image, of_source, others = [], [], []
    for path in sorted(reports.glob("*/report.json")):
        report = inputs.json_object(path, "a report")
        if report.get("version") != version:
            continue
        try:
            subject, source = subject_of(report)
        except (KeyError, TypeError, AttributeError, DigestProblem) as error:
            raise UsageProblem(f"{path} is damaged: {error}") from error
        if (subject, source) == (digest, False):
            of_image.append(path.parent)
        elif source and subject == source_digest:
            of_source.append(path.parent)
        else:
            others.append(f"{path.parent.name} measured {'the source tree' if source else 'the image'} {subject}")
    chosen = of_image or of_source
    if len(chosen) != 1:
        names = ", ".join(path.name for path in chosen) or "none"
        raise UsageProblem(
            f"{reports}: expected one report of version {version} that measured {digest}, found {names}"
            + (f" ({'; '.join(others)})" if others else "")
            + ": measure this image, or keep the one report to publish"
        )
    return chosen[0]


def attach(layout: Layout, image: Descriptor, bundle: str, predicate_type: str) -> Descriptor:
    """Add a bundle to a layout as a referrer of `image`."""
    data = bundle.encode()
    stored = layout.add(BUNDLE, data)
    layout.add(EMPTY, b"{}")
    created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    manifest = layout.add(MANIFEST, referrer_manifest(image, stored, predicate_type, created))
    listed = Descriptor(
        MANIFEST, manifest.digest, manifest.size, BUNDLE, {"dev.sigstore.bundle.predicateType": predicate_type}
    )
    layout.list_manifest(listed)
    return listed


def subject_digest(made: Mapping[str, Any]) -> str:
    """`sha256:<hex>` of a statement's one subject."""
    return f"sha256:{made['subject'][0]['digest']['sha256']}"


def sign_and_attach(
    layout: Layout, image: Descriptor, statements: Sequence[Mapping[str, Any]], held: Credentials
) -> list[Descriptor]:
    """Sign statements about `image` and attach each. Nothing is attached unless all were signed."""
    for item in statements:
        if subject_digest(item) != image.digest:
            raise UsageProblem(f"a statement is about another digest than the image {image.digest}")
    return attach_all(layout, image, statements, sign(statements, held))


def attach_all(
    layout: Layout, image: Descriptor, statements: Sequence[Mapping[str, Any]], bundles: Sequence[str]
) -> list[Descriptor]:
    """Attach the signed bundle of each statement to `image`."""
    return [
        attach(layout, image, bundle, str(item["predicateType"]))
        for item, bundle in zip(statements, bundles, strict=True)
    ]


def _statement(path: Path) -> dict[str, Any]:
    """The statement inside a bundle, unverified: to compare with one that is about to be signed."""
    bundle = inputs.json_object(path, "a signed bundle")
    try:
        made: dict[str, Any] = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        if not isinstance(made["predicate"], dict) or made["predicateType"] not in SHORT_NAMES:
            raise ValueError("its statement is of no known type")
    except (ValueError, KeyError, TypeError) as error:
        raise UsageProblem(f"{path} is not a signed bundle ({error}): remove it to sign anew") from error
    return made


def sign_report(report_folder: Path, made: Mapping[str, Any], held: Credentials) -> Path:
    """Sign the evaluation statement `made` into the report's `bundles/`; returns the bundle.

    A bundle of the same statement is kept. Raises UsageProblem when another one is there.
    """
    kept = kept_bundle(report_folder, made)
    if kept is not None:
        return kept
    (bundle,) = sign([made], held)
    return put_bundle(report_folder, made, bundle)


def kept_bundle(report_folder: Path, made: Mapping[str, Any]) -> Path | None:
    """The report's own bundle if it is of the statement `made`. Raises UsageProblem when it is of another."""
    target = _bundle_path(report_folder, made)
    if not target.exists():
        return None
    if _statement(target) in (json.loads(encode(made)), json.loads(encode(_older(made)))):
        return target
    raise UsageProblem(f"{target} exists: a report is signed once; render it to another folder to sign it anew")


def _older(made: Mapping[str, Any]) -> dict[str, Any]:
    """The evaluation statement `made` as the version before signed it: a bundle of that one still stands for it."""
    predicate = {name: value for name, value in made["predicate"].items() if name != "checks"}
    source = made["predicateType"] == EVALUATION_SOURCE
    return {**made, "predicate": {**predicate, "schema": evaluation_schema(KNOWN_SCHEMAS[0], source=source)}}


def put_bundle(report_folder: Path, made: Mapping[str, Any], bundle: str) -> Path:
    """Write the signed bundle of `made` into the report's `bundles/`."""
    target = _bundle_path(report_folder, made)
    _write(target, bundle)
    return target


def _bundle_path(report_folder: Path, made: Mapping[str, Any]) -> Path:
    return report_folder / "bundles" / f"{SHORT_NAMES[str(made['predicateType'])]}.sigstore.json"


def host_evaluation(report_folder: Path, roots: Sequence[Path]) -> dict[str, Any]:
    """The evaluation that the measuring host signed: in `bundles/host/` once the report was signed anew.

    It has to verify under one of `roots` (trusted_root.json files), to name the digests of prompts and raw records, and
    to be about the files as they are now. Raises SignatureProblem or UsageProblem otherwise.
    """
    report, digest, source = _report(report_folder)
    name = f"{SHORT_NAMES[EVALUATION_SOURCE if source else EVALUATION]}.sigstore.json"
    path = next(
        (found for place in ("host", ".") if (found := report_folder / "bundles" / place / name).is_file()), None
    )
    if path is None:
        raise UsageProblem(f"{report_folder}/bundles has no {name}: the host that measured signs its report first")
    refused = []
    for root in roots:
        trust = trust_root(root)
        try:
            said = BundleVerifier(trust, ExpectedSigner(trust, None, None)).verify(path.read_bytes(), digest, str(path))
            break
        except SignatureProblem as problem:
            refused.append(f"{root.name}: {problem}")
    else:
        raise SignatureProblem(f"no known root vouches for what the measuring host signed: {refused or 'no root'}")
    check_evaluation(said.predicate, source=source)
    files = {name: f"sha256:{file_sha256(file)}" for name, file in report_files(report_folder).items()}
    if (said.predicate["run"], said.predicate["files"]) != (report["run"], files):
        raise UsageProblem(f"{report_folder} is not what its host signed: {path} names other files")
    if not said.predicate["raw_records"] or not said.predicate["prompts"]:
        raise UsageProblem(f"{path} names no digests of raw records or prompts: sign it on the host with --raw")
    return said.predicate


def set_aside(report_folder: Path) -> None:
    """Move the bundles of the measuring host to `bundles/host/`, once another signer has signed.

    They stay what that host vouched for; a verifier reads the new ones. What is there already stays.
    """
    folder = report_folder / "bundles"
    for path in sorted(folder.glob("*.sigstore.json")):
        (folder / "host").mkdir(exist_ok=True)
        if (folder / "host" / path.name).exists():
            path.unlink()
        else:
            path.rename(folder / "host" / path.name)


def _write(target: Path, text: str) -> None:
    target.parent.mkdir(exist_ok=True)
    temporary = target.with_name(f".{target.name}.part")
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(target)


def exchange(layout: Layout, image: Descriptor, report_folder: Path, evaluation_bundle: Path) -> None:
    """Attach a report's signed evaluation to its image, and put the image's other bundles beside the report's.

    An earlier evaluation of the same run makes way: the layout is this host's own and not published.
    """
    bundle = evaluation_bundle.read_text(encoding="utf-8")
    run = _statement(evaluation_bundle)["predicate"]["run"]
    for item in list(layout.referrers(image.digest)):
        manifest = parse_object(layout.manifest(item.digest), f"referrer {item.digest}")
        _, *layers = parts_of(manifest, item.digest)
        if len(layers) != 1:
            raise DigestProblem(f"referrer {item.digest} holds {len(layers)} bundles, expected one")
        held = layout.read(layers[0], BUNDLE_LIMIT)
        said = _statement(layout.blob_path(layers[0].digest))
        if said["predicateType"] != EVALUATION:
            _write(report_folder / "bundles" / f"{SHORT_NAMES[said['predicateType']]}.sigstore.json", held.decode())
        elif said["predicate"].get("run") == run:
            layout.unlist_manifest(item.digest)
    attach(layout, image, bundle, EVALUATION)
