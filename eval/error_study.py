"""Errors of fast arithmetic, layer by layer: `eval/error_study.py MODEL --device cuda`; docs/gpu.md."""

import sys

from sparkinfer_eval.error_study import main

if __name__ == "__main__":
    sys.exit(main())
