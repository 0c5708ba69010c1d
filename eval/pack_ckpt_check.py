"""Prompts prefilled alone and packed in one pass must give the same first tokens and the same checkpoints."""

import sys

from sparkinfer_eval.pack_ckpt import main

if __name__ == "__main__":
    sys.exit(main())
