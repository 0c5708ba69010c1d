"""Benchmark cells: `config/cells.yaml` checked and resolved at a scale into complete definitions.

A resolved `Cell` holds everything that decides what is measured; its digest names the measurement, so that a changed
definition can never reuse an old number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from sparkinfer.errors import ConfigError
from sparkinfer.identity import json_digest

CELLS_SCHEMA_NAME = "sparkinfer/cells/v1"
_POSITIVE = {"type": "integer", "minimum": 1}
_FRACTION = {"type": "number", "minimum": 0, "maximum": 1}
_BY_CONCURRENCY = {"type": "object", "minProperties": 1, "additionalProperties": _POSITIVE}
_SAMPLING = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "temperature": {"type": "number", "minimum": 0},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": 1},
        "min_p": _FRACTION,
    },
}


def _object(properties: dict[str, Any], required: bool = True) -> dict[str, Any]:
    found = {"type": "object", "additionalProperties": False, "properties": properties}
    return found | ({"required": list(properties)} if required else {})


SCALE_PROPERTIES: dict[str, Any] = {
    # `all`, or the ids to run.
    "cells": {"anyOf": [{"const": "all"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]},
    # Prompt and output lengths are divided by it.
    "length_divisor": _POSITIVE,
    # Measured and warm-up requests of a closed-loop cell, by its concurrency.
    "requests": _BY_CONCURRENCY,
    "warmup_requests": _BY_CONCURRENCY,
    # Arrival rates are multiplied by it.
    "rate_factor": {"type": "number", "exclusiveMinimum": 0},
    "arrival_requests": {"type": "integer", "minimum": 2},
    # Share of a request's time that may pass between the load generator's decision to send it and the send: that long
    # the asked load was not offered. Joins the cell's gates.
    "start_delay_share": _FRACTION,
    # Relative difference between the planned and the realised arrival rate. Joins the gates too.
    "arrival_rate": _FRACTION,
    # Seconds after which one request, or the whole load generator, counts as hung.
    "request_timeout_s": _POSITIVE,
    "timeout_s": _POSITIVE,
}
SCALE_OVERRIDES_SCHEMA = _object(SCALE_PROPERTIES, required=False)
DOCUMENT_SCHEMA = _object(
    {
        "schema": {"const": CELLS_SCHEMA_NAME},
        "shapes": {
            "type": "object",
            "minProperties": 1,
            "propertyNames": {"pattern": "^[a-z][a-z_]*$"},
            "additionalProperties": _object({"prompt_tokens": _POSITIVE, "output_tokens": _POSITIVE}),
        },
        "concurrencies": {"type": "array", "items": _POSITIVE, "minItems": 1, "uniqueItems": True},
        "arrivals": {
            "type": "object",
            "propertyNames": {"pattern": "^poisson-r[0-9]+$"},
            "additionalProperties": _object({"rate": {"type": "number", "exclusiveMinimum": 0}}),
        },
        "mix": _object(
            {
                "prompt_tokens": _POSITIVE,
                "short_share": _FRACTION,
                "short_tokens": _POSITIVE,
                "long_tokens": {"type": "array", "items": _POSITIVE, "minItems": 2, "maxItems": 2},
            }
        ),
        "sampling": _object({"closed": _SAMPLING, "open": _SAMPLING}),
        "gates": _object(
            {
                # Relative difference between the load generator's own summary and the same figures from its records.
                "summary_agreement": _FRACTION,
                # Share of the prompt tokens that a prefix cache may have served.
                "prefix_cache_hits": _FRACTION,
            }
        ),
        "scales": {"type": "object", "minProperties": 1, "additionalProperties": _object(SCALE_PROPERTIES)},
    }
)


@dataclass(frozen=True)
class Cell:
    """What is measured, complete. `kind` is `closed` (a fixed number of requests in flight) or `poisson`.

    Lengths are tokens; `prompt_tokens` includes the chat template's. Closed-loop fields are None in an open-loop cell
    and the other way round.
    """

    id: str
    kind: str
    prompt_tokens: int
    requests: int
    warmup_requests: int
    sampling: dict[str, float]
    gates: dict[str, float]
    request_timeout_s: int
    timeout_s: int
    output_tokens: int | None = None
    concurrency: int | None = None
    rate: float | None = None
    short_share: float | None = None
    short_tokens: int | None = None
    long_tokens: tuple[int, int] | None = None
    ignore_eos: bool = True
    streaming: bool = True
    endpoint: str = "chat"

    @property
    def longest(self) -> int:
        """Tokens of context that the longest request needs."""
        outputs = (self.output_tokens, self.short_tokens, *(self.long_tokens or ()))
        return self.prompt_tokens + max(tokens for tokens in outputs if tokens is not None)

    def definition(self) -> dict[str, Any]:
        """The cell as JSON values, without the fields that do not apply to its kind."""
        values = dataclasses.asdict(self)
        if self.long_tokens is not None:
            values["long_tokens"] = list(self.long_tokens)
        return {name: value for name, value in values.items() if value is not None}


def cell_digest(cell: Cell) -> str:
    """`sha256:<hex>` of the resolved definition."""
    return json_digest(cell.definition())


def cell_from_definition(definition: Mapping[str, Any]) -> Cell:
    """The inverse of `Cell.definition`. Raises ConfigError on missing or unknown fields."""
    values = dict(definition)
    if values.get("long_tokens") is not None:
        values["long_tokens"] = tuple(values["long_tokens"])
    try:
        return Cell(**values)
    except TypeError as error:
        raise ConfigError(f"not a cell definition: {error}") from error


def _validate(value: object, schema: dict[str, Any], what: str) -> None:
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(value))
    if error is not None:
        place = ".".join(str(part) for part in error.absolute_path) or "top level"
        raise ConfigError(f"{what}: {place}: {error.message}")


def _text_keys(value: Any) -> Any:
    """YAML's integer keys (`requests: {1: 8}`) as text, as JSON Schema and JSON want them."""
    if isinstance(value, Mapping):
        return {str(key): _text_keys(item) for key, item in value.items()}
    return [_text_keys(item) for item in value] if isinstance(value, list) else value


