"""The same chats on two launches of the server, mixed steps on and off, must give the same tokens."""

import sys

from sparkinfer_eval.mixed_conc import main

if __name__ == "__main__":
    sys.exit(main())
