"""Put an image together: layers, config, manifest, and the records that its attestations are made from."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sparkinfer_eval.plan.identity import source_tree_digest

from sparkinfer.errors import ConfigError
from sparkinfer.identity import file_sha256
from sparkinfer_containers import statements
from sparkinfer_containers.entrypoint import OWN
from sparkinfer_containers.image import debs, rootfs, sbom, sizes, tools, wheels
from sparkinfer_containers.image.settings import Recipe
from sparkinfer_containers.oci.layers import write_layer
from sparkinfer_containers.oci.layout import Layout
from sparkinfer_containers.oci.model import CONFIG, LAYER, MANIFEST, Descriptor, canonical

LIBRARY = "opt/sparkinfer/lib"
SOURCE_LABEL = "io.github.gittensor-ai-lab.sparkinfer.source-digest"
"""Label with the digest of the engine's source tree in the image: what a run from that source is identified by."""
PORT = 8000
HEAVY = ("torch", "torchgen", "functorch", "triton", "nvidia")
"""Top-level packages that get a layer of their own: they change with torch only."""
WRAPPER = f"""#!/bin/sh
# The engine refuses unknown SPARKINFER_ variables; these are the container's own.
unset {" ".join(OWN)}
exec /usr/bin/python3 -m sparkinfer.cli "$@"
"""


@dataclass(frozen=True, slots=True)
class Caches:
    """Folders that downloads are kept in; both can be carried to another machine."""

    debs: Path
    wheels: Path


def _python_trees(recipe: Recipe, files: dict[str, Path], work: Path) -> tuple[Path, Path, list[wheels.LeftOut]]:
    """Installed wheels as two trees, (torch and its libraries, all others), and what was left out."""
    site = work / "site"
    left_out = wheels.install(recipe, files, site, work)
    heavy = work / "heavy"
    heavy.mkdir()
    for path in sorted(site.iterdir()):
        base = path.name.split("-")[0].split(".")[0]
        if base in HEAVY or base.startswith("nvidia"):
            path.rename(heavy / path.name)
    return heavy, site, left_out


def _project_tree(wheel: Path, recipe: Recipe, work: Path) -> Path:
    """The project's package and command, as a tree that starts at the root."""
    tree = work / "project"
    wheels.install(recipe, {file_sha256(wheel): wheel}, tree / LIBRARY, work)
    command = tree / "usr" / "local" / "bin" / "sparkinfer"
    command.parent.mkdir(parents=True)
    command.write_text(WRAPPER, encoding="utf-8")
    command.chmod(0o755)
    return tree


def _stamp(epoch: int) -> str:
    return datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def oci_annotations(recipe: Recipe, commit: str, created: int, source_digest: str) -> dict[str, str]:
    """OCI annotations, used as labels too."""
    prefix = "org.opencontainers.image"
    return {
        f"{prefix}.title": recipe.name,
        f"{prefix}.description": f"{recipe.preset.title}, variant {recipe.variant.name}",
        f"{prefix}.version": recipe.version,
        f"{prefix}.revision": commit,
        f"{prefix}.source": recipe.source,
        f"{prefix}.documentation": f"{recipe.source}/blob/v{recipe.version}/docs/container.md",
        f"{prefix}.licenses": "Apache-2.0",
        f"{prefix}.created": _stamp(created),
        SOURCE_LABEL: source_digest,
    }


