"""Python packages of the image: locked wheels, and the project's own wheel built from a commit."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import Requirement

from sparkinfer.errors import ConfigError, EnvironmentProblem
from sparkinfer.identity import file_sha256
from sparkinfer_containers.image.settings import Recipe, Variant
from sparkinfer_containers.image.symbols import drop_symbols
from sparkinfer_containers.image.tools import need, run

PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"),
)
"""Platforms that Debian 12 (glibc 2.36) runs, newest first."""
SOURCES = (
    "pyproject.toml", "LICENSE", "sparkinfer", "kernels/sparkinfer_kernels",
    *(f"containers/sparkinfer_containers/{name}.py" for name in ("__init__", "entrypoint", "health")),
)  # fmt: skip
"""What of the repository goes into the image: the engine and what starts it, nothing of the evaluation."""
_LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+) --hash=sha256:(?P<digest>[0-9a-f]{64})\Z")


@dataclass(frozen=True, slots=True)
class Wheel:
    """One locked wheel."""

    name: str
    version: str
    sha256: str


def read_lock(path: Path) -> list[Wheel]:
    """The wheels of a lock (`name==version --hash=sha256:...` lines). Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}): make it with `make relock`") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise ConfigError(f"{path}:{number}: not a locked wheel: expected name==version --hash=sha256:...")
        found.append(Wheel(match["name"], match["version"], match["digest"]))
    return found


def _target_options(recipe: Recipe) -> list[str]:
    digits = recipe.python.replace(".", "")
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={recipe.python}"]
    options += [f"--abi={abi}" for abi in (f"cp{digits}", "abi3", "none")]
    return options + [f"--platform={platform}" for platform in PLATFORMS]


def _pip() -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]


def _torch_index() -> list[str]:
    index = os.environ.get("TORCH_INDEX")
    return [f"--extra-index-url={index}"] if index else []


def fetch(recipe: Recipe, cache: Path, lock: Path | None = None) -> dict[str, Path]:
    """Every wheel of a lock (the variant's) in `cache`, by digest. Raises EnvironmentProblem when one is not had."""
    cache.mkdir(parents=True, exist_ok=True)
    wanted = read_lock(lock or recipe.python_lock)
    have = {file_sha256(path): path for path in cache.glob("*.whl")}
    absent = [wheel for wheel in wanted if wheel.sha256 not in have]
    # torch has an index of its own. The others are not looked for there, so that they come where that index is out of
    # reach, and without pip's waits for it; torch itself may lie in a folder that pip is set to use.
    torch = [wheel for wheel in absent if wheel.name == "torch"]
    _download(recipe, [wheel for wheel in absent if wheel.name != "torch"], cache, [])
    try:
        _download(recipe, torch, cache, [])
    except EnvironmentProblem:
        if not _torch_index():
            raise
        _download(recipe, torch, cache, _torch_index())
    have = {file_sha256(path): path for path in cache.glob("*.whl")}
    missing = [wheel.name for wheel in wanted if wheel.sha256 not in have]
    if missing:
        raise EnvironmentProblem(f"wheels with the locked digest are not to be had: {', '.join(missing)}")
    return {wheel.sha256: have[wheel.sha256] for wheel in wanted}


