"""A run's time, step by step, against the floor of the card: `eval/step_breakdown.py REPORT TRACE --config DIR`.

The logic is in `sparkinfer_eval.step_breakdown`.
"""

import sys

from sparkinfer_eval.step_breakdown import main

if __name__ == "__main__":
    sys.exit(main())
