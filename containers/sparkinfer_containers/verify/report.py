"""Verify a report folder: its signatures, the digests of its files, and every number against the raw records."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError
from sparkinfer.identity import file_sha256
from sparkinfer_containers import checks
from sparkinfer_containers.errors import DigestProblem, SignatureProblem, UsageProblem
from sparkinfer_containers.oci.model import BUNDLE_LIMIT
from sparkinfer_containers.statements import EVALUATION, EVALUATION_SOURCE, PROVENANCE, SBOM, SHORT_NAMES
from sparkinfer_containers.trust import LEVELS, TrustRoot
from sparkinfer_containers.verify import attestations
from sparkinfer_containers.verify.bundle import BundleVerifier, Verified
from sparkinfer_containers.verify.image import limits
from sparkinfer_containers.verify.outcome import Outcome

REQUIRED = ("CHANGELOG.md", "RELEASE_NOTE.md", "report.json", "requests.parquet", "commands.txt")
RECORDS = "requests.parquet"
ENGINE = "sparkinfer"
DISCLAIMER = "not the shipped image"


def _sha256(path: Path) -> str:
    return f"sha256:{file_sha256(path)}"


def report_files(folder: Path) -> dict[str, Path]:
    """The files of a report that a signature covers: all but `bundles/`, by relative path."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] != "bundles"
    }


def subject_of(report: dict[str, Any]) -> tuple[str, bool]:
    """The digest that the run's figures belong to, and whether it is the source tree's (not an image's)."""
    digests = [engine["digest"] for engine in report["engines"] if engine["name"] == ENGINE]
    if len(digests) != 1:
        raise DigestProblem(f"report.json declares {len(digests)} engines named {ENGINE}, expected one")
    container = report.get("container")
    if container is None or not container["measured"]:
        return str(digests[0]), True
    if container["digest"] != digests[0]:
        raise DigestProblem("report.json: the measured engine's digest is not the container's")
    return str(digests[0]), False


def _read_bundles(folder: Path, digest: str, verifier: BundleVerifier) -> list[Verified]:
    found = []
    for path in sorted((folder / "bundles").glob("*.sigstore.json")):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise SignatureProblem(
                f"bundles/{path.name} is not a regular file but {_kind(status.st_mode)}: refused unread"
            )
        if status.st_size > BUNDLE_LIMIT:
            raise SignatureProblem(f"bundles/{path.name}: {status.st_size} bytes, over the limit: refused unread")
        found.append(verifier.verify(path.read_bytes(), digest, f"bundles/{path.name}"))
    for statement in found:
        attestations.check_fields(statement)
    attestations.refuse_contradictions(found)
    return found


def _kind(mode: int) -> str:
    named = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return named.get(stat.S_IFMT(mode), "a device")


def _beside_the_evaluation(
    folder: Path, found: list[Verified], source: bool, trust: TrustRoot, outcome: Outcome
) -> None:
    """What the report's bundles say of the image itself. None of them is required: the report is not its image."""
    for statement in found:
        if statement.predicate_type in (PROVENANCE, SBOM):
            outcome.signed(SHORT_NAMES[statement.predicate_type], statement)
            outcome.proved.append(attestations.of_build(statement, public=trust.mode == "public"))
    have = {statement.predicate_type for statement in found}
    lacking = [SHORT_NAMES[kind] for kind in (PROVENANCE, SBOM) if kind not in have]
    if lacking:
        measured = "source tree" if source else "image"
        outcome.not_proved.append(
            f"what the measured {measured} was made of and how: bundles/ holds no {' and no '.join(lacking)}"
        )
    bundles = folder / "bundles"
    read = set(bundles.glob("*.sigstore.json"))
    unread = [path.relative_to(folder).as_posix() for path in sorted(bundles.rglob("*")) if path not in read]
    unread = [name for name in unread if not (folder / name).is_dir() or (folder / name).is_symlink()]
    if unread:
        outcome.not_proved.append(f"anything in what was not read: {', '.join(unread)}")


def _compare_with_statement(folder: Path, report: dict[str, Any], predicate: dict[str, Any], outcome: Outcome) -> None:
    """Digests of all files, and the figures repeated in the signed statement."""
    files = report_files(folder)
    signed: dict[str, str] = predicate["files"]
    for name in sorted(signed.keys() - files.keys()):
        outcome.problem(4, f"{name} is signed but missing from the folder")
    for name in sorted(signed.keys() & files.keys()):
        if _sha256(files[name]) != signed[name]:
            outcome.problem(4, f"{name} is not the file that was signed")
    extra = sorted(files.keys() - signed.keys())
    if extra:
        outcome.not_proved.append(f"files that no signature covers: {', '.join(extra)}")
    if predicate["run"] != report["run"]:
        outcome.problem(4, f"the signed evaluation is of run {predicate['run']}, the report of {report['run']}")
    if predicate["cells"] != report["cells"]:
        for ours, theirs in zip(predicate["cells"], report["cells"], strict=False):
            if ours != theirs:
                name = "/".join(str(ours.get(key)) for key in ("model", "cell", "engine", "metric", "stat"))
                outcome.problem(
                    1, f"signed figure {name} is {ours.get('value')!r}, report.json has {theirs.get('value')!r}"
                )
        if len(predicate["cells"]) != len(report["cells"]):
            outcome.problem(1, f"{len(predicate['cells'])} figures were signed, report.json has {len(report['cells'])}")

    if "checks" in predicate:
        try:
            found = checks.differences(predicate["checks"], report)
        except UsageProblem as problem:
            raise DigestProblem(str(problem)) from problem
        for line in found:
            outcome.problem(1, line)
        outcome.checks[report["run"]] = predicate["checks"]
        outcome.proved.append(f"{checks.summary(predicate['checks'])} are as signed, each with value, unit and verdict")
    else:
        outcome.not_proved.append("rows of checks beyond report.json's digest: the evaluation is of version 1")


