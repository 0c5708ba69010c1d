"""Recurrent-state checkpoints in pinned host memory, copied on streams of their own.

A checkpoint leaves its slot (or the buffer a pass wrote it into) by a fast copy on the device into a ring entry; from
there it travels to the host while the next passes run. Nothing is reused before the event of its last reader: a ring
entry waits for its copy to the host, a snapshot that is written again for its last restore, a restore for the
snapshot's last write.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sparkinfer.runner.gpu_queue import Event, Queue

StatePair = tuple[torch.Tensor, torch.Tensor]
"""(state [Ll, Hv, K, V], window [Ll, W-1, C]) of one slot or checkpoint."""


class SnapshotPool:
    """`num_snapshots` checkpoints on the host and a ring of them on the device."""

    def __init__(self, queue: Queue, like: StatePair, num_snapshots: int, ring: int) -> None:
        """`like`: one slot's state and window on the device, for shape and dtype."""
        self._queue = queue
        state, window = like
        self.state = queue.pinned(num_snapshots, *state.shape, dtype=state.dtype)
        """[snapshots, Ll, Hv, K, V], pinned."""
        self.window = queue.pinned(num_snapshots, *window.shape, dtype=window.dtype)
        """[snapshots, Ll, W-1, C], pinned."""
        self._ring: list[StatePair] = [(torch.empty_like(state), torch.empty_like(window)) for _ in range(ring)]
        self._ring_free: list[Event] = [None] * ring
        self._next = 0
        self._written: list[Event] = [None] * num_snapshots
        self._read: list[Event] = [None] * num_snapshots

    def save(self, copies: Iterable[tuple[StatePair, int]]) -> None:
        """Save states as they are once the main stream's work so far is done: (state and window, snapshot) each."""
        queue = self._queue
        for source, snapshot in copies:
            entry = self._next
            self._next = (entry + 1) % len(self._ring)
            kept = self._ring[entry]
            queue.wait(queue.main, self._ring_free[entry])
            with queue.on(queue.main):
                for target, part in zip(kept, source, strict=True):
                    target.copy_(part)
            queue.wait(queue.save, queue.mark(queue.main))
            queue.wait(queue.save, self._read[snapshot])
            with queue.on(queue.save):
                self.state[snapshot].copy_(kept[0], non_blocking=True)
                self.window[snapshot].copy_(kept[1], non_blocking=True)
            self._ring_free[entry] = self._written[snapshot] = queue.mark(queue.save)

    def restore(self, target: StatePair, snapshot: int) -> None:
        """Copy a snapshot into a slot; the main stream's later work sees it."""
        queue = self._queue
        # The slot's last owner may still be running.
        queue.wait(queue.load, queue.mark(queue.main))
        queue.wait(queue.load, self._written[snapshot])
        with queue.on(queue.load):
            target[0].copy_(self.state[snapshot], non_blocking=True)
            target[1].copy_(self.window[snapshot], non_blocking=True)
        self._read[snapshot] = queue.mark(queue.load)
        queue.wait(queue.main, self._read[snapshot])
