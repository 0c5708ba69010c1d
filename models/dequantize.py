"""Write the 16-bit form of a quantised checkpoint: `python models/dequantize.py SRC DST`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sparkinfer.console import command_line  # noqa: E402
from sparkinfer.errors import SparkinferError  # noqa: E402
from sparkinfer.quantization.dequantise import dequantise_checkpoint  # noqa: E402


@command_line
def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("target", type=Path, metavar="DST")
    options = parser.parse_args()
    try:
        size = dequantise_checkpoint(options.source, options.target)
    except SparkinferError as error:
        print(f"dequantize.py: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{options.target}: {size / 2**20:.1f} MiB of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
