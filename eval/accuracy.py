"""Compare two engines on held-out text: `eval/accuracy.py ENGINE_A ENGINE_B`; docs/accuracy.md."""

import sys

from sparkinfer_eval.accuracy.cli import main

if __name__ == "__main__":
    sys.exit(main())
