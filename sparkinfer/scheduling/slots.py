"""Pool of ids with one owner each: recurrent-state slots, and any other fixed set of buffers."""

from __future__ import annotations


class SlotPool:
    """Ids 0 to `total` - 1, each free or owned."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._used = [False] * total

    @property
    def num_free(self) -> int:
        """Ids without an owner."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Ids with an owner."""
        return self.total - len(self._free)

    def acquire(self) -> int:
        """A free id. Raises ValueError when there is none: callers check first."""
        if not self._free:
            raise ValueError(f"all {self.total} slots are taken")
        slot = self._free.pop()
        self._used[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Give an id back. Raises ValueError when it is not taken."""
        if not 0 <= slot < self.total or not self._used[slot]:
            raise ValueError(f"slot {slot} is not taken")
        self._used[slot] = False
        self._free.append(slot)

    def is_used(self, slot: int) -> bool:
        """Whether the id has an owner."""
        return self._used[slot]
