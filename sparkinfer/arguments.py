"""Types of command-line arguments that several programs have."""

from __future__ import annotations

import argparse

SEED_BITS = 63


def seed(text: str) -> int:
    """A seed that torch's generators take. Raises ArgumentTypeError."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not -(1 << SEED_BITS) <= value < 1 << SEED_BITS:
        raise argparse.ArgumentTypeError(f"{text} does not fit in 64 bits")
    return value
