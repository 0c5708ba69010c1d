#!/usr/bin/env python3
"""Measures a DFlash2 drafter inside vLLM on a GPU: `vllm_acceptance.py {prompts,run,compare} --help`.

The logic is in `sparkinfer_models.vllm_acceptance`.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "eval"), str(ROOT / "models")]

from sparkinfer_models.vllm_acceptance import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
