"""Packages and programs on a host without network: wheels and archives come along, and go into folders of their own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sparkinfer.errors import ConfigError, EnvironmentProblem

LAST_LINES = 25


@dataclass(frozen=True, slots=True)
class Host:
    """Where things lie: the checkout, and a working folder for everything that is made."""

    root: Path
    work: Path

    @property
    def site(self) -> Path:
        """Packages that the host lacks."""
        return self.work / "site"

    @property
    def vllm(self) -> Path:
        """The unpacked vLLM bundle."""
        return self.work / "vllm"

    @property
    def caches(self) -> Path:
        """What Triton, torch, FlashInfer and vLLM compiled, a folder each."""
        return self.work / "cache"

    @property
    def aiperf(self) -> Path:
        """The unpacked AIPerf bundle."""
        return self.work / "aiperf"

    def model(self, name: str) -> Path:
        """A model by name: a folder of the checkout's `models/`, or one that `checkpoint` made."""
        for folder in (Path(name), self.work / "models" / name, self.root / "models" / name):
            if (folder / "config.json").is_file():
                return folder
        raise ConfigError(f"no model {name}: make it with `gpu_host.py checkpoint`, or name a folder")

    def environment(self, engine: str = "sparkinfer") -> dict[str, str]:
        """Variables for a program of ours, or of vLLM or AIPerf."""
        own = [self.root / folder for folder in ("", "kernels", "eval", "models", "containers")]
        paths = {
            "sparkinfer": [*own, self.site],
            "vllm": [self.vllm, self.vllm / "nvidia_cutlass_dsl" / "dsl_packages"],
            "aiperf": [self.aiperf],
        }[engine]
        cache = self.caches
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONUNBUFFERED": "1",
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "FLASHINFER_WORKSPACE_BASE": str(cache / "flashinfer"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }

    def launcher(self, engine: str, *arguments: str) -> Path:
        """An executable that runs Python with an environment's packages, with `arguments` before its own."""
        path = self.work / "bin" / "-".join(["python", engine, *(word.strip("-") for word in arguments)])
        path.parent.mkdir(parents=True, exist_ok=True)
        python = " ".join(map(shlex.quote, [sys.executable, *arguments]))
        packages = shlex.quote(self.environment(engine)["PYTHONPATH"])
        path.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {python} "$@"\n', "utf-8")
        path.chmod(0o755)
        return path


def install_wheels(host: Host, wheels: Path) -> None:
    """Install a folder of wheels into the site folder. Raises ConfigError or EnvironmentProblem."""
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise ConfigError(f"{wheels} holds no wheel: name the folder that the wheels were downloaded to")
    base = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    done = subprocess.run([*base, "--upgrade", "--target", str(host.site), *map(str, files)], check=False)
    if done.returncode:
        raise EnvironmentProblem(f"pip could not install the {len(files)} wheels of {wheels} (code {done.returncode})")


class _Joined:
    """Parts of a split file as one stream."""

    def __init__(self, parts: list[Path]) -> None:
        self._chunks = self._read(parts)
        self._rest = b""

    @staticmethod
    def _read(parts: list[Path]) -> Iterator[bytes]:
        for part in parts:
            with part.open("rb") as handle:
                while chunk := handle.read(1 << 22):
                    yield chunk

    def read(self, size: int) -> bytes:
        while len(self._rest) < size and (chunk := next(self._chunks, b"")):
            self._rest += chunk
        given, self._rest = self._rest[:size], self._rest[size:]
        return given


def unpack(parts: Path, target: Path) -> None:
    """Unpack `part-*` (a split .tar.xz) or a whole .tar.xz into a folder; again is harmless.

    Raises ConfigError when there is none, EnvironmentProblem when it is damaged.
    """
    files = sorted(parts.glob("part-*")) or sorted(parts.glob("*.tar.xz"))
    if not files:
        raise ConfigError(f"{parts} holds neither part-* nor a .tar.xz")
    done = target.with_name(f"{target.name}.done")
    if done.exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(fileobj=_Joined(files), mode="r|xz") as archive:  # type: ignore[call-overload]
            archive.extractall(target, filter="tar")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise EnvironmentProblem(f"{parts} could not be unpacked into {target}: {error}") from error
    done.touch()


def save_caches(host: Host, out: Path) -> list[Path]:
    """Pack each compiler's cache as `<out>/cache-<name>.tar.xz`; returns the archives.

    The next host, with the same card, packages and working folder, then starts both engines without compiling.
    Raises ConfigError when nothing was compiled yet.
    """
    names = sorted(path.name for path in host.caches.glob("*") if path.is_dir() and any(path.iterdir()))
    if not names:
        raise ConfigError(f"{host.caches} is empty: start a server first")
    out.mkdir(parents=True, exist_ok=True)
    packed = []
    for name in names:
        packed.append(out / f"cache-{name}.tar.xz")
        with tarfile.open(packed[-1], "w:xz", preset=1) as archive:
            archive.add((host.caches / name).resolve(), name)
    return packed


def load_caches(host: Host, folder: Path) -> None:
    """Unpack what `save_caches` packed. Raises ConfigError when there is nothing, EnvironmentProblem when damaged."""
    files = sorted(folder.glob("cache-*.tar.xz"))
    if not files:
        raise ConfigError(f"{folder} holds no cache-*.tar.xz")
    host.caches.mkdir(parents=True, exist_ok=True)
    for file in files:
        try:
            with tarfile.open(file, "r:xz") as archive:
                archive.extractall(host.caches, filter="tar")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise EnvironmentProblem(f"{file} could not be unpacked into {host.caches}: {error}") from error


def program(host: Host, name: str, arguments: list[str], log: Path, timeout_s: float) -> int:
    """Run one of our programs with its output in `log`; prints the end of it. Returns its exit code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                [sys.executable, *arguments], cwd=host.root, env=host.environment(), stdout=output,
                stderr=subprocess.STDOUT, timeout=timeout_s, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = 124
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if not line.startswith("USDT:")]
    print(f"-- {name}: code {code}", *lines[-LAST_LINES:], sep="\n", flush=True)
    return code
