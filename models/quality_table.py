#!/usr/bin/env python3
"""Record and table of what quantisation costs: `quality_table.py --help`. See `sparkinfer_models.quality_table`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "models")]

from sparkinfer_models.quality_table import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
