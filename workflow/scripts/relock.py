"""Resolve workflow/envs/*.in again into hashed locks, with a pinned uv in a small environment of its own.

usage: python3 workflow/scripts/relock.py [NAME...]        (engine vllm aiperf snakemake vllm-cuda torch-cuda)

torch's CPU build is left out of the locks: it comes from an index of its own, with its hashes in torch-cpu.txt.
A lock names no index and no host, and no hash of a file that no supported machine takes (`lock_hashes.py`).
Exit codes: 0 done, 3 the resolver or the index cannot be had.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from lock_hashes import needed_only

ROOT = Path(__file__).resolve().parents[2]
ENVS = ROOT / "workflow" / "envs"
UV = ROOT / ".venvs" / "uv"
LEFT_OUT = {
    "engine": ("torch",),
    # Without torchaudio and torchcodec: text models never import them.
    "vllm": ("torch", "torchaudio", "torchcodec"),
}
NAMES = ("engine", "vllm", "aiperf", "snakemake", "vllm-cuda", "torch-cuda")


def uv() -> Path:
    """The pinned uv, installed when it is missing."""
    program = UV / "bin" / "uv"
    if not program.is_file():
        subprocess.run([sys.executable, "-m", "venv", str(UV)], check=True)
        environment = {**os.environ, "PIP_CONSTRAINT": ""}
        pip = [str(UV / "bin" / "python"), "-m", "pip", "install", "--quiet", "-r", str(ENVS / "uv.txt")]
        subprocess.run(pip, check=True, env=environment)
    return program


def sources(name: str) -> list[str]:
    """Options of uv for where torch's CPU build comes from: the folders pip is set to use, else torch's own index."""
    options: list[str] = []
    if name not in LEFT_OUT:
        return options
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    for folder in folders:
        options += ["--find-links", folder]
    if not any(any(Path(folder).glob("torch-*+cpu*.whl")) for folder in folders):
        options += ["--extra-index-url", os.environ.get("TORCH_INDEX") or "https://download.pytorch.org/whl/cpu"]
        options += ["--index-strategy", "unsafe-best-match"]
    return options


def check(text: str, name: str) -> None:
    """Raise ValueError when a lock names a host or a path: it must install from any index."""
    found = re.search(r"(https?://|file://|--find-links|--index-url|--extra-index-url|(?m:^/))\S*", text)
    if found:
        raise ValueError(f"{name}: the lock would name {found.group(0)}")
    pins = re.findall(r"(?m)^[A-Za-z0-9].*==", text)
    if not pins or len(pins) > text.count("--hash=sha256:"):
        raise ValueError(f"{name}: {len(pins)} packages but {text.count('--hash=sha256:')} hashes")


def resolve(name: str) -> None:
    """Resolve one .in file and replace its lock when the result is sound."""
    target = ENVS / f"{name}.txt"
    temporary = target.with_suffix(".txt.tmp")
    command = [
        str(uv()), "pip", "compile", str(ENVS / f"{name}.in"), "--universal", "--python-version", "3.11",
        "--generate-hashes", "--no-header", "--no-annotate", "--no-emit-find-links", "--no-emit-index-url",
        "--quiet", "--output-file", str(temporary), *sources(name),
    ]  # fmt: skip
    for package in LEFT_OUT.get(name, ()):
        command += ["--no-emit-package", package]
    print(f"relock {name} ...", flush=True)
    try:
        subprocess.run(command, check=True)
        temporary.write_text(needed_only(temporary.read_text(encoding="utf-8")), encoding="utf-8")
        check(temporary.read_text(encoding="utf-8"), name)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def main(argv: list[str]) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="Resolve the locks again.")
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], default=[])
    args = parser.parse_args(argv)
    try:
        for name in args.names or NAMES:
            resolve(name)
    except (subprocess.CalledProcessError, OSError, ValueError) as error:
        print(f"error: {error}: is the package index reachable (TORCH_INDEX for torch)?", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
