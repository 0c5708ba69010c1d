"""The waiting queue: one total order over all requests, with aging built into the key.

A request of priority p that arrives at step s has the key p * aging_steps + s. Comparing two keys is the same at any
later step as comparing `priority - waited / aging_steps`, so aging needs no updates, and a request can only be
overtaken by ones that arrive within (p - p') * aging_steps steps after it, p' being the best priority in use.
A preempted request keeps its key.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from sparkinfer.scheduling.sequence import Sequence


def order_key(priority: int, step: int, number: int, aging_steps: int) -> tuple[int, int]:
    """Key of a request that arrives at scheduler step `step` as the `number`-th one; lower runs earlier."""
    if aging_steps == 0:
        return priority, number
    return priority * aging_steps + step, number


class WaitingQueue:
    """Sequences in key order."""

    def __init__(self) -> None:
        self._items: list[tuple[tuple[int, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._items)

    def push(self, sequence: Sequence) -> None:
        """Insert by key. Keys are unique: the second part is a serial number."""
        bisect.insort(self._items, (sequence.key, sequence))  # Sequences are never compared: keys differ.

    def head(self) -> Sequence | None:
        """The first one, or None."""
        return self._items[0][1] if self._items else None

    def at(self, index: int) -> Sequence:
        """The one at a rank."""
        return self._items[index][1]

    def remove(self, sequence: Sequence) -> None:
        """Take one out. Raises ValueError when it is not in the queue."""
        index = bisect.bisect_left(self._items, (sequence.key, sequence))
        if index == len(self._items) or self._items[index][1] is not sequence:
            raise ValueError(f"request {sequence.request.id} is not waiting")
        del self._items[index]
