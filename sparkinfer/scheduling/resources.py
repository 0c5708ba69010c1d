"""What running requests hold: KV blocks, a state slot, cache entries. Admission and release."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from sparkinfer.scheduling.blocks import BlockPool, blocks_for
from sparkinfer.scheduling.checkpoints import prompt_positions
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.decode_table import DecodeTable
from sparkinfer.scheduling.prefix_cache import PrefixCache
from sparkinfer.scheduling.sequence import NEVER, Phase, Sequence
from sparkinfer.scheduling.slots import SlotPool
from sparkinfer.scheduling.types import Checkpoint


@dataclass(frozen=True, slots=True)
class Kept:
    """What must stay available for requests that are passed by a later one."""

    slots: int
    blocks: int


NOTHING_KEPT = Kept(0, 0)


class Resources:
    """The pools, and the rule by which a waiting request gets its share of them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.blocks = BlockPool(config.num_kv_blocks)
        self.slots = SlotPool(config.max_num_seqs)
        self.cache = PrefixCache(config, self.blocks)
        self.table = DecodeTable(config.max_num_seqs)
        self.retired: deque[tuple[int, list[int], list[int]]] = deque()
        """(step, device blocks, host blocks): released when that step commits."""
        self._refused: tuple[Sequence, int, int] | None = None
        """The sequence that was refused last, the blocks available to it then, and the version of the index: with
        other entries a hit may need fewer blocks."""

    @property
    def available(self) -> int:
        """Device blocks that are free or that eviction can free."""
        return self.blocks.num_free + self.cache.num_evictable

    def allocate(self, count: int) -> list[int]:
        """Blocks, evicting cached prefixes where needed. Raises ValueError when fewer are available."""
        self.cache.free_blocks(count)
        return self.blocks.allocate(count)

    def admit(self, sequence: Sequence, others_run: bool, kept: Kept = NOTHING_KEPT) -> bool:
        """Give the sequence a slot and blocks for all its known tokens, less what a cache hit brings; or refuse.

        `kept` stays available besides.

        Reserving the whole prompt means that a prefill once begun never stalls on memory. While other requests run,
        the watermark stays free for their growth; a request that is alone always fits, by the checks of the
        configuration.
        """
        if self.slots.num_free <= kept.slots:
            return False
        if others_run and self._refused is not None:
            refused, available, version = self._refused
            if (
                refused is sequence
                and self.available - kept.blocks <= available
                and self.cache.index.version == version
            ):
                return False
        request = sequence.request
        match = self.cache.match(sequence)
        on_device = self.cache.hold(sequence, match)
        needed = blocks_for(request.num_tokens) - on_device
        reserve = kept.blocks + (self.config.watermark_blocks if others_run else 0)
        if self.available < needed + reserve:
            self.cache.let_go(sequence)  # Its nodes lead to the hit's snapshot, so none of them goes.
            self._refused = (sequence, self.available - kept.blocks, self.cache.index.version)
            return False
        self._refused = None
        blocks = self.cache.use(sequence, match)
        request.blocks = blocks + self.allocate(blocks_for(request.num_tokens) - len(blocks))
        request.slot = self.slots.acquire()
        request.num_computed = match.position
        sequence.restore_node = match.node
        self._plan_checkpoints(sequence, match.position, match.known_tokens)
        if not sequence.admitted_before:
            sequence.admitted_before = True
            request.num_cached = match.position
            if self.cache.enabled and request.use_cache:
                self.cache.counters.queries_tokens += request.num_tokens
                self.cache.counters.hits_tokens += match.position
        return True

    def _plan_checkpoints(self, sequence: Sequence, start: int, known: int) -> None:
        request = sequence.request
        if self.cache.enabled and request.use_cache:
            sequence.checkpoints = prompt_positions(request.num_tokens, start, known, self.config)
        else:
            sequence.checkpoints = []

    def publish(self, sequence: Sequence, checkpoints: Iterable[Checkpoint], *, decode: bool) -> None:
        """The step that wrote these snapshots has committed: enter them, unless the request has ended before."""
        for checkpoint in checkpoints:
            if sequence.phase is Phase.DONE or not sequence.publishes:
                self.cache.drop_snapshot(checkpoint.snapshot)
                continue
            before = sequence.request.blocks
            node = self.cache.publish(sequence, checkpoint.position, checkpoint.snapshot)
            if sequence.request.blocks is not before:
                self.table.blocks_replaced(sequence)
            if decode:
                self.cache.replace_decode_checkpoint(sequence, node)

    def reset_cache(self, holders: Iterable[Sequence]) -> tuple[int, int]:
        """Empty the prefix cache; returns dropped (blocks, snapshots).

        `holders`, all sequences that run or drain, keep their blocks and enter none of what they have computed; one
        that is preempted later starts from nothing, and enters what it then computes.
        """
        for sequence in holders:
            if sequence.phase is not Phase.WAITING:
                sequence.publishes = False
                sequence.checkpoints, sequence.next_checkpoint = [], NEVER
        return self.cache.reset(holders)

    def release(self, sequence: Sequence) -> None:
        """Take everything back. No plan in flight may use it any more."""
        request = sequence.request
        self.table.leave(sequence)
        cached = sequence.node.depth if sequence.node is not None else 0
        for blocks in (*self.cache.let_go(sequence), request.blocks[cached:]):
            self.blocks.release(blocks)
        request.blocks = []
        if request.slot >= 0:
            self.slots.release(request.slot)
            request.slot = -1

    def retire(self, last_step: int | None) -> None:
        """Blocks that the cache retired are released once `last_step` commits; now, if no step is in flight."""
        cache = self.cache
        if not cache.retired_blocks and not cache.retired_host:
            return
        entry = (-1 if last_step is None else last_step, cache.retired_blocks, cache.retired_host)
        cache.retired_blocks, cache.retired_host = [], []
        self.retired.append(entry)
        if last_step is None:
            self.committed(-1)

    def committed(self, step: int) -> None:
        """A step has committed: release what waited for it."""
        while self.retired and self.retired[0][0] <= step:
            _, blocks, host_blocks = self.retired.popleft()
            self.blocks.release(blocks)
            for host_block in host_blocks:
                self.cache.host.release(host_block)
