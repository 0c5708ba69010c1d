#!/usr/bin/env python3
"""Trains the reference language models: `train.py {prepare,run} --help`. See `sparkinfer_models.train_cli`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "eval"), str(ROOT / "models")]

from sparkinfer_models.train_cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
