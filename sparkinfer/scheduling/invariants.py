"""Conservation laws of the scheduler, checked in tests and when the engine is idle.

Every block, slot, snapshot and host block is free or held by what claims it, once per claim; every cache entry lies at
the position that its key says; what requests believe about steps in flight is what the plans say.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from sparkinfer.errors import SparkinferError
from sparkinfer.scheduling.prefix_index import PrefixNode, extend_hashes
from sparkinfer.scheduling.sequence import Phase, Sequence
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, MoveKind, RequestState

if TYPE_CHECKING:
    from sparkinfer.scheduling.scheduler import Scheduler


class IntegrityError(SparkinferError):
    """The scheduler's books do not balance: a fault of this program, never of its input."""


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise IntegrityError(f"scheduler integrity: {what}")


def check_integrity(scheduler: Scheduler) -> None:
    """Check all invariants; takes time in proportion to everything held. Raises IntegrityError on the first broken."""
    sequences = scheduler.holders()
    _check_blocks(scheduler, sequences)
    _check_slots(scheduler, sequences)
    _check_snapshots(scheduler)
    _check_tree(scheduler, sequences)
    _check_requests(scheduler, sequences)
    if not scheduler.has_work:
        resources = scheduler.resources
        cached = sum(len(node.blocks) for node in scheduler.cache.index)
        _require(resources.slots.num_used == 0, "slots are taken while idle")
        _require(resources.blocks.num_used == cached, "blocks are held by nobody while idle")
        _require(not scheduler.cache.orphans, "a snapshot is held for a step that has committed")
        _require(not resources.retired, "blocks wait for a step while none is in flight")


