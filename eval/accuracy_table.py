"""Write one table over the records of a folder: `eval/accuracy_table.py reports/accuracy`."""

import sys

from sparkinfer_eval.accuracy.records_table import main

if __name__ == "__main__":
    sys.exit(main())
