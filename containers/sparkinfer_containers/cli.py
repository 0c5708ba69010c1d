"""Command `python -m sparkinfer_containers`: build, attest, push, pull and run the release image.

Exit codes: 0 done, 1 a rebuild differs, 2 bad input, 3 the machine lacks something or signing failed, 4 a digest
differs or a part is missing, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from sparkinfer.console import command_line
from sparkinfer.errors import EnvironmentProblem, SparkinferError
from sparkinfer.output import require_appendable, require_file, require_folder, write_text
from sparkinfer_containers import attest, figures, inputs, loopback, ship
from sparkinfer_containers.errors import SignatureProblem, UsageProblem
from sparkinfer_containers.image import build, daemon, debs, rebuild, settings, wheels
from sparkinfer_containers.image.folders import require_unpackable
from sparkinfer_containers.image.run import SHARED, Container, unpack_image
from sparkinfer_containers.image.start import require_image, start
from sparkinfer_containers.oci.layout import Layout
from sparkinfer_containers.oci.registry import Reference, Registry
from sparkinfer_containers.private import instance
from sparkinfer_containers.private.state import default_folder
from sparkinfer_containers.private.trust import client_config
from sparkinfer_containers.sign import sign
from sparkinfer_containers.statements import PROVENANCE, SBOM, check_provenance, statement
from sparkinfer_containers.trust import credentials, trust_root

ROOT = Path(__file__).resolve().parents[2]
PASSED = ("SPARKINFER_", "OMP_", "HF_", "TRANSFORMERS_", "CUDA_", "NVIDIA_")
NOT_PASSED = ("HF_HOME", "SPARKINFER_IMAGE_DIGEST")
"""Environment variables that `serve` hands to the engine in the image, by prefix; the launcher sets the digest."""


def _caches(args: argparse.Namespace) -> build.Caches:
    require_folder(args.deb_cache, "--deb-cache")
    require_folder(args.wheel_cache, "--wheel-cache")
    return build.Caches(args.deb_cache.absolute(), args.wheel_cache.absolute())


def _build(args: argparse.Namespace) -> int:
    recipe = settings.load(args.repository, args.variant, args.name)
    require_folder(args.output.parent, "--output: the folder")
    if args.scratch:
        require_folder(args.scratch, "--scratch")
    caches = _caches(args)
    start = time.monotonic()
    record = build.build(recipe, args.repository.absolute(), args.output, caches, args.scratch, args.revision)
    seconds = round(time.monotonic() - start, 1)
    # Beside the image's record, which is the same on every machine.
    _write_record(args.output / "timing.json", {"schema": "sparkinfer/build-timing/v1", "seconds": seconds})
    print(f"{record['digest']}  {record['reference']}  built in {seconds:.0f} s")
    for layer in record["layers"]:
        print(f"  {layer['size'] / 1e6:8.1f} MB  {layer['name']}")
        largest = sorted(layer["packages"].items(), key=lambda item: -item[1])
        print("             " + ", ".join(f"{name} {size / 1e6:.1f}" for name, size in largest[:5] if size >= 1e5))
    print(f"  {record['unpacked_bytes'] / 1e6:8.1f} MB  unpacked")
    return 0


def _relock(args: argparse.Namespace) -> int:
    require_folder(args.deb_cache, "--deb-cache")
    for variant in args.variants:
        recipe = settings.load(args.repository, variant)
        wheels.write_lock(wheels.relock(recipe, args.repository), recipe.python_lock, f"of the {variant} image")
        wheels.write_lock(wheels.relock_backend(recipe, args.repository), recipe.backend_lock, "of the build backend")
        with tempfile.TemporaryDirectory() as work:
            debs.relock(recipe, args.deb_cache, Path(work)).write(recipe.debian_lock)
        print(f"{recipe.debian_lock}, {recipe.python_lock} and {recipe.backend_lock} are new")
    return 0


def _rebuild_check(args: argparse.Namespace) -> int:
    digest = Layout(args.image / "layout").image().digest
    inputs.image_record(args.image, "commit", "variant", "name")
    if args.record:
        require_file(args.record, "--record", make_folder=True)
    scratch = args.scratch or args.image.parent
    require_folder(scratch, "--scratch")
    caches = _caches(args)
    start = time.monotonic()
    found = rebuild.rebuild(args.image, args.repository.absolute(), caches, scratch)
    if found:
        print(f"NOT REPRODUCED {digest}", *(f"  {line}" for line in found), sep="\n")
        return 1
    seconds = round(time.monotonic() - start, 1)
    print(f"reproduced bit by bit in {seconds:.0f} s: {digest}")
    if args.record:
        _write_record(args.record, {"schema": "sparkinfer/rebuilt/v1", "digest": digest, "seconds": seconds})
    return 0


def _write_record(path: Path, record: dict[str, Any]) -> None:
    write_text(path, json.dumps(record, indent=1, sort_keys=True) + "\n")


def _claims(recipe: settings.Recipe) -> dict[str, str]:
    """What a private certificate says of the source: the GitHub CLI looks for an owner and a repository."""
    workflow = f"{recipe.source}/.github/workflows/release.yml@refs/tags/v{recipe.version}"
    return {
        "source_owner": recipe.source.rsplit("/", 1)[0],
        "source_repository": recipe.source,
        "job_workflow": workflow,
        "job_workflow_uri": workflow,
    }


def _attest(args: argparse.Namespace) -> int:
    layout = Layout(args.image / "layout")
    image = layout.image()
    record = inputs.image_record(args.image, "reference", "digest", "variant", "name", "source_digest")
    recipe = settings.load(args.repository, record["variant"], record["name"])
    if args.raw:
        inputs.folder_given(args.raw, "--raw")
    made = _image_statements(args.image, record, args.builder)
    start = time.monotonic()
    evaluation = _evaluation(args, record, image.digest) if args.report else None
    kept = attest.kept_bundle(args.report, evaluation) if evaluation and not args.resign else None
    wanted = [evaluation] if evaluation and not kept else []
    with credentials(args.trust, claims=_claims(recipe)) as held:
        bundles = sign([*made, *wanted], held)  # all or nothing: no file is touched before
    for item in attest.attach_all(layout, image, made, bundles[: len(made)]):
        print(f"attached {item.annotations['dev.sigstore.bundle.predicateType']} to {image.digest}")
    if evaluation:
        if args.resign:
            attest.set_aside(args.report)
        bundle = kept or attest.put_bundle(args.report, evaluation, bundles[-1])
        print(f"signed {bundle}")
        if attest.subject_digest(evaluation) == image.digest:
            attest.exchange(layout, image, args.report, bundle)
            print(f"attached the evaluation to {image.digest}")
    print(f"signed and attached in {time.monotonic() - start:.2f} s, trust: {args.trust}")
    return 0


def _evaluation(args: argparse.Namespace, record: dict[str, Any], digest: str) -> dict[str, Any]:
    """The evaluation statement to sign with an image: about it, or with --source-report about its source tree."""
    earlier = None
    if args.resign:
        known = sorted((args.repository / "containers" / "trusted_roots").glob("*.json"))
        own = default_folder() / "trusted_root.json"
        earlier = attest.host_evaluation(args.report, [*known, *([own] if own.is_file() else [])])
    made = attest.evaluation(args.report, args.raw, earlier)
    accepted = {digest, record["source_digest"]} if args.source_report else {digest}
    if attest.subject_digest(made) not in accepted:
        raise UsageProblem(
            f"{args.report} measured {attest.subject_digest(made)}, not {digest}: it says nothing about this image"
            + ("" if args.source_report else " (--source-report takes one of the image's source tree)")
        )
    return made


def _image_statements(folder: Path, record: dict[str, Any], builder: str | None = None) -> list[dict[str, Any]]:
    """Provenance and SBOM statements of an image that `build` made."""
    name = record["reference"].rsplit(":", 1)[0]
    provenance = inputs.json_object(folder / "provenance.json", "a folder that `build` made")
    try:
        check_provenance(provenance)
    except SignatureProblem as problem:
        raise UsageProblem(f"{folder / 'provenance.json'}: {problem}") from problem
    if builder:
        provenance["runDetails"]["builder"]["id"] = builder
    sbom = inputs.json_object(folder / "sbom.json", "a folder that `build` made")
    return [statement(name, record["digest"], PROVENANCE, provenance), statement(name, record["digest"], SBOM, sbom)]


def _command_line(argv: list[str]) -> str:
    """The command as it was given; of paths that only this machine has, the last name."""
    short = (Path(part).name if part.startswith("/") else part for part in argv)
    return shlex.join(["python", "-m", "sparkinfer_containers", *short])


def _figures(args: argparse.Namespace) -> int:
    recipe = settings.load(args.repository, args.variant)
    if args.model:
        inputs.folder_given(args.model, "--model")
    require_folder(args.output, "--output")
    require_folder(args.scratch, "--scratch")

    def sign_image(folder: Path) -> None:
        record = inputs.image_record(folder, "reference", "digest")
        layout = Layout(folder / "layout")
        with credentials("private", claims=_claims(recipe)) as held:
            attest.sign_and_attach(layout, layout.image(), _image_statements(folder, record), held)

    made = figures.measure(
        recipe, args.repository.absolute(), args.model, args.scratch, sign_image, args.shown or _command_line(args.argv)
    )
    figures.write(made, args.output)
    return 0


def _find_report(args: argparse.Namespace) -> int:
    recipe = settings.load(args.repository, "cpu")
    digest = Layout(args.image / "layout").image().digest
    record = inputs.image_record(args.image, "source_digest") if args.source_report else {}
    print(attest.find_report(args.repository / "reports", recipe.version, digest, record.get("source_digest")))
    return 0


def _sign_report(args: argparse.Namespace) -> int:
    if args.raw:
        inputs.folder_given(args.raw, "--raw")
    made = attest.evaluation(args.report, args.raw)
    recipe = settings.load(args.repository, "cpu")
    start = time.monotonic()
    with credentials(args.trust, claims=_claims(recipe)) as held:
        bundle = attest.sign_report(args.report, made, held)
    print(f"signed {bundle} ({made['predicateType']})")
    if args.image:
        layout = Layout(args.image / "layout")
        image = layout.image()
        if attest.subject_digest(made) != image.digest:
            raise UsageProblem(f"{args.report} did not measure {image.digest}: its evaluation is not attached to it")
        attest.exchange(layout, image, args.report, bundle)
        print(f"attached the evaluation to {image.digest}")
    print(f"in {time.monotonic() - start:.2f} s, trust: {args.trust}")
    return 0


def _push(args: argparse.Namespace) -> int:
    layout = Layout(args.image / "layout" if (args.image / "layout").is_dir() else args.image)
    image, reference = layout.image(), Reference.parse(args.reference)
    with Registry(reference) as registry:
        registry.push_image(layout, image, reference.tag)
        for item in layout.referrers(image.digest):
            print(f"attached by {registry.push_referrer(layout, item)}: {item.digest}")
    print(f"{reference.host}/{reference.name}@{image.digest}")
    return 0


def _pull(args: argparse.Namespace) -> int:
    reference = Reference.parse(args.reference)
    require_unpackable(args.output)
    with Registry(reference, anonymous=args.anonymous) as registry:
        digest = reference.digest or registry.resolve(reference.tag or "latest").digest
        unpack_image(registry, digest, args.output)
    print(f"{reference.host}/{reference.name}@{digest} unpacked in {args.output}")
    return 0


def _unpack(args: argparse.Namespace) -> int:
    layout = Layout(args.image / "layout" if (args.image / "layout").is_dir() else args.image)
    digest = layout.image().digest
    unpack_image(layout, digest, args.output)
    print(f"{digest} unpacked in {args.output}")
    return 0


def _run(args: argparse.Namespace) -> int:
    given, log = inputs.environment(args.env), Path(args.log)
    require_image(args.unpacked)
    if args.models:
        inputs.folder_given(args.models, "--models")
    require_appendable(log, "--log")
    with start(args.unpacked, log, environment=given, models=args.models, arguments=args.arguments) as container:
        return _forward_signals(container)


def _serve(args: argparse.Namespace) -> int:
    """Like `sparkinfer serve`, but the engine is the image's: what the sweep starts to measure what ships."""
    require_image(args.unpacked)
    inputs.folder_given(args.model, "MODEL")
    model = args.model.resolve()
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED) and name not in NOT_PASSED}
    arguments = ["serve", f"/models/{model.name}", *args.arguments]
    trace, writable = passed.get("SPARKINFER_STEP_TRACE"), None
    if trace:
        require_appendable(Path(trace), "SPARKINFER_STEP_TRACE:")
        writable = Path(trace).resolve().parent
        passed["SPARKINFER_STEP_TRACE"] = f"{SHARED}/{Path(trace).name}"
    with start(
        args.unpacked, Path("/dev/stderr"), environment=passed, models=model.parent, writable=writable,
        arguments=arguments,
    ) as container:  # fmt: skip
        return _forward_signals(container)


