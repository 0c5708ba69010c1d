"""A model without weights: its next token is a pure function of the whole token history.

The "recurrent state" is a hash chained over all tokens so far, the "KV" of a position is the state after it, and the
next token mixes the state with every KV entry before it. A wrong block, a stale state, a restore from the wrong
snapshot or a lost move therefore shows up as a wrong token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, MoveKind, Request, Row, StepPlan, StepResult

VOCAB = 97
POISON = -1
MASK = (1 << 61) - 1


def advance(state: int, token: int, position: int) -> int:
    """The state after one more token."""
    return hash((state, token, position)) & MASK


def sample(state: int, kv: tuple[int, ...], seed: int, output_index: int) -> int:
    """The next token; `seed` and `output_index` stand for the sampling noise."""
    return hash((state, kv, seed, output_index)) % VOCAB


@lru_cache(maxsize=4096)
def reference(prompt: tuple[int, ...], seed: int, count: int) -> tuple[int, ...]:
    """The first `count` outputs of a run without any scheduler."""
    state, kv = 0, []
    for position, token in enumerate(prompt):
        state = advance(state, token, position)
        kv.append(state)
    outputs: list[int] = []
    while len(outputs) < count:
        outputs.append(sample(state, tuple(kv), seed, len(outputs)))
        state = advance(state, outputs[-1], len(kv))
        kv.append(state)
    return tuple(outputs)


def expected_output(request: Request, max_model_len: int) -> list[int]:
    """What `request` must produce: the reference up to its stop token or length."""
    count = min(request.sampling.max_tokens, max_model_len - len(request.prompt))
    outputs = list(reference(tuple(request.prompt), request.sampling.seed, count))
    for index, token in enumerate(outputs):
        if token in request.end_token_ids and index >= request.sampling.min_tokens:
            return outputs[: index + 1]
    return outputs


def state_after(tokens: list[int]) -> int:
    """The state that a fresh prefill of `tokens` ends in."""
    state = 0
    for position, token in enumerate(tokens):
        state = advance(state, token, position)
    return state


@dataclass
class Launched:
    """A plan with the host's inputs as they were at launch (None: pending)."""

    plan: StepPlan
    inputs: list[list[int] | None]
    """Of each row; of one with drafts, the token before them."""


class Drafter(Protocol):
    """Proposes the tokens that a row verifies."""

    def propose(self, row: Row) -> list[int]: ...


