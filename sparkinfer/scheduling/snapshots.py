"""The fixed pool of recurrent-state snapshots."""

from __future__ import annotations

from sparkinfer.scheduling.slots import SlotPool


class SnapshotPool(SlotPool):
    """Snapshot ids, each with the token position it was reserved for."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.position = [-1] * total

    def reserve(self, position: int) -> int:
        """A free snapshot, for the state after `position` tokens. Raises ValueError when there is none."""
        snapshot = self.acquire()
        self.position[snapshot] = position
        return snapshot

    def release(self, slot: int) -> None:
        """Give a snapshot back. Raises ValueError when it is not taken."""
        super().release(slot)
        self.position[slot] = -1
