"""Which cached prefix to give up: the one whose recomputation is cheapest for the bytes it holds.

GreedyDual-Size (Cao and Irani, 1997): an entry's score is the clock at its last use plus cost / bytes; the lowest score
goes first, and the clock moves up to it, so that entries not used for long lose against new ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.prefix_index import PrefixNode
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS


def recompute_cost(start: int, stop: int, attention_cost_tokens: int) -> float:
    """Cost of computing positions [start, stop), in tokens at position 0: linear layers plus growing attention."""
    return (stop - start) * (1.0 + (start + stop) / (2.0 * attention_cost_tokens))


class EvictionClock:
    """Scores of nodes."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.now = 0.0

    def touch(self, node: PrefixNode) -> None:
        """The node is used now."""
        node.touched = self.now

    def score(self, node: PrefixNode) -> float:
        """Keep-worthiness of a node: of its snapshot's segment, or of the best child that went to the host.

        The segment reaches back to the nearest earlier snapshot, from where its state would be recomputed.
        """
        if node.snapshot < 0:
            return node.inherited
        before = node.parent
        while before is not None and before.snapshot < 0:
            before = before.parent
        start = before.position if before is not None else 0
        cost = recompute_cost(start, node.position, self._config.attention_cost_tokens)
        num_blocks = (node.position - start) // KV_BLOCK_TOKENS
        size = self._config.snapshot_bytes + num_blocks * self._config.kv_block_bytes
        own = node.touched + cost / size
        return max(own, node.inherited)

    def evicted(self, score: float) -> None:
        """An entry of that score has been given up."""
        self.now = max(self.now, score)


class EvictionHeap:
    """Candidates by score, cleaned lazily: an entry counts only if its node still qualifies when it comes up."""

    def __init__(self, clock: EvictionClock, qualifies: Callable[[PrefixNode], bool]) -> None:
        self._clock = clock
        self._qualifies = qualifies
        self._entries: list[tuple[float, int, PrefixNode]] = []
        self._serial = 0
        self._rebuild_at = 64

    def push(self, node: PrefixNode) -> None:
        """Add a node if it qualifies."""
        if not self._qualifies(node):
            return
        if len(self._entries) >= self._rebuild_at:
            self._rebuild()
        self._serial += 1
        heapq.heappush(self._entries, (self._clock.score(node), self._serial, node))

    def _rebuild(self) -> None:
        nodes = {id(node): node for _, _, node in self._entries if self._qualifies(node)}
        self._entries = []
        for node in nodes.values():
            self._serial += 1
            self._entries.append((self._clock.score(node), self._serial, node))
        heapq.heapify(self._entries)
        self._rebuild_at = max(64, 4 * len(nodes))

    def lowest(self) -> tuple[float, PrefixNode] | None:
        """The candidate of the lowest score, or None; it stays in the heap."""
        while self._entries:
            score, _, node = self._entries[0]
            if not self._qualifies(node):
                heapq.heappop(self._entries)
                continue
            # Its score may have risen: it was used, or the snapshot before it has gone. One that falls, since a
            # snapshot was entered before it, is pushed again.
            current = self._clock.score(node)
            if current > score:
                self._serial += 1
                heapq.heapreplace(self._entries, (current, self._serial, node))
                continue
            return score, node
        return None
