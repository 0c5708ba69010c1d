"""Measure one closed-loop cell with AIPerf: `python eval/run_cell.py --url URL --cell chat-c4 ... --out FOLDER`.

The result folder (form in sparkinfer_eval/records.py) appears only when every validity gate holds. Exit codes: 0 done,
1 the run is not a result (its evidence lies in FOLDER.failed), 2 bad input, 3 the machine cannot do it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "eval")]

from sparkinfer_eval.run_cell import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(ROOT))
