"""The plan of one run: engines, models, cells, order, and the name that follows from their identities.

The name is version-profile-digest8. The digest covers the engines' identities and start commands, the models, the
resolved cells and the baseline's pinned packages; there is no clock in it, so that the same inputs give the same run
and changed code gives a new one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError
from sparkinfer.identity import json_digest, short
from sparkinfer_eval.cells import Cell, cell_digest, load_cells, longest_request, resolve_cells, resolve_scale
from sparkinfer_eval.plan import identity
from sparkinfer_eval.plan.engines import Engine, load_engine

LOCKS_OF = {
    "cpu": ("torch-cpu.txt", "engine.txt", "aiperf.txt"),
    "cuda": ("torch-cuda.txt", "engine.txt", "aiperf.txt"),
}
ACCURACY = "accuracy"
ACCURACY_ENGINES = ("sparkinfer", "vllm")
"""The check that compares these two engines' answers (workflow/rules/accuracy.smk)."""
PREVIOUS = "previous"
ACCURACY_PREVIOUS = "accuracy_previous"
"""The same of the engine and its last release, wherever that is part of a run with the accuracy gate."""
LOCK_OF = {"cpu": "vllm.txt", "cuda": "vllm-cuda.txt"}


@dataclass(frozen=True, slots=True)
class EngineUse:
    """One engine of a run. `identity` is what its name stands for; `tag` is set for an engine made from a release."""

    engine: Engine
    identity: Any
    version: str
    tag: str | None = None

    @property
    def digest(self) -> str:
        """`sha256:<hex>`: the identity itself for a source tree, otherwise of its JSON form."""
        return self.identity if isinstance(self.identity, str) else json_digest(self.identity)


@dataclass(frozen=True, slots=True)
class ModelUse:
    """One model of a run. `definition` says exactly what it is, before it exists."""

    name: str
    label: str
    source: dict[str, Any]
    dtype: str
    max_model_len: int
    random_weights: bool
    definition: dict[str, Any]

    @property
    def short_digest(self) -> str:
        """First digits of the definition's digest, for the folder's name."""
        return short(json_digest(self.definition))


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that one target measures. `slots` is the order in which servers follow one another."""

    target: str
    run: str
    version: str
    profile: str
    device: str
    settings: dict[str, Any]
    engines: dict[str, EngineUse]
    models: dict[str, ModelUse]
    cells: dict[str, Cell]
    slots: tuple[tuple[int, str, int, str], ...]

    def priority(self, block: int, model: str, rep: int, engine: str) -> int:
        """Higher runs earlier: all cells of one server's slot come before those of the next."""
        return len(self.slots) - self.slots.index((block, model, rep, engine))

    def results(self, kind: str | None = None) -> list[str]:
        """Relative paths of every raw result, optionally of one kind of cell (`closed`, `poisson`)."""
        return [
            f"results/{self.run}/b{block}/{engine}/{model}/{cell.id}/r{rep}/result.json"
            for block, model, rep, engine in self.slots
            for cell in self.cells.values()
            if kind is None or cell.kind == kind
        ]

    def check_names(self) -> list[str]:
        """The checks of the settings, and the gate against the last release where there is one."""
        names = list(self.settings["checks"])
        return [*names, ACCURACY_PREVIOUS] if ACCURACY in names and PREVIOUS in self.engines else names

    def checks(self) -> list[str]:
        """Relative paths of every check's JSON.

        Raises ConfigError when the accuracy gate is one and an engine that it compares is not part of the run.
        """
        absent = [name for name in ACCURACY_ENGINES if name not in self.engines]
        if ACCURACY in self.settings["checks"] and absent:
            raise ConfigError(
                f"checks: {ACCURACY} compares {' with '.join(ACCURACY_ENGINES)}, and engines lacks "
                f"{', '.join(absent)}: add it there, or take {ACCURACY} out of checks"
            )
        return [
            f"results/{self.run}/checks/{check}-{model}.json" for check in self.check_names() for model in self.models
        ]

    def device_checks(self) -> list[str]:
        """Those that need the device without a server on it: all but the accuracy gates, which ask the servers."""
        gates = f"{ACCURACY}-", f"{ACCURACY_PREVIOUS}-"
        return [path for path in self.checks() if not Path(path).name.startswith(gates)]


def _engine_use(root: Path, engine: Engine, device: str, image_digest: str | None) -> EngineUse | None:
    """An engine with its identity; None for a release engine while there is no release."""
    kind = engine.source["kind"]
    if kind == "tree":
        return EngineUse(engine, image_digest or identity.source_tree_digest(root), identity.project_version(root))
    if kind == "tag":
        tag = identity.release_tag(root, engine.source.get("tag_pattern", "v*"))
        if tag is None:
            return None
        return EngineUse(engine, identity.tag_source_digest(root, tag), tag.removeprefix("v"), tag)
    package = engine.source.get("packages", {}).get(device)
    if package is None:
        raise ConfigError(f"engine {engine.name} names no package for device {device}: add it under source.packages")
    lock = root / "workflow" / "envs" / LOCK_OF[device]
    version = identity.locked_version(lock, package)
    return EngineUse(engine, {"package": package, "version": version, "lock": identity.file_digest(lock)}, version)


def engine_file(root: Path, settings: Mapping[str, Any], name: str, image_digest: str | None) -> Path:
    """An engine's file: of an engine that is started from the image, the one under containers/engines/."""
    own = root / "containers" / "engines" / f"{name}.yaml"
    return own if image_digest and own.is_file() else root / settings.get("engine_folder", "config/engines") / own.name