def config(
    recipe: Recipe, layers: list[tuple[str, Descriptor]], annotations: dict[str, str], created: int
) -> dict[str, Any]:
    """The image config: non-root user, init as PID 1, health check, model volume, settings as environment."""
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": f"/{LIBRARY}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "HOME": "/tmp",
        "HF_HOME": "/models/.hub",
        "TRITON_CACHE_DIR": "/tmp/triton",
        "SPARKINFER_HOST": "0.0.0.0",
        "SPARKINFER_PORT": str(PORT),
        **recipe.preset.environment(),
    }
    python = "/usr/bin/python3"
    return {
        "architecture": debs.ARCHITECTURE,
        "os": "linux",
        "created": _stamp(created),
        "config": {
            "User": f"{recipe.user}:{recipe.user}",
            "Env": [f"{key}={value}" for key, value in environment.items()],
            "Entrypoint": ["/usr/bin/tini", "--", python, "-m", "sparkinfer_containers.entrypoint"],
            "Cmd": [],
            "WorkingDir": "/",
            "ExposedPorts": {f"{PORT}/tcp": {}},
            "Volumes": {"/models": {}},
            "StopSignal": "SIGTERM",
            "Labels": annotations,
            "Healthcheck": {
                "Test": ["CMD", python, "-m", "sparkinfer_containers.health"],
                "Interval": 10_000_000_000,
                "Timeout": 5_000_000_000,
                "StartPeriod": 600_000_000_000,
                "Retries": 3,
            },
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.digest for _, layer in layers]},
        "history": [{"created": _stamp(recipe.epoch), "created_by": f"sparkinfer image: {name}"} for name, _ in layers],
    }


def dependencies(
    recipe: Recipe, commit: str, lock: debs.DebianLock, locked: list[wheels.Wheel], project: Path
) -> list[dict[str, Any]]:
    """resolvedDependencies of the provenance: source, locks, debs, wheels, build backend, each with its digest."""
    made: list[dict[str, Any]] = [{"uri": f"git+{recipe.source}", "digest": {"gitCommit": commit}, "name": "source"}]
    for path in (recipe.debian_lock, recipe.python_lock, recipe.backend_lock, recipe.containers / "image.toml"):
        made.append(
            {"name": f"containers/{path.relative_to(recipe.containers)}", "digest": {"sha256": file_sha256(path)}}
        )
    made.append({"name": project.name, "digest": {"sha256": file_sha256(project)}})
    for deb in lock.debs:
        uri = f"pkg:deb/debian/{deb.name}@{deb.version}?arch={deb.architecture}"
        made.append({"uri": uri, "digest": {"sha256": deb.sha256}})
    for wheel in locked:
        made.append({"uri": f"pkg:pypi/{wheel.name.lower()}@{wheel.version}", "digest": {"sha256": wheel.sha256}})
    for wheel in wheels.read_lock(recipe.backend_lock):
        uri = f"pkg:pypi/{wheel.name.lower()}@{wheel.version}"
        made.append({"uri": uri, "digest": {"sha256": wheel.sha256}, "name": "build backend"})
    return made