def _download(recipe: Recipe, wheels: Sequence[Wheel], cache: Path, options: Sequence[str]) -> None:
    """Have pip bring locked wheels into `cache`. Raises EnvironmentProblem when it cannot."""
    if not wheels:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as lock:
        lock.writelines(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in wheels)
        lock.flush()
        command = [*_pip(), "download", "--no-deps", "--require-hashes", f"--dest={cache}", f"--find-links={cache}"]
        run([*command, *options, *_target_options(recipe), f"--requirement={lock.name}"])


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What one pattern of the recipe took out of the installed packages."""

    pattern: str
    reason: str
    paths: int
    bytes: int


def install(recipe: Recipe, files: dict[str, Path], target: Path, work: Path) -> list[LeftOut]:
    """Install wheels into `target` without compiling, less what the recipe omits and strips; returns what that was.

    `bin/` is dropped with its RECORD lines: its scripts name the build's interpreter.
    """
    lock = work / "wheels.txt"
    lock.write_text("".join(f"{path}\n" for _, path in sorted(files.items())), encoding="utf-8")
    command = [*_pip(), "install", "--no-compile", "--no-deps", "--no-index", f"--target={target}"]
    options = ["--ignore-requires-python", *_target_options(recipe), f"--requirement={lock}"]
    run([*command, *options], extra={"TMPDIR": str(work)})  # pip unpacks there first
    shutil.rmtree(target / "bin", ignore_errors=True)
    for record in target.glob("*.dist-info/RECORD"):
        kept = [line for line in record.read_text().splitlines() if not line.startswith(("../", "bin/"))]
        record.write_text("\n".join(sorted(kept)) + "\n", encoding="utf-8")
    for leftover in target.glob("*.dist-info/direct_url.json"):
        leftover.unlink()  # names the cache folder of this build
        _forget(leftover)
    return [*omit(target, recipe.omit, recipe.kept), *strip(target, recipe.stripped)]


def _forget(path: Path) -> None:
    record = path.with_name("RECORD")
    name = f"{path.parent.name}/{path.name},"
    kept = [line for line in record.read_text().splitlines() if not line.startswith(name)]
    record.write_text("\n".join(kept) + "\n", encoding="utf-8")


def _size(path: Path) -> int:
    if path.is_symlink():
        return 0
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def omit(target: Path, patterns: Mapping[str, str], kept: Collection[str] = ()) -> list[LeftOut]:
    """Delete what the patterns name, except the paths `kept`; returns what was there, by pattern."""
    gone = []
    for pattern, reason in patterns.items():
        count = size = 0
        for path in sorted(target.glob(pattern)):
            if path.relative_to(target).as_posix() in kept or not (path.exists() or path.is_symlink()):
                continue  # to stay, or gone with its parent
            count, size = count + 1, size + _size(path)
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if count:
            gone.append(LeftOut(pattern, reason, count, size))
    return gone


def strip(target: Path, patterns: Sequence[str]) -> list[LeftOut]:
    """Take symbol tables out of the shared libraries that the patterns name; returns what that saved, by pattern."""
    gone = []
    for pattern in patterns:
        saved = [
            drop_symbols(path) for path in sorted(target.glob(pattern)) if path.is_file() and not path.is_symlink()
        ]
        if any(saved):
            gone.append(LeftOut(pattern, "symbol and debug sections", sum(map(bool, saved)), sum(saved)))
    return gone


def inputs(recipe: Recipe) -> list[str]:
    """Paths of the repository that decide what is in the image, besides the builder itself."""
    locks = (recipe.debian_lock, recipe.python_lock, recipe.backend_lock)
    named = [path.relative_to(recipe.containers.parent).as_posix() for path in locks]
    return [*SOURCES, "containers/image.toml", *named]


def require_revision(repository: Path, revision: str) -> None:
    """Raises ConfigError unless `revision` names a commit of `repository`."""
    git = [need("git"), "-C", str(repository)]
    try:
        run([*git, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"])
    except EnvironmentProblem as error:
        raise ConfigError(f"--revision {revision} is no commit of {repository}: name one of a git checkout") from error


def commit_of(repository: Path, recipe: Recipe, revision: str = "HEAD") -> tuple[str, int]:
    """Id and time (unix seconds) of the last commit up to `revision` that changed what goes into the image.

    So a commit of a report or of documentation makes no other image. Raises EnvironmentProblem in a shallow clone,
    which does not know that commit.
    """
    git = [need("git"), "-C", str(repository)]
    if run([*git, "rev-parse", "--is-shallow-repository"]).strip() != "false":
        raise EnvironmentProblem(f"{repository} is a shallow clone: git fetch --unshallow, then build again")
    shown = run([*git, "log", "-1", "--format=%H %ct", revision, "--", *inputs(recipe)]).split()
    if not shown:
        raise EnvironmentProblem(f"{revision} holds no source of this project: is {repository} its checkout?")
    return shown[0], int(shown[1])


def project_source(repository: Path, commit: str, work: Path) -> Path:
    """The project's files of a commit that go into the image, unpacked: nothing of the working tree gets in."""
    source, archive = work / "source", work / "source.tar"
    source.mkdir(parents=True)
    run([need("git"), "-C", str(repository), "archive", f"--output={archive}", commit, "--", *SOURCES])
    run([need("tar"), "-xf", str(archive), "-C", str(source)])
    # pyproject.toml names it as the package's description; the image's shall not change with the README's wording.
    (source / "README.md").write_text("sparkinfer\n", encoding="utf-8")
    return source