def load_engines(root: Path, settings: Mapping[str, Any], image_digest: str | None) -> dict[str, EngineUse]:
    """The run's engines by name. Raises ConfigError for a missing or malformed engine file."""
    schema = root / "workflow" / "schemas" / "engine.schema.yaml"
    found = {}
    for name in settings["engines"]:
        engine = load_engine(engine_file(root, settings, name, image_digest), schema)
        use = _engine_use(root, engine, settings["device"], image_digest)
        if use is not None:
            found[name] = use
    return found


def _definition(root: Path, source: Mapping[str, Any]) -> dict[str, Any]:
    """What a model is: generator, seed and size; or a folder's digest (or `missing`); or hub id and commit."""
    if "generate" in source:
        own = {"generate": source["generate"], "seed": source.get("seed", 0), "size": dict(source.get("size", {}))}
        return {**own, "generator": identity.generator_digest(root)}
    if "hub" in source:
        return {"hub": source["hub"], "revision": source["revision"]}
    folder = root / source["folder"]
    if not folder.exists():
        return {"missing": source["folder"]}
    return {"digest": identity.folder_digest(folder, root / "results" / "cache" / "model-digests")}


def load_models(root: Path, settings: Mapping[str, Any], cells: Mapping[str, Cell]) -> dict[str, ModelUse]:
    """The run's models by name. Raises ConfigError for a name given twice, a missing folder or too short a context."""
    needed = longest_request(cells)
    found: dict[str, ModelUse] = {}
    for model in settings["models"]:
        name = model["name"]
        if name in found:
            raise ConfigError(f"models: {name!r} is listed twice: give each its own name")
        # A little more than the longest request, rounded up to a whole number of KV blocks.
        length = model.get("max_model_len", -(-(needed + 32) // 16) * 16)
        if length < needed:
            raise ConfigError(
                f"models: {name}: max_model_len is {length}, but the longest cell needs {needed}: raise it"
            )
        found[name] = ModelUse(
            name=name,
            label=model.get("label", name),
            source=dict(model["source"]),
            dtype=model["dtype"],
            max_model_len=length,
            random_weights=model.get("random_weights", False) or _is_random(root, model["source"]),
            definition=_definition(root, model["source"]),
        )
    return found


def _is_random(root: Path, source: Mapping[str, Any]) -> bool:
    """Whether a model's weights are random by what it is made of, whatever the settings call it."""
    return "generate" in source or ("folder" in source and identity.has_random_weights(root / source["folder"]))


def _slots(
    settings: Mapping[str, Any], engines: Mapping[str, EngineUse], models: Mapping[str, ModelUse]
) -> tuple[tuple[int, str, int, str], ...]:
    """(block, model, rep, engine) in running order; each block draws its own order of the engines."""
    slots = []
    for block in range(1, settings["blocks"] + 1):
        order = list(engines)
        random.Random(f"{settings['order_seed']}:{block}").shuffle(order)
        slots += [(block, m, rep, e) for m in models for rep in range(1, settings["reps"] + 1) for e in order]
    return tuple(slots)


def engine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of the caller that set up an engine (SPARKINFER_*, VLLM_*): they change what is measured."""
    own = {name: value for name, value in environ.items() if name.startswith(("SPARKINFER_", "VLLM_"))}
    own.pop("SPARKINFER_IMAGE_DIGEST", None)
    return dict(sorted(own.items()))


def make_plan(root: Path, target: str, settings: dict[str, Any], image_digest: str | None = None) -> Plan:
    """The plan of one target. Raises ConfigError for settings that contradict each other or the files."""
    document = load_cells(root / settings.get("cells_file", "config/cells.yaml"))
    overrides = settings.get("scale_overrides", {})
    cells = resolve_cells(document, settings["scale"], overrides)
    engines = load_engines(root, settings, image_digest)
    models = load_models(root, settings, cells)
    absent = [name for name in settings["checks"] if not (root / "eval" / f"{name}.py").is_file()]
    if absent:
        raise ConfigError(f"checks: there is no program eval/{absent[0]}.py: see eval/ for those that there are")
    version = identity.project_version(root)
    # A smoke run says so in its name.
    profile = settings["profile"] if target == "release" else f"{settings['profile']}-{target}"
    named_by = {
        "engines": {name: [use.identity, use.engine.raw] for name, use in engines.items()},
        "models": {name: [m.definition, m.dtype, m.max_model_len] for name, m in models.items()},
        "cells": {name: cell_digest(cell) for name, cell in cells.items()},
        "design": [settings["blocks"], settings["reps"], settings["order_seed"], settings.get("prompt_seed", 1)],
        "checks": [settings["checks"], settings.get("accuracy", {})],
        "locks": {
            name: identity.file_digest(root / "workflow" / "envs" / name) for name in LOCKS_OF[settings["device"]]
        },
        "environment": engine_environment(os.environ),
    }
    resolved = {**settings, "resolved_scale": resolve_scale(document, settings["scale"], overrides)}
    return Plan(
        target=target,
        run=f"{version}-{profile}-{short(json_digest(named_by))}",
        version=version,
        profile=profile,
        device=settings["device"],
        settings=resolved,
        engines=engines,
        models=models,
        cells=cells,
        slots=_slots(settings, engines, models),
    )
