#!/usr/bin/env python3
"""Trains and measures the DFlash2 drafters: `train_drafter.py {run,measure} --help`.

The logic is in `sparkinfer_models.drafter_cli`.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "eval"), str(ROOT / "models")]

from sparkinfer_models.drafter_cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
