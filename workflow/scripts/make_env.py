"""Build one of the project's virtual environments from its hashed lock.

usage: python3 workflow/scripts/make_env.py {engine,vllm,aiperf,snakemake}... [--device {cpu,cuda}] [--record FILE]

Standard library only, so that any Python runs it; environments are made with Python 3.11, 3.12 or 3.13. Idempotent: a
stamp in the environment holds the digests of its locks; an interrupted build leaves no stamp and is made again.
torch comes from a wheel that pip finds locally (PIP_FIND_LINKS), otherwise from TORCH_INDEX.
Exit codes: 0 ready, 2 bad input, 3 the machine lacks something (the message says what).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
SUPPORTED = ((3, 11), (3, 12), (3, 13))
STAMP = "sparkinfer-env.json"
LOCKS = {
    ("engine", "cpu"): ("torch-cpu.txt", "engine.txt"),
    ("vllm", "cpu"): ("torch-cpu.txt", "vllm.txt"),
    ("engine", "cuda"): ("torch-cuda.txt", "engine.txt"),
    ("vllm", "cuda"): ("vllm-cuda.txt",),
    ("aiperf", "cpu"): ("aiperf.txt",),
    ("aiperf", "cuda"): ("aiperf.txt",),
    ("snakemake", "cpu"): ("snakemake.txt",),
    ("snakemake", "cuda"): ("snakemake.txt",),
}
HOOKS = {("vllm", "cpu"): "sparkinfer_baseline_hook"}
EDITABLE = {"engine"}


class CannotBuild(Exception):
    """The environment cannot be built; the text says what to do."""


def folder_of(name: str, root: Path = ROOT) -> Path:
    """Where an environment lies."""
    return root / ".venv" if name == "engine" else root / ".venvs" / name


def digest_of(name: str, device: str) -> dict[str, str]:
    """sha256 of every file that decides what is in the environment."""
    envs = ROOT / "workflow" / "envs"
    paths = [envs / lock for lock in LOCKS[name, device]]
    if (name, device) in HOOKS:
        paths.append(envs / "hooks" / f"{HOOKS[name, device]}.py")
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CannotBuild(f"workflow/envs/{missing[0]} is missing: make it with `make relock`")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def find_python() -> str:
    """An interpreter of a supported version: this one, else one found on the path."""
    candidates = [sys.executable] + [f"python3.{minor}" for _, minor in reversed(SUPPORTED)] + ["python3"]
    probe = "import sys, venv, ensurepip; print(sys.version_info[0], sys.version_info[1])"
    without_venv = ""
    for candidate in candidates:
        path = shutil.which(candidate)
        if path is None:
            continue
        done = subprocess.run([path, "-c", probe], capture_output=True, text=True, check=False)
        if done.returncode == 0 and tuple(map(int, done.stdout.split())) in SUPPORTED:
            return path
        if "ensurepip" in done.stderr or "venv" in done.stderr:
            without_venv = candidate
    if without_venv:
        raise CannotBuild(f"{without_venv} has no venv module: apt-get install python3-venv")
    raise CannotBuild("no Python 3.11, 3.12 or 3.13 was found: install one (apt-get install python3 python3-venv)")


def clean_environment() -> dict[str, str]:
    """The environment for pip: no inherited constraints, no user site, no other project's path."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    env.update(PIP_CONSTRAINT="", PIP_DISABLE_PIP_VERSION_CHECK="1", PYTHONNOUSERSITE="1", PIP_NO_INPUT="1")
    return env


def run(command: list[str], log: Path, title: str) -> bool:
    """Run a command, its output appended to `log`, with a line of progress every 15 s; returns success."""
    begun = time.monotonic()
    with log.open("ab") as handle:
        handle.write(("$ " + " ".join(command) + "\n").encode())
        handle.flush()
        child = subprocess.Popen(command, stdout=handle, stderr=subprocess.STDOUT, env=clean_environment())
        try:
            while True:
                try:
                    code = child.wait(15)
                    break
                except subprocess.TimeoutExpired:
                    print(f"{title}: {time.monotonic() - begun:.0f} s ...", flush=True)
        except BaseException:
            child.kill()
            child.wait()
            raise
    return code == 0


def tail(log: Path) -> str:
    """The last telling line of a log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no output"])[-1][:400]


def install_torch(pip: list[str], lock: Path, log: Path, title: str) -> None:
    """Install torch from what pip finds locally, otherwise from TORCH_INDEX."""
    base = [*pip, "install", "--no-deps", "--require-hashes", "-r", str(lock)]
    if run([*base, "--no-index"], log, title):
        return
    index = os.environ.get("TORCH_INDEX") or DEFAULT_TORCH_INDEX
    print(f"{title}: fetching torch from {index}", flush=True)
    if not run([*base, "--index-url", index], log, title):
        raise CannotBuild(
            f"torch could not be installed from TORCH_INDEX={index} ({tail(log)}): set TORCH_INDEX to an index that "
            "this machine reaches (make TORCH_INDEX=URL), or put the wheel into a folder and set PIP_FIND_LINKS to it"
        )


def install(name: str, device: str, python: Path, log: Path) -> None:
    """Install the locks."""
    title = f"environment {name}"
    pip = [str(python), "-m", "pip"]
    for lock in LOCKS[name, device]:
        path = ROOT / "workflow" / "envs" / lock
        print(f"{title}: installing {lock} (log: {log.relative_to(log.parents[2])})", flush=True)
        if lock == "torch-cpu.txt":
            install_torch(pip, path, log, title)
        elif not run([*pip, "install", "--no-deps", "--require-hashes", "-r", str(path)], log, title):
            raise CannotBuild(f"pip could not install {lock} ({tail(log)}): is the package index reachable? Log: {log}")


def install_hook(name: str, device: str, python: Path) -> None:
    """Put the environment's start-up hook, if it has one, beside its packages."""
    if (name, device) in HOOKS:
        hook = HOOKS[name, device]
        script = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        answer = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=True)
        packages = Path(answer.stdout.strip())
        shutil.copyfile(ROOT / "workflow" / "envs" / "hooks" / f"{hook}.py", packages / f"{hook}.py")
        (packages / f"{hook}.pth").write_text(f"import {hook}\n")


