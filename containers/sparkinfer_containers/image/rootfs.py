"""The image's root file system: mmdebstrap over exactly the locked packages, then normalised."""

from __future__ import annotations

import tarfile
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import quote

from sparkinfer_containers.image.debs import ARCHITECTURE, MERGED_USR, DebianLock, repository
from sparkinfer_containers.image.settings import Recipe
from sparkinfer_containers.image.tools import need, run

EXCLUDED = (
    "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/lintian/*", "/usr/share/doc/*",
    "/usr/lib/x86_64-linux-gnu/gconv/*",
)  # fmt: skip
"""Not installed: documentation, translations, iconv's converters (Python has its own). Copyright files: `INCLUDED`."""
INCLUDED = ("/usr/share/doc/*/copyright",)
DROPPED = (
    "dev/*", "proc/*", "sys/*", "run/*", "tmp/*", "var/tmp/*", "var/log/*", "var/cache/*", "var/lib/apt/*",
    "etc/apt/*", "etc/hostname", "etc/resolv.conf", "etc/machine-id", "etc/passwd-", "etc/group-", "etc/shadow-",
    "etc/gshadow-", "var/lib/dpkg/*-old", "var/lib/dpkg/lock*", "var/lib/systemd/*", "var/lib/dbus/machine-id",
    "*/__pycache__/*", "*/__pycache__",
)  # fmt: skip
"""Left out of the layer: what differs between hosts, caches, and what the container runtime mounts over."""


def build(recipe: Recipe, lock: DebianLock, files: dict[str, Path], target: Path, work: Path) -> None:
    """Write the root layer (plain tar) to `target`. Raises EnvironmentProblem when mmdebstrap fails."""
    flat = repository(lock, files, work / "debs")
    raw = work / "raw.tar"
    user = f"sparkinfer:x:{recipe.user}:{recipe.user}:"
    hooks = [
        f'echo "{user}:/tmp:/usr/sbin/nologin" >> "$1/etc/passwd"',
        f'echo "sparkinfer:x:{recipe.user}:" >> "$1/etc/group"',
        f'install -d -o {recipe.user} -g {recipe.user} "$1/models"',
    ]
    options = [f"--dpkgopt=path-exclude={pattern}" for pattern in EXCLUDED]
    options += [f"--dpkgopt=path-include={pattern}" for pattern in INCLUDED]
    command = [need("mmdebstrap"), "--variant=essential", f"--architectures={ARCHITECTURE}", "--format=tar", *options]
    command += [f"--include={','.join(deb.name for deb in lock.debs)}", MERGED_USR]
    command += [f"--customize-hook={hook}" for hook in hooks]
    # apt takes a space for the end of the address.
    command += [lock.suite, str(raw), f"deb [trusted=yes] copy://{quote(str(flat))} ./"]
    run(command, extra={"SOURCE_DATE_EPOCH": str(recipe.epoch), "TMPDIR": str(work)})
    normalise(raw, target, recipe.epoch)
    raw.unlink()


def normalise(source: Path, target: Path, epoch: int) -> None:
    """Rewrite a root tar: sorted, without DROPPED, set-id bits, device nodes and extended headers, mtimes `epoch`."""
    with tarfile.open(source, "r:") as tar_in, tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as tar_out:
        entries = {entry.name.removeprefix("./").rstrip("/"): entry for entry in tar_in}
        linked = {entry.linkname.removeprefix("./") for entry in entries.values() if entry.islnk()}
        ordered = sorted(entries, key=lambda name: (entries[name].islnk(), name))
        for name in ordered:
            entry = entries[name]
            if name in ("", ".") or (any(fnmatch(name, pattern) for pattern in DROPPED) and name not in linked):
                continue
            if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
                continue
            kept = tarfile.TarInfo(name)
            kept.type, kept.mode, kept.mtime = entry.type, entry.mode & 0o1777, epoch
            kept.uid, kept.gid, kept.size = entry.uid, entry.gid, entry.size
            kept.linkname = entry.linkname.removeprefix("./") if entry.islnk() else entry.linkname
            tar_out.addfile(kept, tar_in.extractfile(entry) if entry.isreg() else None)