def _compare_with_raw(raw: Path, report: dict[str, Any], predicate: dict[str, Any], outcome: Outcome) -> None:
    """The run's raw results against their signed digests, and the checks' outputs against report.json."""
    signed: dict[str, str] = predicate["raw_records"]
    if not signed:
        outcome.problem(4, "--raw: the evaluation was signed without digests of raw results")
    for name, digest in sorted(signed.items()):
        path = raw / name
        if not path.is_file():
            outcome.problem(4, f"{name} is signed but missing from {raw}")
        elif _sha256(path) != digest:
            outcome.problem(4, f"{name} in {raw} is not the raw result that was signed")
    for line in checks.differences_from_raw(raw, report):
        outcome.problem(1, line)
    outcome.proved.append(
        f"{len(signed)} raw results are as signed, and the outputs of {len(report['checks'])} checks are theirs"
    )


def _check_numbers(folder: Path, report: dict[str, Any], outcome: Outcome) -> None:
    from sparkinfer_containers.verify import numbers  # pyarrow and the evaluation: only needed for a report

    try:
        found = numbers.differences(folder, report)
    except (ConfigError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError) as error:
        outcome.problem(4, f"the figures cannot be derived from requests.parquet: {error}")
        return
    for line in found:
        outcome.problem(1, line)
    if not found:
        outcome.proved.append(
            f"all {numbers.count(report)} figures of report.json, and every line of the models' sections of "
            "CHANGELOG.md and RELEASE_NOTE.md, follow from requests.parquet; their lines on checks repeat report.json"
        )
        outcome.not_proved.append(
            "machine, versions, what checks computed, validity gates and times of starts: recorded, not derived anew"
        )


def verify_report(
    folder: Path, trust: TrustRoot, verifier: BundleVerifier, outcome: Outcome, raw: Path | None = None
) -> None:
    """Fill `outcome`; problems with numbers and files are collected, a bad signature is raised at once.

    `raw` is the run's folder of raw results on the host that measured: it is held against the signed digests too.
    """
    missing = [name for name in REQUIRED if not (folder / name).is_file()]
    if missing:
        raise DigestProblem(f"{folder}: missing {', '.join(missing)}")
    from sparkinfer_containers.verify import numbers

    try:
        report = numbers.load(folder)
        digest, source = subject_of(report)
    except (ConfigError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DigestProblem(f"{folder / 'report.json'} is damaged: {' '.join(str(error).split())}") from error
    found = _read_bundles(folder, digest, verifier)
    wanted = EVALUATION_SOURCE if source else EVALUATION
    evaluations = [item for item in found if item.predicate_type == wanted and item.predicate["run"] == report["run"]]
    records_signed = not evaluations or evaluations[0].predicate["files"][RECORDS] == _sha256(folder / RECORDS)
    if records_signed:
        _check_numbers(folder, report, outcome)  # without a signature too: a wrong number is worth naming
    if not evaluations:
        outcome.problem(4, f"the report is not signed: no {SHORT_NAMES[wanted]} statement about {digest} in bundles/")
        return
    statement = evaluations[0]
    _compare_with_statement(folder, report, statement.predicate, outcome)
    if raw is not None:
        _compare_with_raw(raw, report, statement.predicate, outcome)
    else:
        outcome.not_proved.append("raw results beyond requests.parquet: their digests are signed (--raw compares them)")
    if report["container"] is not None and source and DISCLAIMER not in (folder / "CHANGELOG.md").read_text("utf-8"):
        outcome.problem(1, f"CHANGELOG.md does not say that its figures are '{DISCLAIMER}'")
    outcome.level = LEVELS[trust.mode]
    outcome.evaluations.append(report["run"])
    outcome.signed(SHORT_NAMES[wanted], statement)
    outcome.proved.append(
        f"{len(statement.predicate['files'])} files are as signed, as the evaluation of "
        + (f"the source tree {digest} (not the shipped image)" if source else f"the image {digest}")
    )
    _beside_the_evaluation(folder, found, source, trust, outcome)
    if source:
        outcome.not_proved.append("that the shipped image performs like this: the run was made from the source tree")
    outcome.not_proved.append("plots and report.html beyond their digests: they are drawings of the same figures")
    outcome.not_proved += limits(trust)
