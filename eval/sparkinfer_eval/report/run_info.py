"""`results/<run>/run.json`: what was run, with what, and on which machine (schema `sparkinfer/run/v1`).

The workflow declares the run (a JSON or YAML file with the fields of `DECLARED`); this module adds the facts of the
machine, the source tree and the environments, checks the whole against the schema and writes it by rename.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from sparkinfer.errors import ConfigError
from sparkinfer_eval.report.machine import environment_packages, machine_facts, source_facts

RUN_SCHEMA = "sparkinfer/run/v1"
DECLARED = (
    "run",
    "version",
    "profile",
    "scale",
    "engines",
    "models",
    "cells",
    "checks",
    "blocks",
    "reps",
    "commands",
    "container",
)
"""Fields that the caller declares; all others are collected here."""


def load_schema(name: str) -> dict[str, Any]:
    """A JSON schema shipped in this package, e.g. `run-v1`."""
    text = resources.files(__package__).joinpath("schemas", f"{name}.schema.json").read_text(encoding="utf-8")
    return json.loads(text)


def validate(data: Any, schema: str, where: str) -> None:
    """Check JSON data against a shipped schema. Raises ConfigError that names the place and the rule."""
    validator = jsonschema.Draft202012Validator(load_schema(schema))
    problems = sorted(validator.iter_errors(data), key=lambda e: [str(p) for p in e.absolute_path])
    if problems:
        lines = [f"  {'/'.join(map(str, p.absolute_path)) or '(top)'}: {p.message[:300]}" for p in problems[:8]]
        raise ConfigError(f"{where} does not fit schema {schema}:\n" + "\n".join(lines))


def read_declaration(path: Path) -> dict[str, Any]:
    """The caller's declaration, JSON or YAML. Raises ConfigError for unreadable files and unknown fields."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist: it declares what was run") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name the file that declares the run") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is neither JSON nor YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold one object with the fields {', '.join(DECLARED)}")
    unknown = sorted(set(data) - set(DECLARED))
    if unknown:
        raise ConfigError(f"{path}: unknown fields {', '.join(unknown)}; known are {', '.join(DECLARED)}")
    return data


def collect(declared: dict[str, Any], environments: dict[str, Path], repository: Path) -> dict[str, Any]:
    """A complete, validated run.json: the declared fields plus machine, source and packages of `environments`."""
    info = {
        "schema": RUN_SCHEMA,
        **declared,
        "machine": machine_facts(),
        "source": source_facts(repository),
        "packages": {name: environment_packages(python) for name, python in sorted(environments.items())},
        "written_at": dt.datetime.now(dt.UTC).replace(microsecond=0).isoformat(),
    }
    validate(info, "run-v1", "run information")
    return info


def write_json(path: Path, data: Any) -> None:
    """Write JSON with sorted keys to a temporary name beside `path`, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_run_info(path: Path) -> dict[str, Any]:
    """Read and validate a run.json. Raises ConfigError naming the file and the fault."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist: write it with eval/run_info.py") from error
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}): write it again with eval/run_info.py") from error
    validate(data, "run-v1", str(path))
    return data
