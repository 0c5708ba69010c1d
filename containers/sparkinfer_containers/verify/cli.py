"""Command `sparkinfer-verify TARGET`: a report folder, an OCI layout, or an image reference by digest.

Exit codes: 0 everything holds; 1 a number differs; 2 usage; 3 signature or identity; 4 a digest differs or a part is
missing; 5 the trust level is lower than asked for.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from sparkinfer import console
from sparkinfer.errors import EnvironmentProblem, SparkinferError
from sparkinfer_containers.errors import DigestProblem, SignatureProblem, UsageProblem
from sparkinfer_containers.oci.layout import Layout
from sparkinfer_containers.oci.registry import Reference, Registry
from sparkinfer_containers.trust import TrustRoot, default_roots, trust_root
from sparkinfer_containers.verify.bundle import BundleVerifier, ExpectedSigner
from sparkinfer_containers.verify.image import verify_image
from sparkinfer_containers.verify.outcome import Outcome
from sparkinfer_containers.verify.report import verify_report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparkinfer-verify",
        description="Verify a sparkinfer report folder, OCI layout or image by digest.",
        epilog="Exit codes: 0 ok, 1 a number differs, 2 usage, 3 signature or identity, 4 digest or missing part, "
        "5 trust level too low. Without --identity the release workflow of this project is expected (public), or the "
        "private instance that the trust root names.",
    )
    parser.add_argument("target", metavar="TARGET", help="reports/<run>, an OCI layout folder, or HOST/NAME@sha256:...")
    parser.add_argument(
        "--trusted-root", type=Path, metavar="FILE", help="sigstore trusted_root.json to verify against"
    )
    parser.add_argument("--identity", help="certificate identity expected (with --issuer)")
    parser.add_argument("--issuer", help="OIDC issuer expected (with --identity)")
    parser.add_argument(
        "--require-public", action="store_true", help="exit 5 unless the public sigstore vouches for it"
    )
    parser.add_argument(
        "--require-evaluation",
        dest="evaluation",
        metavar="RUN",
        help="exit 4 unless the evaluation of this run is among the statements",
    )
    parser.add_argument(
        "--raw",
        type=Path,
        metavar="results/RUN",
        help="of a report: also hold the run's raw results, on the host that measured, against what was signed",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the outcome as JSON ('-': to stdout alone)"
    )
    return parser


def _target(text: str) -> Path | Reference:
    """A report folder, a layout folder, or an image by digest. Raises UsageProblem for anything else."""
    folder = Path(text)
    try:
        found = folder.is_dir()
    except OSError as error:  # a name that no file can have
        raise UsageProblem(f"TARGET {text:.80}: {error.strerror}") from error
    if found:
        if not (folder / "report.json").is_file() and not (folder / "oci-layout").is_file():
            raise UsageProblem(f"{folder} is neither a report folder (report.json) nor an OCI layout (oci-layout)")
        return folder
    if "@sha256:" not in text and ":" not in text:
        raise UsageProblem(f"{text} does not exist: name a report folder, an OCI layout, or HOST/NAME@sha256:...")
    reference = Reference.parse(text)
    if reference.digest is None:
        raise UsageProblem(f"{text}: name the image by digest (HOST/NAME@sha256:...); a tag can be moved")
    return reference


def verify_target(
    target: Path | Reference, trust: TrustRoot, signer: ExpectedSigner, outcome: Outcome, raw: Path | None = None
) -> None:
    """Verify under one trust root and fill `outcome`. Raises the first problem that ends a verification."""
    verifier = BundleVerifier(trust, signer)
    if isinstance(target, Reference):
        with Registry(target) as registry:
            verify_image(registry, str(target.digest), trust, verifier, outcome)
    elif (target / "report.json").is_file():
        verify_report(target, trust, verifier, outcome, raw)
    else:
        layout = Layout(target)
        verify_image(layout, layout.image().digest, trust, verifier, outcome)


def _check(args: argparse.Namespace) -> Outcome:
    """Try the given trust root, else this host's private and the public one; the first that vouches counts."""
    target = _target(args.target)
    if args.raw and (not args.raw.is_dir() or isinstance(target, Reference) or not (target / "report.json").is_file()):
        raise UsageProblem(f"--raw {args.raw}: needs a folder of raw results, and a report folder as TARGET")
    roots = iter([trust_root(args.trusted_root)]) if args.trusted_root else default_roots(args.require_public)
    refused: SignatureProblem | None = None
    for trust in roots:
        outcome = Outcome(args.target)
        try:
            verify_target(target, trust, ExpectedSigner(trust, args.identity, args.issuer), outcome, args.raw)
        except SignatureProblem as problem:
            refused = refused or problem
            continue
        if args.require_public and trust.mode != "public":
            outcome.problem(5, f"--require-public: this holds at the level '{outcome.level}' only, signed privately")
        return outcome
    assert refused is not None  # there is always a root to try
    if args.trusted_root:
        raise refused
    raise SignatureProblem(
        f"{refused}. No root that is known here vouches for it: what a private instance on another host signed is "
        "verified with that instance's trusted_root.json (--trusted-root FILE)"
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    try:
        return _verify(argv)
    except KeyboardInterrupt:
        print("sparkinfer-verify: interrupted: nothing is proved", file=sys.stderr)
        return 128 + signal.SIGINT


def _verify(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    written = args.json if args.json and str(args.json) != "-" else None
    outcome = Outcome(args.target)
    try:
        if written and (written.is_dir() or not written.parent.is_dir()):
            raise UsageProblem(f"--json {written}: a folder, or in a folder that does not exist")
        outcome = _check(args)
        if args.evaluation and args.evaluation not in outcome.evaluations:
            listed = ", ".join(outcome.evaluations) or "none"
            raise DigestProblem(f"--require-evaluation: no evaluation of run {args.evaluation} is attached: {listed}")
    except EnvironmentProblem as error:
        outcome.problem(DigestProblem.exit_code, str(error))  # a part that cannot be fetched is a missing part
    except SparkinferError as error:
        outcome.problem(error.exit_code, str(error))
    except OSError as error:
        outcome.problem(DigestProblem.exit_code, f"{error.filename or args.target} cannot be read: {error.strerror}")
    if written:
        try:
            written.write_text(_data(outcome), encoding="utf-8")
        except OSError as error:
            outcome.problem(UsageProblem.exit_code, f"--json {written}: {error}")
    alone = str(args.json) == "-"
    return _show(_data(outcome) if alone else outcome.to_text() + "\n", outcome.exit_code)


def _show(text: str, verdict: int) -> int:
    """Print the outcome; the exit code. Who stops reading (`| head -1`) still gets the verdict's."""
    encoding = sys.stdout.encoding if sys.stdout else "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)
    except BrokenPipeError:
        console.drop_unread()
    except OSError as error:
        console.discard(sys.stdout)
        print(f"sparkinfer-verify: the outcome could not be printed: {error}", file=sys.stderr)
        return verdict or UsageProblem.exit_code
    return verdict


def _data(outcome: Outcome) -> str:
    return json.dumps(outcome.to_json(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.exit(main())