class FakeRunner:
    """Executes plans on the fake model. `launch`/`collect` run a plan late, at `collect`, as a device would."""

    def __init__(self, config: SchedulerConfig, drafter: Drafter | None = None) -> None:
        self.drafter = drafter
        self.kv = [[POISON] * KV_BLOCK_TOKENS for _ in range(config.num_kv_blocks)]
        self.host_kv = [[POISON] * KV_BLOCK_TOKENS for _ in range(config.num_host_blocks)]
        self.slots = [POISON] * config.max_num_seqs
        self.last_token = [POISON] * config.max_num_seqs
        self.snapshots = [POISON] * config.num_snapshots
        self.launched: deque[Launched] = deque()
        self.plans = 0
        self.tokens = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.launch(plan)
        return self.collect()

    def launch(self, plan: StepPlan) -> None:
        check_plan(plan)
        for earlier in self.launched:
            check_no_reuse(earlier.plan, plan)
        known = [r.length - r.num_drafts for r in plan.rows]
        inputs = [
            None if r.pending else r.request.tokens(r.start, r.start + n) for r, n in zip(plan.rows, known, strict=True)
        ]
        assert all(tokens is None or len(tokens) == n for tokens, n in zip(inputs, known, strict=True))
        self.launched.append(Launched(plan, inputs))

    def collect(self) -> StepResult:
        launched = self.launched.popleft()
        plan = launched.plan
        self.plans += 1
        for move in plan.moves:
            if move.kind is MoveKind.TO_HOST:
                self.host_kv[move.host_block] = list(self.kv[move.block])
                self.kv[move.block] = [POISON] * KV_BLOCK_TOKENS
            else:
                self.kv[move.block] = list(self.host_kv[move.host_block])
                self.host_kv[move.host_block] = [POISON] * KV_BLOCK_TOKENS
        tokens, verified = [], []
        for row, inputs in zip(plan.rows, launched.inputs, strict=True):
            if row.num_drafts:
                verified.append(self._verify(row, inputs))
            elif (token := self._run(row, inputs)) is not None:
                tokens.append(token)
        return StepResult(plan.step_id, tokens, [None] * len(tokens), verified)

    def _verify(self, row: Row, inputs: list[int] | None) -> list[int]:
        """All positions of the row are computed and written; the state goes back to the last accepted one."""
        assert self.drafter is not None, "a row with drafts and no drafter"
        drafts = self.drafter.propose(row)
        tokens = [*([self.last_token[row.slot]] if inputs is None else inputs), *drafts]
        self.tokens += row.length
        saves = {c.position: c.snapshot for c in row.checkpoints}
        kv = [entry for block in row.blocks for entry in self.kv[block]][: row.start]
        state, states, sampled = self.slots[row.slot], [], []
        for place, token in enumerate(tokens):
            position = row.start + place
            state = advance(state, token, position)
            self.kv[row.blocks[position // KV_BLOCK_TOKENS]][position % KV_BLOCK_TOKENS] = state
            kv.append(state)
            states.append(state)
            sampled.append(sample(state, tuple(kv), row.request.sampling.seed, row.output_index + place))
            if position + 1 in saves:
                self.snapshots[saves.pop(position + 1)] = state
        assert not saves, "a checkpoint lies outside its row"
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == sampled[accepted]:
            accepted += 1
        self.slots[row.slot] = states[accepted]
        self.last_token[row.slot] = sampled[accepted]
        return sampled[: accepted + 1]

    def _run(self, row: Row, inputs: list[int] | None) -> int | None:
        tokens = [self.last_token[row.slot]] if inputs is None else inputs
        self.tokens += row.length
        state = self.slots[row.slot] if row.start else 0
        if row.restore is not None:
            state = self.snapshots[row.restore]
        saves = {c.position: c.snapshot for c in row.checkpoints}
        for position, token in enumerate(tokens, row.start):
            state = advance(state, token, position)
            self.kv[row.blocks[position // KV_BLOCK_TOKENS]][position % KV_BLOCK_TOKENS] = state
            if position + 1 in saves:
                self.snapshots[saves.pop(position + 1)] = state
        assert not saves, "a checkpoint lies outside its row"
        self.slots[row.slot] = state
        if not row.samples:
            return None
        stop = row.start + row.length
        kv: list[int] = []
        for block in row.blocks[: -(-stop // KV_BLOCK_TOKENS)]:
            kv += self.kv[block]
        token = sample(state, tuple(kv[:stop]), row.request.sampling.seed, row.output_index)
        self.last_token[row.slot] = token
        return token


def check_plan(plan: StepPlan) -> None:
    """What every plan promises, whatever the policy."""
    kinds = [(not row.is_decode, row.num_drafts > 0) for row in plan.rows]
    assert plan.rows, "an empty plan"
    assert kinds == sorted(kinds), "decode rows come first, then those with drafts"
    assert len({r.slot for r in plan.rows}) == len(plan.rows), "two rows share a slot"
    assert len({id(r.request) for r in plan.rows}) == len(plan.rows), "a request has two rows"
    written: set[int] = set()
    for row in plan.rows:
        assert row.length >= 1
        assert row.start + row.length <= len(row.blocks) * KV_BLOCK_TOKENS, "a row reaches beyond its blocks"
        if row.is_decode:
            assert row.length == 1 + row.num_drafts
            assert row.samples
            assert row.restore is None
        assert row.is_decode or not (row.pending or row.num_drafts)
        assert row.restore is None or row.start > 0
        mine = set(row.blocks[row.start // KV_BLOCK_TOKENS : -(-(row.start + row.length) // KV_BLOCK_TOKENS)])
        assert not (mine & written), "two rows write one block"
        written |= mine
    for row in plan.rows:
        assert not (written & set(row.blocks[: row.start // KV_BLOCK_TOKENS])), "a row writes what another one reads"


def check_no_reuse(earlier: StepPlan, later: StepPlan) -> None:
    """Nothing that a step in flight uses is given to somebody else (mini-sglang #67, #102)."""
    reads = {b: r.request for r in earlier.rows for b in r.blocks[: -(-(r.start + r.length) // KV_BLOCK_TOKENS)]}
    shared: dict[int, set[int]] = {}
    for row in earlier.rows:
        for block in row.blocks[: -(-(row.start + row.length) // KV_BLOCK_TOKENS)]:
            shared.setdefault(block, set()).add(id(row.request))
    verifying = {id(r.request) for r in earlier.verify}
    assert not verifying & {id(r.request) for r in later.rows}, "a row of a request that may not have got there"
    slots = {r.slot: r.request for r in earlier.rows}
    snapshots = {r.restore for r in earlier.rows} | {c.snapshot for r in earlier.rows for c in r.checkpoints}
    for row in later.rows:
        assert slots.get(row.slot, row.request) is row.request, "a slot in use by a step in flight was given away"
        first, last = row.start // KV_BLOCK_TOKENS, -(-(row.start + row.length) // KV_BLOCK_TOKENS)
        for block in row.blocks[first:last]:
            assert shared.get(block, set()) <= {id(row.request)}, "a block in use by a step in flight was given away"
        for checkpoint in row.checkpoints:
            assert checkpoint.snapshot not in snapshots, "a snapshot in use by a step in flight was given away"
        assert row.restore is None or row.restore not in {c.snapshot for r in earlier.rows for c in r.checkpoints}
    host_read = {m.host_block for m in earlier.moves if m.kind is MoveKind.TO_DEVICE}
    for move in later.moves:
        assert move.block not in reads, "a move touches a block in use by a step in flight"
        assert move.kind is MoveKind.TO_DEVICE or move.host_block not in host_read, "a host block was reused too early"
