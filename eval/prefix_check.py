"""Answers that start from cached prefixes must equal those computed from nothing."""

import sys

from sparkinfer_eval.prefix_check import main

if __name__ == "__main__":
    sys.exit(main())
