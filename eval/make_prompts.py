"""Write a block's prompts: `python eval/make_prompts.py --model DIR --out FOLDER --scale cpu --block 1 [--cell ID]`.

One JSONL per cell (AIPerf's single_turn form) and one `.meta.json` with its digest; the same bytes on every run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "eval")]

from sparkinfer_eval.cells import all_ids, load_cells, resolve_cells  # noqa: E402
from sparkinfer_eval.prompts import ChatCounter, write_prompts  # noqa: E402

from sparkinfer.arguments import path  # noqa: E402
from sparkinfer.console import command_line  # noqa: E402
from sparkinfer.errors import ConfigError, SparkinferError  # noqa: E402
from sparkinfer.output import require_folder  # noqa: E402


@command_line
def main() -> int:
    """Command line; exit 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=Path, default=ROOT / "config" / "cells.yaml", help="cells file")
    parser.add_argument("--scale", required=True, help="scale of the cells file (full, cpu, smoke)")
    parser.add_argument("--overrides", default="{}", help="JSON object of changes to the scale")
    parser.add_argument("--model", type=path, required=True, help="model folder whose tokenizer and template count")
    parser.add_argument("--block", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cell", action="append", help="only this cell (may be given again)")
    parser.add_argument("--out", type=Path, required=True, help="folder for <cell>.jsonl and <cell>.meta.json")
    options = parser.parse_args()
    try:
        require_folder(options.out, "--out")
        document = load_cells(options.cells)
        try:
            overrides = json.loads(options.overrides)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--overrides is not JSON: {error}") from error
        if not isinstance(overrides, dict):
            raise ConfigError(f"--overrides {options.overrides}: give a JSON object of keys of the scale")
        if options.block < 1:
            raise ConfigError(f"--block {options.block}: blocks are counted from 1")
        cells = resolve_cells(document, options.scale, overrides)
        unknown = [name for name in options.cell or [] if name not in cells]
        if unknown:
            raise ConfigError(f"scale {options.scale} has no cell {', '.join(unknown)}; it has {', '.join(cells)}")
        counter = ChatCounter(options.model)
        for name in options.cell or cells:
            written = write_prompts(
                options.model, counter, cells[name], options.seed, options.block, all_ids(document), options.out
            )
            print(
                f"{written}: {cells[name].warmup_requests} + {cells[name].requests} prompts of "
                f"{cells[name].prompt_tokens} tokens"
            )
    except SparkinferError as error:
        print(f"make_prompts.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