def project_wheel(source: Path, epoch: int, work: Path, backend: Mapping[str, Path]) -> Path:
    """The project's wheel, built from `project_source` by the locked build backend (wheels by digest) and nothing else.

    pip makes the backend an environment of its own, in which neither this one's packages nor its settings are seen.
    """
    output, tools = work / "wheel", work / "backend"
    tools.mkdir()
    for path in backend.values():
        shutil.copy(path, tools)
    command = [*_pip(), "wheel", "--no-deps", "--no-index", f"--find-links={tools}", "--no-cache-dir"]
    alone = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_NO_BUILD_ISOLATION": ""}
    extra = {"SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0", **alone}
    run([*command, f"--wheel-dir={output}", "."], cwd=source, extra=extra)
    (made,) = output.glob("*.whl")
    return made


BACKEND = ("setuptools",)
"""What builds the project's wheel: the backend that pyproject.toml names. It brings what it writes the archive with."""


def relock_backend(recipe: Recipe, repository: Path) -> list[Wheel]:
    """Resolve the build backend within the engine's own lock."""
    return relock(replace(recipe, variant=Variant("build", [], list(BACKEND), ["engine.txt"], [])), repository)


def relock(recipe: Recipe, repository: Path) -> list[Wheel]:
    """Resolve the variant's Python packages within the project's own locks; one wheel each."""
    locks = repository / "workflow" / "envs"
    command = [*_pip(), "install", "--dry-run", "--ignore-installed", "--quiet", "--report=-", "--target=/nonexistent"]
    command += [*_torch_index(), *_target_options(recipe)]
    constraint = [pin for name in recipe.variant.constraints for pin in pins(locks / name, recipe.python)]
    free = set(recipe.variant.unconstrained)
    chosen = [pin for pin in _unique(constraint) if pin.split("==")[0].lower() not in free]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as handle:
        handle.write("\n".join(chosen) + "\n")
        handle.flush()
        text = run([*command, f"--constraint={handle.name}", *recipe.variant.python])
    found = []
    for item in json.loads(text)["install"]:
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        found.append(Wheel(item["metadata"]["name"], item["metadata"]["version"], digest))
    return sorted(found, key=lambda wheel: wheel.name.lower())


def pins(path: Path, python: str) -> list[str]:
    """`name==version` of a hashed lock for one Python version on Linux x86-64, hashes left out."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
        "platform_system": "Linux",
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
        "os_name": "posix",
    }
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if "==" not in line or line.startswith((" ", "#")):
            continue
        required = Requirement(line.split("--hash")[0].rstrip().rstrip("\\"))
        if required.marker is None or required.marker.evaluate(environment):
            found.append(f"{required.name}{required.specifier}")
    return found


def _unique(pins: list[str]) -> list[str]:
    """The first pin of every package: earlier locks win."""
    chosen: dict[str, str] = {}
    for pin in pins:
        chosen.setdefault(pin.split("==")[0].lower().replace("_", "-"), pin)
    return list(chosen.values())


def write_lock(wheels: list[Wheel], path: Path, purpose: str) -> None:
    """Write a wheel lock; `purpose` says what the wheels do."""
    head = f"# Wheels {purpose}; made by `make relock`, resolved within workflow/envs/.\n"
    lines = [f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in wheels]
    path.write_text(head + "".join(lines), encoding="utf-8")
