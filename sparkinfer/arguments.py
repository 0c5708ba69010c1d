"""Types of command-line arguments that several programs have."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

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


def temperature(text: str) -> float:
    """A temperature that a server may take. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be a finite number of at least 0")
    return value


def name_or_path(text: str) -> str:
    """Text that may be looked up as a path: of a length that a path can have. Raises ArgumentTypeError."""
    try:
        Path(text).is_dir()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text[:60]}{'...' * (len(text) > 60)}: {error.strerror}") from None
    return text


def path(text: str) -> Path:
    """A path that can be looked up. Raises ArgumentTypeError."""
    return Path(name_or_path(text))
