"""Write a small random hybrid checkpoint: `python models/generate.py {dense,moe} DIR [--seed N] [size options]`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "eval")]

from sparkinfer_eval.toy_model import KINDS, ToySize, generate, parameter_count  # noqa: E402

from sparkinfer.arguments import seed  # noqa: E402
from sparkinfer.console import command_line  # noqa: E402
from sparkinfer.errors import SparkinferError  # noqa: E402


@command_line
def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=seed, default=0)
    for field in dataclasses.fields(ToySize):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    options = parser.parse_args()
    size = ToySize(**{field.name: getattr(options, field.name) for field in dataclasses.fields(ToySize)})
    try:
        generate(options.kind, options.folder, options.seed, size)
    except SparkinferError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return error.exit_code
    print(
        f"{options.folder}: {options.kind}, {parameter_count(options.kind, size):,} random weights, seed {options.seed}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
