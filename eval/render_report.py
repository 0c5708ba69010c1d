"""Render a run's raw results as its report folder.

usage: python eval/render_report.py results/<run> [--output reports/<run>]

Writes CHANGELOG.md, RELEASE_NOTE.md, report.json, report.html, requests.parquet, plots/ and commands.txt by temporary
name and rename. Missing cells are listed in the report. Exit codes: 0 written, 2 raw results that are not fit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sparkinfer_eval.report.writer import write_report

from sparkinfer.arguments import path
from sparkinfer.console import command_line
from sparkinfer.errors import SparkinferError


@command_line
def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description="Render a run's raw results as its report folder.")
    parser.add_argument("run", type=path, help="results/<run>")
    parser.add_argument("--output", type=path, help="target folder (default: reports/<run> of this repository)")
    parser.add_argument("--repository", type=path, default=root, help="checkout that the history is read from")
    parser.add_argument("--changes", type=path, help="folder of change fragments (default: changes/ of the checkout)")
    args = parser.parse_args(argv)
    output = args.output or root / "reports" / args.run.name
    try:
        write_report(args.run, output, args.repository, args.changes or args.repository / "changes")
    except SparkinferError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
