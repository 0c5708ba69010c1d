"""Say whether a finished run may be called good: every check passed or does not apply.

usage: verdict.py --output FILE CHECK.json...   Exit codes: 0 good, 1 a check found a difference.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="Say whether a finished run may be called good.")
    parser.add_argument("checks", type=Path, nargs="*")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    verdicts = {path.stem: json.loads(path.read_text(encoding="utf-8"))["ok"] for path in args.checks}
    failed = [name for name, ok in verdicts.items() if ok is False]
    if failed:
        print(f"error: {', '.join(failed)} found a difference: see the report's correctness table", file=sys.stderr)
        return 1
    args.output.write_text(json.dumps(verdicts, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
