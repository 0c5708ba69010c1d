"""Measure and record the scheduling figures: `eval/scheduling_figures.py MODEL --out reports/scheduling`."""

import sys

from sparkinfer_eval.scheduling_figures import main

if __name__ == "__main__":
    sys.exit(main())
