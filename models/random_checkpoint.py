"""Write a seeded random checkpoint: `python models/random_checkpoint.py OUT --shape 27b --format nvfp4`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "models")]

from sparkinfer_models.random_checkpoint import SCALES, SHARD_BYTES, write_checkpoint  # noqa: E402
from sparkinfer_models.real_shapes import SHAPES, shape_config  # noqa: E402

from sparkinfer.arguments import seed  # noqa: E402
from sparkinfer.console import command_line  # noqa: E402
from sparkinfer.errors import SparkinferError  # noqa: E402
from sparkinfer.quantization.schemes import Format  # noqa: E402


@command_line
def main() -> int:
    """Command line. Prints the bytes written and the seconds it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--format", choices=("nvfp4", "fp8", "bf16"), default="nvfp4")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--layers", type=int, help="keep only so many layers")
    parser.add_argument(
        "--scales", choices=SCALES, default=SCALES[0], help="of the weights (default %(default)s); depth: for checks"
    )
    parser.add_argument("--threads", type=int, help="writers (default: one a CPU)")
    parser.add_argument(
        "--shard-mib", type=int, default=SHARD_BYTES >> 20, help="of a file at most (default %(default)s)"
    )
    options = parser.parse_args()
    if min(n for n in (options.layers, options.threads, options.shard_mib) if n is not None) < 1:
        parser.error("--layers, --threads and --shard-mib must be at least 1")
    config = shape_config(options.shape, options.layers)
    start = time.perf_counter()
    default = None if options.format == "bf16" else Format(options.format)
    try:
        size = write_checkpoint(
            options.out, config, default, options.seed, options.threads, options.shard_mib << 20, options.scales
        )
    except SparkinferError as error:
        print(f"random_checkpoint.py: {error}", file=sys.stderr)
        return error.exit_code
    seconds = time.perf_counter() - start
    print(
        f"{options.out}: {options.shape} {options.format}, seed {options.seed}, {size / 2**30:.2f} GiB"
        f" in {seconds:.1f} s ({size / 2**20 / seconds:.0f} MiB/s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
