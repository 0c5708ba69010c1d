"""Replay load through the real scheduler with fitted costs: policies compared in seconds, without a GPU."""

import sys

from sparkinfer_eval.simulate.cli import main

if __name__ == "__main__":
    sys.exit(main())
