"""The form all checks share: arguments, the table, the JSON document, the exit codes.

A check is a function from parsed options to rows; each row holds a value against a limit. `run` does the rest:
exit 0 when every row is ok, 1 when one is not, 2 for bad input, 3 when the machine cannot do it, 4 when the check does
not apply to this model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkinfer.errors import CheckpointError, SparkinferError
from sparkinfer.identity import engine_digest, model_digest
from sparkinfer.output import require_file, write_text

SCHEMA = "sparkinfer/check/v1"
PASS, DIFFERENCE, BAD_INPUT, ENVIRONMENT, NOT_APPLICABLE = range(5)
AT_LEAST = "(at least)"
"""Ends the name of a row whose value must not stay below its limit."""


class NotApplicable(SparkinferError):
    """The check has nothing to compare on this model; the message says why."""

    exit_code = NOT_APPLICABLE


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One comparison. `ok` means that `value` is within `limit`; how they are compared is the check's business."""

    name: str
    value: float
    limit: float
    ok: bool


def parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """The arguments every check has: MODEL, --json, --device, --dtype. A check may add its own."""
    result = argparse.ArgumentParser(prog=f"{name}.py", description=text)
    result.add_argument("model", metavar="MODEL", type=Path, help="model folder")
    result.add_argument("--json", metavar="F", type=Path, help="write the rows as JSON there")
    result.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default %(default)s)")
    result.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="default %(default)s"
    )
    return result


def table(rows: Sequence[CheckRow]) -> str:
    """The rows as text, one a line, the differing ones marked."""
    width = max([len(row.name) for row in rows] + [4])
    lines = [f"{'what':{width}}  {'value':>10}  {'limit':>10}"]
    lines += [
        f"{row.name:{width}}  {row.value:10.3g}  {row.limit:10.3g}  {'ok' if row.ok else 'DIFFERS'}" for row in rows
    ]
    return "\n".join(lines)


def write_json(
    path: Path,
    check: str,
    options: argparse.Namespace,
    dtype: str | None,
    rows: Sequence[CheckRow],
    not_applicable: str | None = None,
) -> None:
    """Write the document of a check: temporary name first, then rename. Raises EnvironmentProblem.

    A check that does not apply has no rows, `ok` null and its reason under `not_applicable`.
    """
    document = {
        "schema": SCHEMA,
        "check": check,
        "model_digest": model_digest(options.model),
        "engine_digest": engine_digest(),
        "device": options.device,
        "dtype": dtype,
        "rows": [asdict(row) for row in rows],
        "ok": None if not_applicable else all(row.ok for row in rows),
    }
    if not_applicable:
        document["not_applicable"] = not_applicable
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def run(
    check: str,
    options: argparse.Namespace,
    body: Callable[[argparse.Namespace], tuple[str, list[CheckRow]]],
) -> int:
    """Run a check and return its exit code.

    Args:
        check: its name.
        options: parsed by `parser`.
        body: does the comparing; returns the dtype it ran in and its rows. It may raise SparkinferError.
    """
    try:
        try:
            found = options.model.is_dir()
        except OSError as error:  # a name that is too long, a folder that is closed
            raise CheckpointError(f"{options.model}: {error.strerror}; give a model folder") from error
        if not found:
            raise CheckpointError(f"{options.model} is not a folder: give a model folder")
        if options.json is not None:
            require_file(options.json, "--json")
        return _judged(check, options, body)
    except SparkinferError as error:
        print(f"{check}: {error}", file=sys.stderr)
        # A plain SparkinferError has exit code 1, which here would mean a difference.
        return error.exit_code if error.exit_code != DIFFERENCE else ENVIRONMENT


def _judged(
    check: str,
    options: argparse.Namespace,
    body: Callable[[argparse.Namespace], tuple[str, list[CheckRow]]],
) -> int:
    try:
        dtype, rows = body(options)
    except NotApplicable as error:
        print(f"{check}: {error}", file=sys.stderr)
        if options.json is not None:
            write_json(options.json, check, options, None, [], str(error))
        return error.exit_code
    if options.json is not None:  # first: a reader of the table who goes away takes nothing from the document
        write_json(options.json, check, options, dtype, rows)
    print(table(rows))
    failed = sum(not row.ok for row in rows)
    print(f"{check}: {failed} of {len(rows)} rows differ" if failed else f"{check}: all {len(rows)} rows agree")
    return DIFFERENCE if failed or not rows else PASS