def load_cells(path: Path) -> dict[str, Any]:
    """Read and check a cells file. Raises ConfigError naming the file, the place and the fault."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist: name the cells file (config/cells.yaml)") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name the cells file") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    document = _text_keys(document)
    _validate(document, DOCUMENT_SCHEMA, str(path))
    low, high = document["mix"]["long_tokens"]
    if low > high:
        raise ConfigError(f"{path}: mix.long_tokens: {low} is above {high}")
    return document


def all_ids(document: Mapping[str, Any]) -> list[str]:
    """Ids of every cell the document defines, in table order."""
    closed = [f"{shape}-c{c}" for shape in document["shapes"] for c in document["concurrencies"]]
    return closed + list(document["arrivals"])


def resolve_scale(
    document: Mapping[str, Any], scale: str, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The named scale with a profile's overrides (whole keys, but single entries of the by-concurrency maps).

    Raises ConfigError on an unknown scale or key, or an id that no cell has.
    """
    if scale not in document["scales"]:
        raise ConfigError(f"unknown scale {scale!r}: the cells file has {', '.join(document['scales'])}")
    changes = _text_keys(dict(overrides or {}))
    _validate(changes, SCALE_OVERRIDES_SCHEMA, "overrides of the scale")
    found = dict(document["scales"][scale])
    for name, value in changes.items():
        found[name] = found[name] | value if isinstance(value, dict) else value
    for name in ("requests", "warmup_requests"):
        missing = [str(c) for c in document["concurrencies"] if str(c) not in found[name]]
        if missing:
            raise ConfigError(f"scale {scale}: {name} lacks concurrency {', '.join(missing)}")
    if found["cells"] != "all":
        unknown = [name for name in found["cells"] if name not in all_ids(document)]
        if unknown:
            raise ConfigError(
                f"scale {scale}: no cell is called {', '.join(unknown)}; there are {', '.join(all_ids(document))}"
            )
    return found


def resolve_cells(
    document: Mapping[str, Any], scale: str, overrides: Mapping[str, Any] | None = None
) -> dict[str, Cell]:
    """Id to resolved cell, in table order, of the cells that the scale runs. Raises ConfigError as `resolve_scale`."""
    settings = resolve_scale(document, scale, overrides)
    divisor = settings["length_divisor"]

    def scaled(tokens: int) -> int:
        return max(1, tokens // divisor)

    common = {
        "gates": document["gates"] | {name: settings[name] for name in ("arrival_rate", "start_delay_share")},
        "request_timeout_s": settings["request_timeout_s"],
        "timeout_s": settings["timeout_s"],
    }
    cells = {}
    for shape, lengths in document["shapes"].items():
        for concurrency in document["concurrencies"]:
            name = f"{shape}-c{concurrency}"
            cells[name] = Cell(
                id=name,
                kind="closed",
                prompt_tokens=scaled(lengths["prompt_tokens"]),
                output_tokens=scaled(lengths["output_tokens"]),
                concurrency=concurrency,
                requests=settings["requests"][str(concurrency)],
                warmup_requests=settings["warmup_requests"][str(concurrency)],
                sampling=dict(document["sampling"]["closed"]),
                **common,
            )
    mix = document["mix"]
    for name, arrival in document["arrivals"].items():
        cells[name] = Cell(
            id=name,
            kind="poisson",
            prompt_tokens=scaled(mix["prompt_tokens"]),
            requests=settings["arrival_requests"],
            warmup_requests=2,
            rate=arrival["rate"] * settings["rate_factor"],
            short_share=mix["short_share"],
            short_tokens=scaled(mix["short_tokens"]),
            long_tokens=(scaled(mix["long_tokens"][0]), scaled(mix["long_tokens"][1])),
            sampling=dict(document["sampling"]["open"]),
            **common,
        )
    wanted = all_ids(document) if settings["cells"] == "all" else settings["cells"]
    return {name: cells[name] for name in all_ids(document) if name in wanted}


def longest_request(cells: Mapping[str, Cell]) -> int:
    """Tokens of context (prompt + output) that a server must allow to run these cells."""
    return max(cell.longest for cell in cells.values())
