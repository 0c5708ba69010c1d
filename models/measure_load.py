"""Measure loading: `measure_load.py MODEL [--device cuda] [--engine] [--cold]`. Prints one JSON line a load."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "models")]

import torch  # noqa: E402
from sparkinfer_models.measure_load import as_json, drop_cache, measure_engine_load, measure_load  # noqa: E402

from sparkinfer.console import command_line  # noqa: E402
from sparkinfer.errors import SparkinferError  # noqa: E402
from sparkinfer.models.hub import HUB, resolve_model  # noqa: E402


@command_line
def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL", help=f"folder, or {HUB}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache first")
    parser.add_argument("--engine", action="store_true", help="as the GPU engine keeps it: repacked for its kernels")
    options = parser.parse_args()
    try:
        folder = resolve_model(options.model)
        if options.cold:
            drop_cache(folder)
        measure = measure_engine_load if options.engine else measure_load
        print(as_json(measure(folder, torch.device(options.device))))
    except SparkinferError as error:
        print(f"measure_load.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
