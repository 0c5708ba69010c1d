#!/usr/bin/env python3
"""Reference models inside vLLM on a GPU: `vllm_checks.py {start,wait,measure,stop} --help`.

The logic is in `sparkinfer_models.vllm_checks`.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "eval"), str(ROOT / "models")]

from sparkinfer_models.vllm_checks import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
