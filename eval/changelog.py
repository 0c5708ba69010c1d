"""Keep the root CHANGELOG.md from change fragments and a run's report.

usage: python eval/changelog.py release VERSION --report reports/<run>
       python eval/changelog.py check

`release` writes the section of VERSION (fragments by category, then the report's tables) and archives the fragments
under changes/VERSION/. `check` parses the open fragments. Exit codes: 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sparkinfer_eval.report.fragments import read_fragments
from sparkinfer_eval.report.release import release
from sparkinfer_eval.report.text import refuse_claims

from sparkinfer.arguments import path
from sparkinfer.console import command_line
from sparkinfer.errors import ConfigError, SparkinferError


@command_line
def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="Keep the root CHANGELOG.md.")
    parser.add_argument("--repository", type=path, default=Path(__file__).resolve().parent.parent)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("release", help="write a version's section and archive its fragments")
    make.add_argument("version", help="MAJOR.MINOR.PATCH, the version of pyproject.toml and of the report")
    make.add_argument("--report", type=path, required=True, help="reports/<run>, whose tables the section shows")
    commands.add_parser("check", help="parse the open fragments in changes/")
    args = parser.parse_args(argv)
    try:
        if args.command == "release":
            print("\n".join(release(args.version, args.report, args.repository)))
        else:
            if not (args.repository / "changes").is_dir():
                raise ConfigError(f"{args.repository} has no folder changes/: name a checkout with --repository")
            fragments = read_fragments(args.repository / "changes")
            refuse_claims([f.sentence() for f in fragments], "changes/")
            print(f"{len(fragments)} fragments")
    except SparkinferError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
