"""The three engine checks on several models and dtypes, recorded as one page."""

import sys

from sparkinfer_eval.check_record import main

if __name__ == "__main__":
    sys.exit(main())
