"""Progress on the terminal: a counter on standard error, only where a person looks at it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
INTERVAL_S = 0.2


def progress(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """Hands the items on and counts them."""
    shown = sys.stderr.isatty()
    last = 0.0
    for number, item in enumerate(items, 1):
        yield item
        if shown and (number == total or time.monotonic() - last > INTERVAL_S):
            last = time.monotonic()
            print(f"\r{what}: {number} of {total}", end="\n" if number == total else "", file=sys.stderr, flush=True)