def _check_blocks(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    resources, cache = scheduler.resources, scheduler.cache
    holders: Counter[int] = Counter()
    host_holders: Counter[int] = Counter(cache.retired_host)
    holders.update(cache.retired_blocks)
    for sequence in sequences:
        _require(len(set(sequence.request.blocks)) == len(sequence.request.blocks), "a request holds a block twice")
        cached = sequence.node.depth if sequence.node is not None else 0
        holders.update(sequence.request.blocks[cached:])
    for node in cache.index:
        holders.update(node.blocks)
        host_holders.update(node.host)
    for _, blocks, host_blocks in resources.retired:
        holders.update(blocks)
        host_holders.update(host_blocks)
    pool = resources.blocks
    for block in range(pool.total):
        _require(pool.refs[block] == holders[block], f"block {block}: {pool.refs[block]} references, {holders[block]}")
    free = pool.free_ids()
    _require(len(set(free)) == len(free), "a block is free twice")
    _require(set(free) == {b for b in range(pool.total) if not pool.refs[b]}, "free list and references differ")
    _require(all(count == 1 for count in host_holders.values()), "a host block has two owners")
    used = {b for b in range(cache.host.total) if cache.host.is_used(b)}
    _require(used == set(host_holders), "host blocks taken and host blocks owned differ")


def _check_slots(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    slots = scheduler.resources.slots
    owned = [s.request.slot for s in sequences if s.request.slot >= 0]
    _require(len(set(owned)) == len(owned), "two requests share a slot")
    _require(set(owned) == {s for s in range(slots.total) if slots.is_used(s)}, "slots taken and slots owned differ")


def _check_snapshots(scheduler: Scheduler) -> None:
    cache = scheduler.cache
    owned: list[int] = []
    for node in (*cache.index, *cache.orphans):
        if node.snapshot >= 0:
            owned.append(node.snapshot)
            _require(cache.snapshots.position[node.snapshot] == node.position, "snapshot position is not key position")
    pins: Counter[int] = Counter()
    for flight in scheduler.flights():
        pins.update(id(node) for node in flight.restores)
        for row in flight.plan.rows:
            for checkpoint in row.checkpoints:
                owned.append(checkpoint.snapshot)
                _require(
                    cache.snapshots.position[checkpoint.snapshot] == checkpoint.position,
                    "a checkpoint in flight and its snapshot disagree on the position",
                )
                _require(checkpoint.position % KV_BLOCK_TOKENS == 0, "a checkpoint off the block boundaries")
                inside = row.start < checkpoint.position <= row.start + row.length
                _require(inside, "a checkpoint outside its row")
    _require(len(set(owned)) == len(owned), "a snapshot has two owners")
    used = {s for s in range(cache.snapshots.total) if cache.snapshots.is_used(s)}
    _require(used == set(owned), "snapshots taken and snapshots owned differ")
    for node in (*cache.index, *cache.orphans):
        _require(node.pins == pins[id(node)], f"node at {node.position}: {node.pins} pins, {pins[id(node)]} restores")


def _check_tree(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    index = scheduler.cache.index
    refs: Counter[int] = Counter()
    for sequence in sequences:
        if sequence.node is not None:
            path = sequence.node.path()
            refs.update(id(node) for node in path)
            _check_chain(sequence, path)
    evictable = 0
    for node in index:
        _require(node.refs == refs[id(node)], f"node at {node.position}: {node.refs} references, {refs[id(node)]} held")
        _require(len(node.hashes) == len(node.blocks) + len(node.host) > 0, "a node has not one KV block for each hash")
        _require(node.refs == 0 or not node.host, "a referenced node is not on the device")
        _require(node.refs > 0 or bool(node.children) or node.snapshot >= 0, "a node leads nowhere")
        _require(node.device_children == sum(bool(c.blocks) for c in node.children), "device children miscounted")
        _require(node.device_children == 0 or not node.host, "a child is on the device, its parent is not")
        _require(index.beginning(node.hashes[0]) is node, "a node is not found by its beginning")
        parent = node.parent
        _require(node.start == (parent.depth if parent is not None else 0), "a node does not begin at its parent's end")
        if parent is not None:
            _require(index.holds(parent) and node in parent.children, "parent and child disagree")
            _require(parent.refs >= node.refs, "a child has more references than its parent")
        if node.refs == 0:
            evictable += len(node.blocks)
    _require(evictable == scheduler.cache.num_evictable, "evictable blocks miscounted")
    _require(sum(len(node.hashes) for node in index) == index.num_blocks, "blocks of the index miscounted")


def _check_chain(sequence: Sequence, path: list[PrefixNode]) -> None:
    request, depth = sequence.request, path[-1].depth
    hashes: list[bytes] = []
    extend_hashes(hashes, request, depth)
    _require([h for node in path for h in node.hashes] == hashes, "a request holds a node of other tokens")
    blocks = [block for node in path for block in node.blocks]
    _require(blocks == request.blocks[:depth], "a request reads another block than its node's")


def _check_requests(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    rows: Counter[int] = Counter()
    outputs: Counter[int] = Counter()
    verifying: Counter[int] = Counter()
    for flight in scheduler.flights():
        holders = [*flight.decoding, *flight.verifying, *flight.prefilling]
        for row, sequence in zip(flight.plan.rows, holders, strict=True):
            _require(row.request is sequence.request, "a row and its sequence differ")
            rows[id(sequence)] += 1
            verifying[id(sequence)] += row.num_drafts > 0
            _require(row.length == 1 + row.num_drafts or not row.is_decode, "a decode row of another length")
            room = len(row.blocks) * KV_BLOCK_TOKENS
            _require(row.start + row.length <= room, "a row, its drafts included, reaches beyond its blocks")
            outputs[id(sequence)] += row.samples
        for move in flight.plan.moves:
            if move.kind is MoveKind.TO_DEVICE:
                _require(scheduler.cache.host.is_used(move.host_block), "a step reads a host block that is free")
    _check_table(scheduler, sequences)
    for sequence in sequences:
        request = sequence.request
        _require(sequence.in_flight == rows[id(sequence)], "rows in flight miscounted")
        _require(int(sequence.verifying) == verifying[id(sequence)], "rows with drafts in flight miscounted")
        if sequence.phase is Phase.DONE:
            continue
        _require(request.num_in_flight_outputs == outputs[id(sequence)], "outputs in flight miscounted")
        if sequence.phase is Phase.WAITING:
            idle = not request.blocks and request.slot < 0 and sequence.node is None and request.num_computed == 0
            _require(idle and request.state is RequestState.WAITING, "a waiting request holds something")
        else:
            _require(request.state is RequestState.RUNNING and request.slot >= 0, "a running request has no slot")
            room = len(request.blocks) * KV_BLOCK_TOKENS
            _require(request.num_computed <= room, "more tokens computed than blocks hold")
            known = request.num_tokens + request.num_in_flight_outputs
            _require(request.num_computed <= known, "more tokens computed than exist")


def _check_table(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    table = scheduler.resources.table
    inside = {s.request.slot: s for s in sequences if s.request._table is not None}
    _require(set(np.flatnonzero(table.sequences != None).tolist()) == set(inside), "the decode table has another slot")  # noqa: E711
    rows = table.rows
    _require(np.flatnonzero(table.active).tolist() == rows.slots, "active requests miscounted")
    columns = zip(rows.slots, rows.sequences, rows.requests, rows.outputs, rows.blocks, strict=True)
    for slot, sequence, request, output, blocks in columns:
        mine = inside.get(slot) is sequence and sequence.request is request and blocks is request.blocks
        _require(mine, "the decode table shows another request")
        _require(output is request.output, "the decode table shows another request's output")
    for slot, sequence in inside.items():
        request = sequence.request
        _require(table.sequences[slot] is sequence, "the decode table shows another request")
        room = len(request.blocks) * KV_BLOCK_TOKENS
        _require(table.last[slot] < 0 or table.room[slot] == room, "the decode table shows another number of blocks")
        ready = sequence.phase is Phase.DECODE and not sequence.preempting
        ready = ready and request.num_computed < sequence.end_computed and not sequence.verifying
        _require(bool(table.active[slot]) == ready, "a request that can generate rests, or the other way round")
        _require(ready or bool(table.attention[slot]), "a commit would not look at a request that rests")
