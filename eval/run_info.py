"""Write results/<run>/run.json: the declared run plus machine, source and package facts.

usage: python eval/run_info.py --spec SPEC.yaml --output results/<run>/run.json [--environment NAME=PYTHON ...]

SPEC (JSON or YAML) declares run, version, profile, scale, engines, models, cells, checks, blocks, reps and optionally
commands and container; eval/sparkinfer_eval/report/schemas/run-v1.schema.json defines each.
Exit codes: 0 written, 2 bad input, 3 an environment's interpreter does not run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sparkinfer_eval.report.run_info import collect, read_declaration, write_json

from sparkinfer.console import command_line
from sparkinfer.errors import ConfigError, SparkinferError
from sparkinfer.output import require_file


@command_line
def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write a run's run.json.")
    parser.add_argument("--spec", type=Path, required=True, help="JSON or YAML file that declares the run")
    parser.add_argument("--output", type=Path, required=True, help="results/<run>/run.json")
    parser.add_argument("--environment", action="append", default=[], metavar="NAME=PYTHON",
                        help="an environment whose package versions are recorded; may be repeated")  # fmt: skip
    parser.add_argument("--repository", type=Path, default=Path(__file__).resolve().parent.parent)
    args = parser.parse_args(argv)
    try:
        require_file(args.output, "--output", make_folder=True)
        environments = {"engine": Path(sys.executable)}
        for item in args.environment:
            name, separator, python = item.partition("=")
            if not separator or not name or not python:
                raise ConfigError(f"--environment {item!r}: give NAME=PYTHON, e.g. vllm=.venvs/vllm/bin/python")
            environments[name] = Path(python)
        write_json(args.output, collect(read_declaration(args.spec), environments, args.repository))
    except SparkinferError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
