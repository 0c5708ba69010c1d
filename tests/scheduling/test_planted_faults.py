"""The checks can fail: each fault planted here is found by random lives of the scheduler."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from sparkinfer.scheduling import prefix_index
from sparkinfer.scheduling.blocks import BlockPool
from sparkinfer.scheduling.decode_table import DecodeTable
from sparkinfer.scheduling.invariants import IntegrityError
from sparkinfer.scheduling.prefix_cache import PrefixCache
from sparkinfer.scheduling.resources import Resources
from sparkinfer.scheduling.roster import Roster
from sparkinfer.scheduling.scheduler import Scheduler
from sparkinfer.scheduling.sequence import Phase, Sequence
from sparkinfer.scheduling.speculation import Speculation
from sparkinfer.scheduling.types import MoveKind, Row, StepPlan, TokenUpdates
from tests.scheduling.driver import fuzz
from tests.scheduling.fake_model import FakeRunner

LIVES = 60
Patch = Callable[[pytest.MonkeyPatch], None]


def state_of_another_position(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint is written one block early, its key says otherwise."""
    schedule = Scheduler.schedule

    def planted(self: Scheduler) -> StepPlan | None:
        plan = schedule(self)
        for row in plan.rows if plan else []:
            if row.checkpoints and row.checkpoints[0].position - 16 > row.start:
                first = row.checkpoints[0]
                moved = type(first)(first.position - 16, first.snapshot)
                plan.rows[plan.rows.index(row)] = msgspec.structs.replace(
                    row, checkpoints=(moved, *row.checkpoints[1:])
                )
        return plan

    patch.setattr(Scheduler, "schedule", planted)


def no_restore(patch: pytest.MonkeyPatch) -> None:
    """A hit takes the KV but not the state."""
    schedule = Scheduler.schedule

    def planted(self: Scheduler) -> StepPlan | None:
        plan = schedule(self)
        for row in plan.rows if plan else []:
            row.restore = None
        return plan

    patch.setattr(Scheduler, "schedule", planted)


def moves_lost(patch: pytest.MonkeyPatch) -> None:
    """A block comes back from the host in the books only."""
    schedule = Scheduler.schedule

    def planted(self: Scheduler) -> StepPlan | None:
        plan = schedule(self)
        if plan:
            plan.moves = [m for m in plan.moves if m.kind is MoveKind.TO_HOST]
        return plan

    patch.setattr(Scheduler, "schedule", planted)


def released_in_flight(patch: pytest.MonkeyPatch) -> None:
    """A request that ends gives its blocks and slot back although a step in flight uses them."""
    patch.setattr(Sequence, "in_flight", property(lambda self: 0))


def published_without_tokens(patch: pytest.MonkeyPatch) -> None:
    """Hashes do not chain: equal blocks after different beginnings are taken for equal prefixes."""

    def planted(hashes: list[bytes], request: object, num_blocks: int) -> None:
        for block in range(len(hashes), num_blocks):
            tokens = request.tokens(block * 16, block * 16 + 16)  # type: ignore[attr-defined]
            hashes.append(bytes(tokens[-1:]) + bytes([block]))

    patch.setattr(prefix_index, "extend_hashes", planted)
    patch.setattr("sparkinfer.scheduling.prefix_cache.extend_hashes", planted)


def blocks_leak(patch: pytest.MonkeyPatch) -> None:
    """A release forgets the last block."""
    release = BlockPool.release
    patch.setattr(BlockPool, "release", lambda self, blocks: release(self, list(blocks)[:-1] or list(blocks)))


def references_leak(patch: pytest.MonkeyPatch) -> None:
    """A preempted or finished request keeps its cache entries referenced."""
    patch.setattr(PrefixCache, "let_go", lambda self, sequence: setattr(sequence, "node", None) or [])


def snapshot_kept(patch: pytest.MonkeyPatch) -> None:
    """A snapshot of a request that was cancelled in flight is never given back."""
    patch.setattr(PrefixCache, "drop_snapshot", lambda self, snapshot: None)


def retired_at_once(patch: pytest.MonkeyPatch) -> None:
    """Blocks that were replaced by shared ones are free while a step in flight reads them."""

    def planted(self: Resources, last_step: int | None) -> None:
        blocks, self.cache.retired_blocks = self.cache.retired_blocks, []
        self.blocks.release(blocks)
        hosts, self.cache.retired_host = self.cache.retired_host, []
        for host in hosts:
            self.cache.host.release(host)

    patch.setattr(Resources, "retire", planted)


def preempted_keeps_count(patch: pytest.MonkeyPatch) -> None:
    """A preempted request believes that what it computed still exists (vllm-metal #488)."""
    preempt = Roster.preempt

    def planted(self: Roster, sequence: Sequence) -> None:
        computed = sequence.request.num_computed
        preempt(self, sequence)
        sequence.request.num_computed = computed

    patch.setattr(Roster, "preempt", planted)


def rejected_drafts_counted(patch: pytest.MonkeyPatch) -> None:
    """A request goes on behind all its drafts, the rejected ones included."""
    resume = DecodeTable.resume

    def planted(self: DecodeTable, sequence: Sequence, computed: int) -> None:
        further = min(computed + 1, sequence.end_computed)
        resume(self, sequence, further if computed % 3 else computed)

    patch.setattr(DecodeTable, "resume", planted)


def states_of_rejected_drafts_published(patch: pytest.MonkeyPatch) -> None:
    """A state saved inside the drafts is entered whether they were accepted or not (vLLM #53505)."""
    take = Speculation._take

    def planted(self: Speculation, row: Row, sequence: Sequence, tokens: list[int], updates: TokenUpdates) -> int:
        wrong = tuple(c for c in row.checkpoints if c.position > row.start + len(tokens))
        kept = take(self, msgspec.structs.replace(row, checkpoints=row.checkpoints[: -len(wrong) or None]), sequence,
                    tokens, updates)  # fmt: skip
        if sequence.phase is Phase.DECODE:
            for checkpoint in wrong:
                if checkpoint.position <= sequence.request.num_tokens + 8:
                    self.resources.publish(sequence, (checkpoint,), decode=True)
        return kept

    patch.setattr(Speculation, "_take", planted)


def second_row_behind_drafts(patch: pytest.MonkeyPatch) -> None:
    """A request gets its next row before it is known where it goes on."""
    hold = DecodeTable.hold

    def planted(self: DecodeTable, sequence: Sequence) -> None:
        hold(self, sequence)
        self.active[sequence.request.slot] = True
        self.rows.insert(sequence)

    patch.setattr(DecodeTable, "hold", planted)


def state_not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """A runner that leaves the state behind the rejected drafts."""
    verify = FakeRunner._verify

    def planted(self: FakeRunner, row: Row, inputs: list[int] | None) -> list[int]:
        tokens = verify(self, row, inputs)
        if len(tokens) < row.length:
            stop = row.start + row.length - 1
            self.slots[row.slot] = self.kv[row.blocks[stop // 16]][stop % 16]
        return tokens

    patch.setattr(FakeRunner, "_verify", planted)


def _live() -> None:
    for seed in range(LIVES):
        fuzz(seed, 300)


FAULTS: list[Patch] = [
    state_of_another_position, no_restore, moves_lost, released_in_flight, published_without_tokens, blocks_leak,
    references_leak, snapshot_kept, retired_at_once, preempted_keeps_count,
    rejected_drafts_counted, states_of_rejected_drafts_published, second_row_behind_drafts, state_not_rolled_back,
]  # fmt: skip


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_planted_fault_is_found(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError, ValueError, IndexError, KeyError)):
        _live()
