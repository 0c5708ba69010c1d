"""Reading YAML that people write: validated against a JSON schema, every complaint names the key and the fix."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from sparkinfer.errors import ConfigError


def read_yaml(path: Path) -> Any:
    """Parse one YAML file. Raises ConfigError when it is missing or is not YAML."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path} does not exist{hint}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error


def _location(error: jsonschema.ValidationError) -> str:
    """Dotted path of the value complained about, e.g. `models[0].source`."""
    text = ""
    for part in error.absolute_path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return text


def _describe(error: jsonschema.ValidationError) -> list[str]:
    """One sentence per fault of one schema error."""
    where = _location(error)
    if (
        error.validator == "additionalProperties"
        and isinstance(error.schema, dict)
        and isinstance(error.instance, dict)
    ):
        known = sorted(error.schema.get("properties", {}))
        sentences = []
        for key in (k for k in error.instance if k not in known):
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            sentences.append(f"unknown key {f'{where}.{key}' if where else key!r}: {hint}")
        return sentences
    if error.validator == "enum":
        near = difflib.get_close_matches(str(error.instance), [str(v) for v in error.validator_value], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(map(str, error.validator_value))}"
        return [f"{where or 'value'} is {error.instance!r}: {hint}"]
    return [f"{where or 'top level'}: {error.message}"]


def validate(data: Any, schema_path: Path, source: str) -> None:
    """Check `data` against a schema file. Raises ConfigError with every fault; an unknown key gets the closest name."""
    validator = jsonschema.Draft202012Validator(read_yaml(schema_path))
    faults: list[str] = []
    for error in sorted(validator.iter_errors(data), key=lambda e: [str(p) for p in e.absolute_path]):
        best = jsonschema.exceptions.best_match([error]) or error
        faults.extend(_describe(best))
    if faults:
        raise ConfigError(f"{source}: " + "; ".join(dict.fromkeys(faults)))