def _forward_signals(container: Container | daemon.Daemon) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: container.signal(received))
    return container.process.wait()


def _ship(args: argparse.Namespace) -> int:
    inputs.folder_given(args.model, "--model")
    require_file(args.record, "--record", make_folder=True)
    _write_record(
        args.record, ship.ship(args.image, args.model, args.work, args.trusted_root, args.evaluated, args.device)
    )
    return 0


def _until_signalled() -> None:
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()


def _registry(args: argparse.Namespace) -> int:
    with loopback.registry(args.storage) as host:
        print(host, flush=True)
        _until_signalled()
    return 0


def _instance(args: argparse.Namespace) -> int:
    with instance.running(args.state, args.port) as served:
        print(f"private sigstore instance (integrity only) on {served.base_url}", flush=True)
        print(f"trusted root: {served.instance.trusted_root_file}", flush=True)
        _until_signalled()
    return 0


def _trust_config(args: argparse.Namespace) -> int:
    trust_root(args.root)  # refuses what is none
    root = json.loads(args.root.read_text(encoding="utf-8"))
    print(json.dumps(client_config(root, root["certificateAuthorities"][0]["uri"]), indent=1))
    return 0


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sparkinfer_containers", description=__doc__)
    parser.add_argument("--repository", type=_path, default=ROOT, help="checkout to work on (default: this one)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    cached = argparse.ArgumentParser(add_help=False)
    deb_cache = os.environ.get("DEB_CACHE") or ROOT / ".cache" / "debs"
    wheel_cache = os.environ.get("WHEEL_CACHE") or ROOT / ".cache" / "wheels"
    cached.add_argument("--deb-cache", type=_path, default=Path(deb_cache), help="folder of .deb files [DEB_CACHE]")
    cached.add_argument("--wheel-cache", type=_path, default=Path(wheel_cache), help="folder of wheels [WHEEL_CACHE]")
    cached.add_argument("--scratch", type=_path, help="folder for temporary files (default: beside the output)")
    signing = argparse.ArgumentParser(add_help=False)
    signing.add_argument("--trust", choices=("public", "private"), default="private", help="default: %(default)s")
    signing.add_argument("--raw", type=_path, metavar="results/RUN", help="raw results whose digests are signed too")

    def add(name: str, run: Any, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, parents=list(parents))
        made.set_defaults(run=run)
        return made

    made = add("build", _build, "build the image into a new folder", cached)
    made.add_argument("--variant", choices=("cpu", "cuda13"), default="cpu")
    made.add_argument("--name", help=f"image name [{settings.NAME_SETTING}]")
    made.add_argument("--output", type=_path, required=True)
    made.add_argument("--revision", default="HEAD", help="commit whose files go in (default: %(default)s)")
    made = add("relock", _relock, "take the present package versions into containers/locks/", cached)
    made.add_argument("variants", nargs="*", default=["cpu", "cuda13"])
    made = add("rebuild-check", _rebuild_check, "build again elsewhere and compare bit by bit", cached)
    made.add_argument("image", type=_path, help="folder that `build` made")
    made.add_argument("--record", type=_path, help="JSON file that is written when the digests are equal")
    sourced = argparse.ArgumentParser(add_help=False)
    sourced.add_argument("--source-report", action="store_true", help="accept a report of the image's source tree")
    made = add("attest", _attest, "sign provenance, SBOM and evaluation and attach them", signing, sourced)
    made.add_argument("image", type=_path, help="folder that `build` made")
    made.add_argument("--report", type=_path, help="reports/RUN that measured this image: signed and attached")
    made.add_argument(
        "--resign",
        action="store_true",
        help="sign the report anew once what its host signed verifies; the host's bundles move to bundles/host/",
    )
    made.add_argument("--builder", help="builder.id of the provenance, for a hosted build")
    made = add("figures", _figures, "build, rebuild, sign, ship: the container's figures, from empty caches")
    made.add_argument("--variant", choices=("cpu", "cuda13"), default="cpu")
    made.add_argument("--model", type=_path, help="folder that the pulled image serves (default: it is only examined)")
    made.add_argument("--scratch", type=_path, required=True, help="folder for temporary files")
    made.add_argument("--output", type=_path, required=True, help="folder that gets README.md and figures.json")
    made.add_argument("--shown", help="command that the page names (default: this one)")
    made = add("find-report", _find_report, "print the report folder that a release of this image publishes", sourced)
    made.add_argument("image", type=_path)
    made = add("sign-report", _sign_report, "sign a report folder", signing)
    made.add_argument("report", type=_path)
    made.add_argument("--image", type=_path, help="image folder that the report measured: attach the evaluation to it")
    made = add("push", _push, "push an image and its attestations")
    made.add_argument("image", type=_path)
    made.add_argument("reference", help="HOST/NAME:TAG")
    made = add("pull", _pull, "pull an image by digest or tag and unpack it")
    made.add_argument("reference")
    made.add_argument("output", type=_path)
    made.add_argument("--anonymous", action="store_true", help="without credentials, as any user would")
    made = add("unpack", _unpack, "unpack an image for `run`")
    made.add_argument("image", type=_path)
    made.add_argument("output", type=_path)
    made = add("run", _run, "run an unpacked image under bubblewrap")
    made.add_argument("unpacked", type=_path)
    made.add_argument("--models", type=_path, help="folder shown read-only at /models")
    made.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    made.add_argument("--log", default="/dev/stderr")
    made.add_argument("arguments", nargs="*")
    made = add("serve", _serve, "run `sparkinfer serve MODEL ...` from an unpacked image")
    made.add_argument("model", type=_path)
    made.add_argument("--unpacked", type=_path, required=True, help="folder that `unpack` or `pull` made")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of `sparkinfer serve`")
    made = add("ship", _ship, "push an attested image to a loopback registry, verify, pull, run and ask it")
    made.add_argument("image", type=_path)
    made.add_argument("--model", type=_path, required=True, help="model folder that the pulled image serves")
    made.add_argument("--work", type=_path, required=True, help="folder for the registry and the unpacked image")
    made.add_argument("--record", type=_path, required=True, help="JSON file with what was proved and the times")
    made.add_argument("--trusted-root", type=_path)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--run", dest="evaluated", help="name of the run whose evaluation has to be attached")
    made = add("registry", _registry, "serve a docker-registry on loopback until SIGTERM")
    made.add_argument("storage", type=_path)
    made = add("instance", _instance, "serve the private sigstore instance on loopback until SIGTERM")
    made.add_argument("--state", type=_path, help="its folder (default: ATTEST_STATE or the XDG state folder)")
    made.add_argument("--port", type=inputs.port, default=0, help="0 to 65535; 0 (default): any free one")
    made = add(
        "trust-config", _trust_config, "print a trusted_root.json in the form that sigstore-python's command takes"
    )
    made.add_argument("root", type=_path, metavar="TRUSTED_ROOT")
    return parser


@command_line
def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = _parser().parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    try:
        return int(args.run(args))
    except SparkinferError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"error: {error.filename or 'a file'} cannot be read or written: {error.strerror}", file=sys.stderr)
        return EnvironmentProblem.exit_code


if __name__ == "__main__":
    sys.exit(main())
