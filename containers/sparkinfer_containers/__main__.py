"""`python -m sparkinfer_containers`."""

import sys

from sparkinfer_containers.cli import main

sys.exit(main())
