"""Poisson arrivals against any OpenAI-compatible server: `python eval/spec_open_arrivals.py --url URL [--rate 1 2]`.

With `--out` and the options of a run it measures one `poisson-r*` cell and writes its result folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "eval")]

from sparkinfer_eval.arrivals_cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(ROOT))
