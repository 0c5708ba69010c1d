"""Settings of a run: the base file, the profile's file and the command line, merged and checked."""

from __future__ import annotations

import copy
import difflib
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkinfer.errors import ConfigError
from sparkinfer_eval.plan.schema import read_yaml, validate

PROFILE_OF_CAPABILITY = {"9.0": "h200", "12.0": "rtx5090"}
STATED = ("models", "scale", "scale_overrides", "cells_file")
"""What a profile's `scale_statement` is about."""


def detect_profile() -> tuple[str, str]:
    """(profile, why) by what the host has. Raises ConfigError for a GPU that no profile is made for."""
    if shutil.which("nvidia-smi") is None:
        return "cpu", "no nvidia-smi on this host"
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    rows = [line.split(",") for line in done.stdout.splitlines() if "," in line]
    if done.returncode != 0 or not rows:
        return "cpu", "nvidia-smi lists no GPU"
    name, capability = (part.strip() for part in rows[0])
    profile = PROFILE_OF_CAPABILITY.get(capability)
    if profile is None:
        raise ConfigError(
            f"no profile is made for {name} (compute capability {capability}): choose one with "
            "--config profile=NAME or --profile workflow/profiles/NAME"
        )
    return profile, f"{name}, compute capability {capability}"


def _overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`: nested mappings are merged, all else is replaced."""
    merged = copy.deepcopy(dict(base))
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _overlay(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def load_config(base: Path, profiles: Path, schema: Path, over: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The merged settings and why their profile was chosen.

    `over` holds what the command line set; it counts for `smoke` too. Raises ConfigError for a missing file, an unknown
    key (with the closest name) or a value that does not fit.
    """
    settings = _overlay(read_yaml(base), over)
    name = settings.get("profile", "auto")
    why = "named"
    if name == "auto":
        name, why = detect_profile()
    path = profiles / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in profiles.glob("*.yaml"))
        near = difflib.get_close_matches(str(name), known, n=1)
        raise ConfigError(
            f"profile is {name!r}: " + (f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}")
        )
    usual = _overlay(read_yaml(base), read_yaml(path))
    merged = _overlay(usual, over)
    merged["profile"] = name
    validate(merged, schema, f"configuration ({base.name}, {path.name}, command line)")
    smoke = merged["smoke"]
    for key in (over.keys() & smoke.keys()) - over.get("smoke", {}).keys():
        smoke |= _overlay({key: smoke[key]}, {key: over[key]})
    _restate(merged, usual)
    return merged, why


def _restate(merged: dict[str, Any], usual: Mapping[str, Any]) -> None:
    """Replace the profile's `scale_statement` where the command line changed what it is about and gave none."""
    for target, settings in (("release", merged), ("smoke", merged["smoke"])):
        now, then = for_target(merged, target), for_target(usual, target)
        changed = [key for key in STATED if now.get(key) != then.get(key)]
        if changed and now.get("scale_statement") == then.get("scale_statement"):
            what = " and ".join(changed)
            settings["scale_statement"] = f"Scale {now['scale']}, with {what} set for this run: see the tables."


def for_target(settings: Mapping[str, Any], target: str) -> dict[str, Any]:
    """The settings of one target: `release` as they are, `smoke` with its changes."""
    own = {key: copy.deepcopy(value) for key, value in settings.items() if key != "smoke"}
    if target == "smoke":
        for key, value in settings["smoke"].items():
            own[key] = copy.deepcopy(value)
    return own