def install_project(python: Path, log: Path) -> None:
    """Install the project itself, editable and without its dependencies (the lock has them)."""
    command = [str(python), "-m", "pip", "install", "--no-build-isolation", "--no-deps", "-e", str(ROOT)]
    if not run(command, log, "environment engine"):
        raise CannotBuild(f"the project could not be installed into .venv ({tail(log)}). Log: {log}")


def project_installed(python: Path) -> bool:
    """True when the interpreter imports this checkout's packages, wherever it is started."""
    script = "import sparkinfer, sparkinfer_kernels, sparkinfer_eval; print(sparkinfer.__file__)"
    done = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=False, cwd="/",
                          env=clean_environment())  # fmt: skip
    return done.returncode == 0 and Path(done.stdout.strip()).is_relative_to(ROOT)


def satisfied(name: str, device: str, python: Path) -> bool:
    """True when every pinned package of the locks that applies here is installed in exactly that version."""
    locks = [str(ROOT / "workflow" / "envs" / lock) for lock in LOCKS[name, device]]
    script = """
import sys
from importlib.metadata import PackageNotFoundError, version
from pip._vendor.packaging.requirements import Requirement
for lock in sys.argv[1:]:
    for line in open(lock, encoding="utf-8"):
        if line[0].isspace() or line.startswith(("#", "-")) or "==" not in line:
            continue
        need = Requirement(line.rstrip().rstrip("\\\\").strip())
        if need.marker is not None and not need.marker.evaluate():
            continue
        try:
            have = version(need.name)
        except PackageNotFoundError:
            sys.exit(f"{need.name} is missing")
        if not need.specifier.contains(have, prereleases=True):
            sys.exit(f"{need.name} is {have}, the lock says {need.specifier}")
"""
    done = subprocess.run([str(python), "-c", script, *locks], capture_output=True, text=True, check=False)
    return done.returncode == 0


def build(name: str, device: str, root: Path) -> str:
    """Make one environment what its locks say; returns what was done. Raises CannotBuild."""
    digests = digest_of(name, device)
    folder = folder_of(name, root)
    python = folder / "bin" / "python"
    stamp = folder / STAMP
    log = root / "results" / "logs" / f"environment-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    wanted = {"name": name, "device": device, "files": digests}
    done = "is ready"
    if not (stamp.is_file() and json.loads(stamp.read_text()) == wanted and python.exists()):
        stamp.unlink(missing_ok=True)
        log.write_text("")
        marker = folder / "incomplete"
        if python.exists() and not marker.exists() and satisfied(name, device, python):
            done = "was complete already"
        else:
            done = "was built"
            if folder.exists():
                print(f"environment {name}: making it anew", flush=True)
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
            marker.touch()
            if not run([find_python(), "-m", "venv", str(folder)], log, f"environment {name}"):
                raise CannotBuild(f"the venv module failed ({tail(log)}): apt-get install python3-venv")
            install(name, device, python, log)
            marker.unlink()
        install_hook(name, device, python)
    if name in EDITABLE and root == ROOT and not project_installed(python):
        install_project(python, log)
    if done != "is ready":
        temporary = stamp.with_suffix(".tmp")
        temporary.write_text(json.dumps(wanted, indent=1) + "\n")
        temporary.replace(stamp)
    return done


def main(argv: list[str]) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="Build virtual environments from hashed locks.")
    parser.add_argument("names", nargs="+", choices=sorted({name for name, _ in LOCKS}), metavar="NAME")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--record", type=Path, help="file that says which locks the environments were made from")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder that gets .venv and .venvs")
    args = parser.parse_args(argv)
    root = args.root.resolve()
    for name in args.names:
        lock = root / ".venvs" / f".{name}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            with lock.open("w") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX)
                print(f"environment {name} {build(name, args.device, root)}", flush=True)
        except CannotBuild as error:
            print(f"error: {error}", file=sys.stderr)
            return 3
        except OSError as error:
            print(f"error: environment {name}: {error}: check the folder's rights and the free space", file=sys.stderr)
            return 3
    if args.record is not None:
        args.record.parent.mkdir(parents=True, exist_ok=True)
        record = {name: digest_of(name, args.device) for name in args.names}
        args.record.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