def build(
    recipe: Recipe,
    repository: Path,
    output: Path,
    caches: Caches,
    scratch: Path | None = None,
    revision: str = "HEAD",
) -> dict[str, Any]:
    """Build the image into the new folder `output`: `layout/`, `image.json`, `provenance.json`, `sbom.json`.

    The project's own files are those of `revision`; recipe and locks are the working tree's, and their digests are in
    the provenance.

    Returns the content of image.json. Raises ConfigError when `output` exists or `revision` does not,
    EnvironmentProblem when a package or a program is missing. The folder appears by rename, complete.
    """
    if output.exists():
        raise ConfigError(f"{output} exists: remove it or choose another --output")
    wheels.require_revision(repository, revision)
    output.parent.mkdir(parents=True, exist_ok=True)
    place = (scratch or output.parent).absolute()  # programs run in other folders
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=place) as folder:
        work = Path(folder)
        work.chmod(0o755)  # mmdebstrap's apt reads the packages as its own user
        made, record = work / "made", _build(recipe, repository, revision, work, caches)
        (made / "image.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        shutil.move(made, output)
    return record


def _layers(
    recipe: Recipe, lock: debs.DebianLock, files: tuple[dict[str, Path], dict[str, Path]], project: Path, layout: Layout
) -> tuple[list[tuple[str, Descriptor]], dict[str, dict[str, int]], list[wheels.LeftOut]]:
    """The four layers; bytes by package of each; what was left out."""
    work = layout.path.parents[1]
    heavy, site, left_out = _python_trees(recipe, files[1], work)
    tar = work / "layer.tar"
    rootfs.build(recipe, lock, files[0], tar, work)
    packages = {"Debian": sizes.of_debian(tar)}
    layers = [("Debian", layout.add_file(LAYER, tar))]
    tree = _project_tree(project, recipe, work)
    for name, root, prefix in (("torch", heavy, LIBRARY), ("Python packages", site, LIBRARY), ("sparkinfer", tree, "")):
        packages[name] = sizes.of_python(root / LIBRARY if name == "sparkinfer" else root)
        write_layer(tar, root, prefix, recipe.epoch)
        shutil.rmtree(root)  # the CUDA variant's trees and layers together would not fit on a hosted runner
        layers.append((name, layout.add_file(LAYER, tar)))
    return layers, packages, left_out


def _build(recipe: Recipe, repository: Path, revision: str, work: Path, caches: Caches) -> dict[str, Any]:
    lock = debs.DebianLock.read(recipe.debian_lock)
    files = debs.fetch(lock, caches.debs), wheels.fetch(recipe, caches.wheels)
    locked = wheels.read_lock(recipe.python_lock)
    commit, created = wheels.commit_of(repository, recipe, revision)
    source = wheels.project_source(repository, commit, work)
    source_digest = source_tree_digest(source)
    backend = wheels.fetch(recipe, caches.wheels, recipe.backend_lock)
    project = wheels.project_wheel(source, recipe.epoch, work, backend)
    layout = Layout.create(work / "made" / "layout")
    layers, packages, left_out = _layers(recipe, lock, files, project, layout)
    annotations = oci_annotations(recipe, commit, created, source_digest)
    stored = layout.add(CONFIG, canonical(config(recipe, layers, annotations, created)))
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": stored.to_json(),
        "layers": [layer.to_json() for _, layer in layers],
        "annotations": annotations,
    }
    image = layout.tag(layout.add(MANIFEST, canonical(manifest)), recipe.tag)
    parameters = {"name": recipe.name, "variant": recipe.variant.name, "version": recipe.version, "commit": commit}
    provenance = statements.provenance(
        external_parameters={**parameters, "source": recipe.source, "epoch": recipe.epoch},
        internal_parameters={"tools": tool_versions(recipe)},
        dependencies=dependencies(recipe, commit, lock, locked, project),
        builder_id=statements.SELF_BUILDER,
        invocation_id=f"{commit[:12]}-{recipe.variant.name}",
    )
    made = work / "made"
    (made / "provenance.json").write_text(json.dumps(provenance, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    own = wheels.Wheel("sparkinfer", recipe.version, file_sha256(project))
    (made / "sbom.json").write_text(sbom.make(recipe, image.digest, lock, [*locked, own]), encoding="utf-8")
    return {
        "schema": "sparkinfer/image/v1",
        "reference": recipe.reference,
        "digest": image.digest,
        "size": image.size,
        **parameters,
        "source_digest": source_digest,
        "config_digest": stored.digest,
        "layers": [
            {"name": name, "digest": layer.digest, "size": layer.size, "packages": packages[name]}
            for name, layer in layers
        ],
        "unpacked_bytes": sum(layer.size for _, layer in layers),
        "left_out": [asdict(item) for item in left_out],
    }


def tool_versions(recipe: Recipe) -> dict[str, str]:
    """Programs that took part in the build; those of the build backend are locked."""
    shown = tools.run([tools.need("mmdebstrap"), "--version"]).split()[-1]
    locked = {wheel.name: wheel.version for wheel in wheels.read_lock(recipe.backend_lock)}
    return {"mmdebstrap": shown, "pip": version("pip"), **locked}
