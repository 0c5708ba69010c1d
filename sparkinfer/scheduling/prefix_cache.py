"""The prefix cache of a hybrid model: KV blocks and recurrent-state snapshots under one index.

A hit at position p needs the KV blocks of [0, p) (on the device, or on the host from where they are moved back) and a
snapshot of the state after p tokens. Nodes enter the index when the step that wrote a snapshot commits. A running
request holds one reference on each node of its leading blocks; nodes without references are kept while they lead to a
snapshot, and their blocks are given up, or moved to the host, when the pool needs them.

The blocks of a node belong to the node, a request owns only those behind its node. Neither publishing nor the end of a
request thus looks at each of the many blocks that are or remain in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sparkinfer.scheduling.blocks import BlockPool
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.eviction import EvictionClock, EvictionHeap
from sparkinfer.scheduling.prefix_index import PrefixIndex, PrefixNode, extend_hashes
from sparkinfer.scheduling.sequence import Sequence
from sparkinfer.scheduling.slots import SlotPool
from sparkinfer.scheduling.snapshots import SnapshotPool
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, BlockMove, MoveKind


@dataclass(slots=True)
class CacheCounters:
    """Totals since start. `evictions` counts snapshots and KV blocks given up; moves to the host are not among them."""

    queries_tokens: int = 0
    hits_tokens: int = 0
    evictions: int = 0
    moves_to_host: int = 0
    moves_to_device: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """What the cache knows of a prompt: where a hit would restore, and how far KV blocks are known at all."""

    node: PrefixNode | None
    known_tokens: int

    @property
    def position(self) -> int:
        """Tokens that a hit saves."""
        return self.node.position if self.node is not None else 0


NO_MATCH = Match(None, 0)


class PrefixCache:
    """Index, snapshots, host blocks and eviction. Shares the device block pool with the scheduler."""

    def __init__(self, config: SchedulerConfig, blocks: BlockPool) -> None:
        self.config = config
        self.blocks = blocks
        self.index = PrefixIndex()
        self.snapshots = SnapshotPool(config.num_snapshots)
        self.host = SlotPool(config.num_host_blocks)
        self.counters = CacheCounters()
        self.num_evictable = 0
        """Device blocks that eviction can free: those of nodes without references."""
        self.orphans: list[PrefixNode] = []
        """Nodes that a reset took out while a step in flight restores from their snapshots."""
        self.moves: list[BlockMove] = []
        """Moves that the next plan must carry, in order."""
        self.retired_blocks: list[int] = []
        self.retired_host: list[int] = []
        """Blocks to be released when all plans scheduled so far have committed; the scheduler takes them."""
        self._clock = EvictionClock(config)
        holds = self.index.holds
        self._snapshot_heap = EvictionHeap(self._clock, lambda n: n.snapshot >= 0 and n.pins == 0 and holds(n))
        self._device_heap = EvictionHeap(
            self._clock, lambda n: n.refs == 0 and bool(n.blocks) and n.device_children == 0 and holds(n)
        )
        self._host_heap = EvictionHeap(
            self._clock, lambda n: n.refs == 0 and bool(n.host) and not n.children and holds(n)
        )

    @property
    def enabled(self) -> bool:
        """Whether the cache can hold anything."""
        return self.config.num_snapshots > 0

    # -- lookup -----------------------------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> Match:
        """The best hit for all known tokens but the last: one token at least is always computed."""
        request = sequence.request
        if not self.enabled or not request.use_cache:
            return NO_MATCH
        if sequence.match is None or sequence.match_version != self.index.version:
            limit = (request.num_tokens - 1) // KV_BLOCK_TOKENS
            extend_hashes(sequence.hashes, request, limit)
            node, depth = self.index.match(sequence.hashes, limit)
            sequence.match = Match(node, depth * KV_BLOCK_TOKENS)
            sequence.match_version = self.index.version
        return sequence.match

    def hold(self, sequence: Sequence, match: Match) -> int:
        """Reference the hit's nodes for the sequence; returns how many device blocks they have."""
        if match.node is None:
            return 0
        sequence.node = match.node
        on_device = 0
        for node in match.node.path():
            self._reference(node)
            on_device += len(node.blocks)
        return on_device

    def let_go(self, sequence: Sequence) -> list[list[int]]:
        """Drop the sequence's references; returns the blocks of each node that then leads nowhere, to be released."""
        node = sequence.node
        sequence.node = sequence.last_decode_node = None
        given_up: list[list[int]] = []
        while node is not None:
            parent = node.parent
            node.refs -= 1
            if node.refs == 0:
                self.num_evictable += len(node.blocks)
                if node.device_children == 0:
                    given_up = self._prune(node) + given_up  # In the order of positions.
            node = parent
        return given_up

    def use(self, sequence: Sequence, match: Match) -> list[int]:
        """The device blocks of a held hit, after bringing back what lies on the host; they remain the nodes' own.

        The caller has made sure that enough blocks are free or evictable. The snapshot is pinned until
        `unpin`, when the row that restores it commits.
        """
        if match.node is None:
            return []
        found: list[int] = []
        for node in match.node.path():
            if node.host:
                self._bring_back(node)
            found += node.blocks
        match.node.pins += 1
        match.node.hits += 1
        self._clock.touch(match.node)
        return found

    def _bring_back(self, node: PrefixNode) -> None:
        count = len(node.host)
        self.free_blocks(count)
        blocks = self.blocks.allocate(count)
        self.moves += [
            BlockMove(MoveKind.TO_DEVICE, block, host) for block, host in zip(blocks, node.host, strict=True)
        ]
        self.counters.moves_to_device += count
        self._on_device_again(node, blocks)

    def _on_device_again(self, node: PrefixNode, blocks: list[int]) -> None:
        """A referenced node's part on the host is given up for these device blocks."""
        if not node.blocks and node.parent is not None:
            node.parent.device_children += 1
        node.blocks += blocks
        self.retired_host += node.host
        node.host = []

    def unpin(self, node: PrefixNode) -> None:
        """A row that restored from the node's snapshot has committed."""
        node.pins -= 1
        if self.index.holds(node):
            self._snapshot_heap.push(node)
        elif node.pins == 0:
            self.orphans.remove(node)
            self._free_snapshot(node)

    def _reference(self, node: PrefixNode) -> None:
        if node.refs == 0:
            self.num_evictable -= len(node.blocks)
        node.refs += 1

    # -- writing ----------------------------------------------------------------------------------------------------

    def reserve_snapshot(self, sequence: Sequence, position: int) -> int | None:
        """A snapshot to write the state at `position` to; None when it exists already or all are in use by steps."""
        num_blocks = position // KV_BLOCK_TOKENS
        if num_blocks <= len(sequence.hashes):
            node = self.index.ending(sequence.hashes[num_blocks - 1])
            if node is not None and node.snapshot >= 0:
                return None
        if not self.snapshots.num_free and not self._evict_snapshot():
            return None
        return self.snapshots.reserve(position)

    def drop_snapshot(self, snapshot: int) -> None:
        """Give back a reserved snapshot that will not be published."""
        self.snapshots.release(snapshot)

    def publish(self, sequence: Sequence, position: int, snapshot: int) -> PrefixNode:
        """Enter the first `position` tokens with their snapshot; the step that wrote it has committed.

        Their blocks are the cache's from then on. Where another request has entered the same tokens before, the
        sequence takes over those blocks and its own ones are retired. Returns the node of the position.
        """
        num_blocks = position // KV_BLOCK_TOKENS
        hashes, own = sequence.hashes, sequence.request.blocks
        extend_hashes(hashes, sequence.request, num_blocks)
        node = sequence.node
        depth = node.depth if node is not None else 0
        while depth < num_blocks and (known := self.index.beginning(hashes[depth])) is not None:
            common = known.common(hashes, num_blocks)
            node = known if common == len(known.hashes) else self._split(known, common)
            own = self._adopt(sequence, node, own)
            depth += common
        if depth < num_blocks:
            node = self.index.insert(node, hashes[depth:num_blocks], own[depth:num_blocks])
        if node is None or node.position != position:
            raise ValueError(f"a snapshot of position {position} published behind an entry of the same request")
        sequence.node = node
        sequence.request.blocks = own
        self._attach(node, position, snapshot)
        return node

    def _split(self, node: PrefixNode, length: int) -> PrefixNode:
        upper = self.index.split(node, length)
        if not node.blocks:
            upper.inherited = self._clock.score(node)
        return upper

    def _adopt(self, sequence: Sequence, node: PrefixNode, own: list[int]) -> list[int]:
        """Reference a node that another request has entered; returns the request's blocks with those of the node."""
        self._reference(node)
        start, on_device = node.start, len(node.blocks)
        if node.host:
            self._on_device_again(node, own[start + on_device : node.depth])
        if not on_device:
            return own
        if own is sequence.request.blocks:
            own = list(own)  # A new list: rows in flight keep reading the old one, whose blocks stay until they commit.
        stop = start + on_device
        self.retired_blocks += own[start:stop]
        own[start:stop] = node.blocks[:on_device]
        return own

    def _attach(self, node: PrefixNode, position: int, snapshot: int) -> None:
        if node.position != position or self.snapshots.position[snapshot] != position:
            raise ValueError(
                f"snapshot of position {self.snapshots.position[snapshot]} published at {position} for a key of "
                f"position {node.position}"
            )
        if node.snapshot >= 0:
            self.snapshots.release(snapshot)
            return
        node.snapshot = snapshot
        self.index.version += 1
        self._clock.touch(node)
        self._snapshot_heap.push(node)
        for below in node.next_snapshots():  # They are recomputed from here now, at less cost.
            for heap in (self._snapshot_heap, self._device_heap, self._host_heap):
                heap.push(below)

    def replace_decode_checkpoint(self, sequence: Sequence, node: PrefixNode) -> None:
        """While generating, only the latest checkpoint is worth a snapshot: the one before goes, unless it was hit."""
        before = sequence.last_decode_node
        sequence.last_decode_node = node
        if before is not None and before is not node and before.snapshot >= 0 and not (before.hits or before.pins):
            self._take_snapshot(before)

    # -- eviction ---------------------------------------------------------------------------------------------------

    def free_blocks(self, count: int) -> None:
        """Make `count` device blocks free. Raises ValueError when they are not there: callers check first."""
        while self.blocks.num_free < count:
            found = self._device_heap.lowest()
            if found is None:
                raise ValueError(f"{count} KV blocks needed, {self.blocks.num_free} free and none evictable")
            score, node = found
            if self._host_room(score):
                # Making room may have removed the last entry that this node led to.
                if self.index.holds(node):
                    self._move_to_host(node, score)
            else:
                self._clock.evicted(score)
                self._remove_subtree(node)

    def _host_room(self, score: float) -> bool:
        """A free host block, if need be at the cost of an entry of a lower score."""
        if self.host.num_free:
            return True
        if not self.host.total:
            return False
        found = self._host_heap.lowest()
        if found is None or found[0] >= score:
            return False
        self._clock.evicted(found[0])
        self._remove_subtree(found[1])
        return self.host.num_free > 0

    def _move_to_host(self, node: PrefixNode, score: float) -> None:
        """Move the node's last device block."""
        host_block = self.host.acquire()
        block = node.blocks.pop()
        self.moves.append(BlockMove(MoveKind.TO_HOST, block, host_block))
        self.counters.moves_to_host += 1
        node.host.insert(0, host_block)
        self.num_evictable -= 1
        self.blocks.release([block])
        parent = node.parent
        if not node.blocks and parent is not None:
            parent.device_children -= 1
            parent.inherited = max(parent.inherited, score)
            self._device_heap.push(parent)
        if len(node.host) == 1:
            self._host_heap.push(node)

    def _evict_snapshot(self) -> bool:
        found = self._snapshot_heap.lowest()
        if found is None:
            return False
        score, node = found
        self._clock.evicted(score)
        before = self.index.num_blocks
        self._take_snapshot(node)
        self.counters.evictions += 1 + before - self.index.num_blocks
        return True

    def _free_snapshot(self, node: PrefixNode) -> None:
        self.snapshots.release(node.snapshot)
        node.snapshot = -1

    def _take_snapshot(self, node: PrefixNode) -> None:
        self._free_snapshot(node)
        self.index.version += 1
        if node.refs == 0:
            self._release(self._prune(node))

    def _release(self, given_up: Iterable[list[int]]) -> None:
        for blocks in given_up:
            self.blocks.release(blocks)

    def _prune(self, node: PrefixNode) -> list[list[int]]:
        """Remove an unreferenced node, and those before it, as far as they lead to no snapshot.

        Returns the blocks of each, for the caller to release.
        """
        current: PrefixNode | None = node
        given_up: list[list[int]] = []
        while current is not None and current.refs == 0:
            if current.children or current.snapshot >= 0:
                self._device_heap.push(current)
                self._host_heap.push(current)
                break
            given_up.append(self._remove(current))
            current = current.parent
        return given_up

    def _remove_subtree(self, top: PrefixNode) -> None:
        """Remove an unreferenced node with all below it, then what leads nowhere above it."""
        order, before = [top], self.index.num_blocks
        for node in order:
            order.extend(node.children)
        for node in reversed(order):
            if node.snapshot >= 0:
                self._free_snapshot(node)
                self.counters.evictions += 1
            self.blocks.release(self._remove(node))
        if top.parent is not None and top.parent.refs == 0:
            self._release(self._prune(top.parent))
        self.counters.evictions += before - self.index.num_blocks

    def _remove(self, node: PrefixNode) -> list[int]:
        """Remove an unreferenced node without children; its snapshot has gone before.

        Its host blocks are given back; the device blocks are returned, for the caller to release.
        """
        self.index.remove(node)
        blocks = node.blocks
        self.num_evictable -= len(blocks)
        for host_block in node.host:
            self.host.release(host_block)
        node.blocks, node.host = [], []
        return blocks

    def reset(self, holders: Iterable[Sequence]) -> tuple[int, int]:
        """Drop everything; returns dropped (blocks, snapshots).

        `holders`, the sequences that may reference entries, keep the blocks that they hold themselves. A snapshot that
        a step in flight restores from is given back when that step commits, and nobody finds it any more.
        """
        blocks, snapshots = self.index.num_blocks, 0
        for sequence in holders:
            if sequence.node is not None:
                self.blocks.share(sequence.request.blocks[: sequence.node.depth])
            self._release(self.let_go(sequence))
        for node in sorted(self.index, key=lambda n: -n.depth):
            snapshots += node.snapshot >= 0
            if node.pins:
                self.orphans.append(node)
            elif node.snapshot >= 0:
                self._free_snapshot(node)
            self.blocks.release(self._remove(node))
        return blocks, snapshots

    # -- figures ----------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of cached contents: KV blocks on device and host, and snapshots."""
        return self.index.num_blocks * self.config.kv_block_bytes + self.snapshots.num_used * self.config.snapshot_bytes
