"""Why two builds of one image differ: the first differing layer, and every path in it that differs."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

from sparkinfer_containers.oci.layout import Layout

LISTED = 50


def _entries(path: Path) -> dict[str, tuple[object, ...]]:
    """Path -> what decides equality: type, mode, owner, time, link target, content digest."""
    found: dict[str, tuple[object, ...]] = {}
    with tarfile.open(path, "r:") as tar:
        for entry in tar:
            source = tar.extractfile(entry) if entry.isreg() else None
            digest = hashlib.sha256(source.read()).hexdigest() if source else ""
            found[entry.name] = (entry.type, entry.mode, entry.uid, entry.gid, entry.mtime, entry.linkname, digest)
    return found


FIELDS = ("type", "mode", "owner", "group", "mtime", "link target", "content")


def differences(first: Layout, second: Layout) -> list[str]:
    """One line for each thing that differs between two images; empty when they are the same image."""
    ours, theirs = first.image(), second.image()
    if ours.digest == theirs.digest:
        return []
    manifests = [json.loads(layout.manifest(image.digest)) for layout, image in ((first, ours), (second, theirs))]
    lines = []
    for number, (left, right) in enumerate(zip(manifests[0]["layers"], manifests[1]["layers"], strict=False), 1):
        if left["digest"] != right["digest"]:
            lines += [
                f"layer {number}: {line}"
                for line in _layer(first.blob_path(left["digest"]), second.blob_path(right["digest"]))
            ]
    configs = [json.loads(layout.blob_path(m["config"]["digest"]).read_bytes()) for layout, m in
               zip((first, second), manifests, strict=True)]  # fmt: skip
    for key in sorted(configs[0].keys() | configs[1].keys()):
        if key not in ("rootfs",) and configs[0].get(key) != configs[1].get(key):
            lines.append(f"config: {key} is {configs[0].get(key)!r:.300} and {configs[1].get(key)!r:.300}")
    if len(manifests[0]["layers"]) != len(manifests[1]["layers"]):
        lines.append(f"{len(manifests[0]['layers'])} and {len(manifests[1]['layers'])} layers")
    return lines or ["manifest: annotations differ"]


def _layer(left: Path, right: Path) -> list[str]:
    ours, theirs = _entries(left), _entries(right)
    lines = []
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs or name not in ours:
            lines.append(f"{name} is in the {'first' if name in ours else 'second'} only")
        elif ours[name] != theirs[name]:
            fields = [field for field, a, b in zip(FIELDS, ours[name], theirs[name], strict=True) if a != b]
            lines.append(f"{name} differs in {', '.join(fields)}")
    if not lines:
        lines = ["same entries in another order"]
    return lines if len(lines) <= LISTED else [*lines[:LISTED], f"and {len(lines) - LISTED} more"]
