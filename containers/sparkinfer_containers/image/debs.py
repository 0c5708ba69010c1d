"""Locked Debian packages: the lock's form, fetching them, and making the lock anew.

A lock names every package of a root file system with version, pool path, size and sha256. Packages are looked for in
the cache (`DEB_CACHE`), then at Debian's mirror and security mirror, then in Debian's snapshot archive as of the
lock's time. A package that none of them has is named; nothing else is taken in its place.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError, EnvironmentProblem
from sparkinfer.identity import file_sha256
from sparkinfer_containers.image.settings import Recipe
from sparkinfer_containers.image.tools import APT_HELPER, need, run

SCHEMA = "sparkinfer/debian-lock/v1"
MIRRORS = ("http://deb.debian.org/debian", "http://deb.debian.org/debian-security")
SNAPSHOTS = ("https://snapshot.debian.org/archive/debian", "https://snapshot.debian.org/archive/debian-security")
ARCHITECTURE = "amd64"
MERGED_USR = "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"
"""mmdebstrap makes /bin, /lib and /sbin links into /usr itself, before any package is unpacked."""


@dataclass(frozen=True, slots=True)
class Deb:
    """One locked package file."""

    name: str
    version: str
    architecture: str
    filename: str
    size: int
    sha256: str

    @property
    def file(self) -> str:
        """Name of the file in a cache: the digest keeps versions of one name apart."""
        return f"{self.name}_{self.sha256[:16]}.deb"


@dataclass(frozen=True, slots=True)
class DebianLock:
    """All packages of one root file system, and the time at which the mirrors had them."""

    suite: str
    snapshot: str
    debs: list[Deb]

    def write(self, path: Path) -> None:
        """Write the lock as JSON, one package a line."""
        lines = ",\n  ".join(json.dumps(asdict(deb), sort_keys=True) for deb in self.debs)
        head = {"schema": SCHEMA, "suite": self.suite, "snapshot": self.snapshot}
        text = json.dumps(head)[:-1] + f', "packages": [\n  {lines}\n]}}\n'
        temporary = path.with_suffix(".part")
        temporary.write_text(text, encoding="utf-8")
        temporary.rename(path)

    @classmethod
    def read(cls, path: Path) -> DebianLock:
        """Read a lock. Raises ConfigError when it is missing or malformed."""
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema is {data['schema']!r}")
            return cls(data["suite"], data["snapshot"], [Deb(**item) for item in data["packages"]])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a Debian package lock ({error}): make it with `make relock`") from error


def sources(lock: DebianLock, mirrors: Iterable[str], snapshots: Iterable[str]) -> list[str]:
    """Base addresses in the order they are asked."""
    return [*mirrors, *(f"{base}/{lock.snapshot}" for base in snapshots)]


def fetch(
    lock: DebianLock, cache: Path, mirrors: Iterable[str] = MIRRORS, snapshots: Iterable[str] = SNAPSHOTS
) -> dict[str, Path]:
    """Every package's file in `cache`, by package name; each has the locked digest.

    Raises EnvironmentProblem (exit 3) naming each package that neither cache, mirrors nor snapshots have.
    """
    cache.mkdir(parents=True, exist_ok=True)
    bases = sources(lock, mirrors, snapshots)
    found, missing = {}, []
    for deb in lock.debs:
        path = cache / deb.file
        if path.exists() and file_sha256(path) != deb.sha256:
            path.unlink()
        if path.exists() or any(_download(f"{base}/{deb.filename}", path, deb) for base in bases):
            found[deb.name] = path
        else:
            missing.append(f"{deb.name} {deb.version}")
    if missing:
        raise EnvironmentProblem(
            f"no longer to be had, neither from the mirrors nor from the snapshot {lock.snapshot}: "
            f"{', '.join(missing)}. Give a folder that holds them (DEB_CACHE=DIR), or take the present versions with "
            "`make relock`, which makes another image."
        )
    return found


def _download(address: str, path: Path, deb: Deb) -> bool:
    """Fetch through apt's own transport (its proxies and certificates apply), checked against the locked digest."""
    if not APT_HELPER.exists():
        raise EnvironmentProblem("apt is not on this machine: images are built on Debian or Ubuntu")
    temporary = path.with_suffix(".part")
    try:
        run([str(APT_HELPER), "download-file", address, str(temporary), f"SHA256:{deb.sha256}"], timeout=300)
    except EnvironmentProblem:
        for leftover in (temporary, temporary.with_name(f"{temporary.name}.FAILED")):
            leftover.unlink(missing_ok=True)
        return False
    if file_sha256(temporary) != deb.sha256 or temporary.stat().st_size != deb.size:
        temporary.unlink()
        return False
    temporary.rename(path)
    return True


def repository(lock: DebianLock, files: dict[str, Path], folder: Path) -> Path:
    """A flat package repository of exactly the locked files, for mmdebstrap."""
    folder.mkdir(parents=True)
    stanzas = []
    for deb in lock.debs:
        target = folder / f"{deb.name}.deb"
        shutil.copyfile(files[deb.name], target)
        control = run([need("dpkg-deb"), "-f", str(target)]).rstrip("\n")
        stanzas.append(f"{control}\nFilename: ./{target.name}\nSize: {deb.size}\nSHA256: {deb.sha256}\n")
    packages = folder / "Packages"
    packages.write_text("\n".join(stanzas), encoding="utf-8")
    release = f"Suite: {lock.suite}\nCodename: {lock.suite}\nArchitectures: {ARCHITECTURE}\nSHA256:\n"
    release += f" {file_sha256(packages)} {packages.stat().st_size} Packages\n"
    (folder / "Release").write_text(release, encoding="utf-8")
    return folder


def relock(recipe: Recipe, cache: Path, work: Path) -> DebianLock:
    """Resolve the variant's packages at Debian's mirrors now, keep the files in `cache`, return the new lock."""
    archives, available = work / "archives", work / "available"
    archives.mkdir(parents=True)
    suite = recipe.suite
    lists = [
        f"deb {MIRRORS[0]} {suite} main",
        f"deb {MIRRORS[0]} {suite}-updates main",
        f"deb {MIRRORS[1]} {suite}-security main",
    ]
    hooks = [
        f'cp "$1"/var/cache/apt/archives/*.deb {archives}/',
        f'APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" apt-cache dumpavail > {available}',
    ]
    snapshot = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    command = [need("mmdebstrap"), "--variant=essential", f"--architectures={ARCHITECTURE}", "--components=main"]
    command += [f"--include={','.join(recipe.variant.packages)}", MERGED_USR]
    command += ["--skip=essential/unlink,cleanup/apt/cache"]
    command += ['--aptopt=Apt::Keep-Downloaded-Packages "true"', *(f"--customize-hook={hook}" for hook in hooks)]
    run([*command, "--format=null", suite, "-", *lists])
    by_digest = {deb.sha256: deb for deb in _stanzas(available.read_text(encoding="utf-8"))}
    cache.mkdir(parents=True, exist_ok=True)
    chosen = []
    for path in archives.glob("*.deb"):
        deb = by_digest[file_sha256(path)]
        shutil.copyfile(path, cache / deb.file)
        chosen.append(deb)
    return DebianLock(suite, snapshot, sorted(chosen, key=lambda deb: deb.name))


def _stanzas(text: str) -> Iterable[Deb]:
    for stanza in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if ": " in line and line[0] != " ")
        if "SHA256" in fields:
            yield Deb(
                name=fields["Package"],
                version=fields["Version"],
                architecture=fields["Architecture"],
                filename=fields["Filename"],
                size=int(fields["Size"]),
                sha256=fields["SHA256"],
            )
