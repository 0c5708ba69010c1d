"""What the scheduler, the engine loop and the model runner say to each other.

The scheduler turns waiting and running requests into a `StepPlan`; the model runner executes it and
answers with a `StepResult`; the scheduler commits the result. All counts are tokens, all positions are
zero-based token positions in a request's sequence (prompt followed by generated tokens).

A plan keeps its decode rows as columns (`DecodeRows`), and a commit its tokens (`TokenUpdates`): at a thousand running
requests one object per row and step would be most of a step's bookkeeping. `StepPlan.rows` shows all rows as objects to
whom the cost does not matter, and so do `TokenUpdates` when one walks through them.
`Row` and `TokenUpdate` are msgspec structs, which are made several times faster than dataclasses. Change one with
`msgspec.structs.replace`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, overload

import msgspec
import numpy as np

if TYPE_CHECKING:
    from sparkinfer.scheduling.decode_table import DecodeTable

KV_BLOCK_TOKENS = 16
"""Tokens per KV block, the unit of KV allocation and of prefix sharing."""
CHUNK_ALIGN = 64
"""A chunk that does not end its prompt ends at a multiple of this, the scan kernels' chunk."""
MAX_PASS_CHECKPOINTS = 256
"""Checkpoints that one pass may save while prompts run: the runner's buffers are made for them."""


class FinishReason(enum.StrEnum):
    """Why a request ended, in the words of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestState(enum.StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen. Validated at construction by the server, trusted here.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` keys the counter-based
    noise together with the output index, so tokens depend on neither batch composition nor preemption;
    the server draws one where the client gave none. `logprobs` is the number of alternatives reported
    beside the sampled token (None: no logprobs at all), `prompt_logprobs` the same for every prompt token but the
    first; a request that asks for it must not use the prefix cache, which would skip positions.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    prompt_logprobs: int | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the engine. Fields under "progress" are written by the scheduler only."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    arrival_s: float = 0.0
    priority: int = 0
    """Lower runs earlier; equal priorities run in order of arrival."""
    cache_salt: str = ""
    """Prefix-cache contents are visible only to requests of the same salt."""
    use_cache: bool = True
    prompt_hashes: bytes = b""
    """Hashes of the prompt's full KV blocks, joined, as `prefix_index.prompt_hashes` makes them; empty: they are
    computed when they are needed."""

    # progress
    state: RequestState = RequestState.WAITING
    output: list[int] = field(default_factory=list)
    num_cached: int = 0
    """Prompt tokens that the first admission took from the prefix cache."""
    blocks: list[int] = field(default_factory=list)
    slot: int = -1
    """Recurrent-state slot, -1 while none is held. The runner keeps the last sampled token by slot too."""
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """By prompt position, as far as computed; written by the runner where `sampling.prompt_logprobs` asks for them."""
    _computed: int = 0
    _in_flight_outputs: int = 0
    _table: DecodeTable | None = None
    """Holds the two counts above while the request generates."""

    @property
    def num_computed(self) -> int:
        """Tokens whose KV and recurrent state exist, in-flight steps included."""
        return self._computed if self._table is None else int(self._table.start[self.slot])

    @num_computed.setter
    def num_computed(self, value: int) -> None:
        if self._table is None:
            self._computed = value
        else:
            self._table.start[self.slot] = value

    @property
    def num_in_flight_outputs(self) -> int:
        """Tokens being sampled by steps that are not committed yet."""
        return self._in_flight_outputs if self._table is None else int(self._table.flying[self.slot])

    @num_in_flight_outputs.setter
    def num_in_flight_outputs(self, value: int) -> None:
        if self._table is None:
            self._in_flight_outputs = value
        else:
            self._table.flying[self.slot] = value

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host: prompt and committed output."""
        return len(self.prompt) + len(self.output)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end the request once `min_tokens` outputs exist; the runner masks them until then."""
        stop = self.sampling.stop_token_ids
        return stop if self.sampling.ignore_eos else stop | self.eos_token_ids

    def token_at(self, position: int) -> int:
        """The token id at `position`; raises IndexError beyond `num_tokens`."""
        n = len(self.prompt)
        return self.prompt[position] if position < n else self.output[position - n]

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids of positions [start, stop)."""
        n = len(self.prompt)
        if stop <= n:
            return self.prompt[start:stop]
        if start >= n:
            return self.output[start - n : stop - n]
        return self.prompt[start:] + self.output[: stop - n]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Save the recurrent state as it is after `position` tokens into snapshot `snapshot`."""

    position: int
    snapshot: int


class Row(msgspec.Struct, eq=False, gc=False):
    """One request's share of a step: it computes positions [start, start + length).

    A row with `start == 0` begins with an all-zero recurrent state and conv window; a row with `restore`
    begins with that snapshot's; any other row continues from what its slot holds. `pending` says that the
    input token is still being sampled by the step before: the runner then takes it from its last-token
    table at `slot`. `samples` says that the row's last position yields a new token, number `output_index`
    of the request (which keys the sampling noise); while it is below `min_tokens` the runner masks the request's
    `end_token_ids`. `blocks` and `slot` stay valid when the request moves on: `blocks` may grow at its end, its
    entries never change: a request whose blocks are replaced gets a new list.

    A decode row with `num_drafts` verifies that many drafts of the drafter behind its input token, `length` being
    `1 + num_drafts`: each of its positions samples a token (numbers `output_index` and on), and the drafts count as far
    as they are the tokens so sampled. With `a` drafts accepted the slot must hold the state after position `start + a`;
    KV of the rejected ones is overwritten by the request's next row. Its checkpoints are written for the state after
    `position` tokens whether those are accepted or not; the scheduler drops the snapshots of those that are not.
    """

    request: Request
    slot: int
    blocks: list[int]
    start: int
    length: int
    is_decode: bool
    samples: bool
    output_index: int
    pending: bool = False
    restore: int | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    num_drafts: int = 0


class MoveKind(enum.StrEnum):
    """Direction of a KV block's copy between device and host pool."""

    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Copy one KV block (all layers) between device block `block` and host block `host_block`."""

    kind: MoveKind
    block: int
    host_block: int


# A plan begins without decode rows, so these are not made each time. Arrays without entries cannot change.
_NO_NUMBERS = np.empty(0, dtype=np.int64)
_NO_FLAGS = np.empty(0, dtype=bool)


class DecodeRows:
    """The decode rows of a plan, as columns: every one computes one token and samples the next.

    All columns have one entry per row; a scheduler's rows are in ascending order of slots. `slots`, `starts` (the
    position computed) and `output_indices` are int64 arrays, `pending` a bool array; `requests`, their `outputs` and
    `blocks` are lists.
    `checkpoints` has the few rows that save a state, by row number. `changed` numbers the rows whose block list is
    another one, or longer, than in the request's row before; of all other rows a runner knows the blocks already. The
    meaning of each column is that of `Row`'s field.
    """

    __slots__ = (
        "blocks", "changed", "checkpoints", "output_indices", "outputs", "pending", "requests", "slots", "starts",
    )  # fmt: skip

    def __init__(
        self,
        slots: np.ndarray,
        starts: np.ndarray,
        output_indices: np.ndarray,
        pending: np.ndarray,
        requests: list[Request],
        outputs: list[list[int]],
        blocks: list[list[int]],
        checkpoints: dict[int, tuple[Checkpoint, ...]],
        changed: list[int],
    ) -> None:
        self.slots, self.starts, self.output_indices, self.pending = slots, starts, output_indices, pending
        self.requests, self.outputs, self.blocks = requests, outputs, blocks
        self.checkpoints, self.changed = checkpoints, changed

    def __len__(self) -> int:
        return len(self.requests)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> DecodeRows:
        """The columns of given rows, in their order; all blocks count as changed.

        Raises ValueError for a row that contradicts the contract of a decode row.
        """
        rows = list(rows)
        if not rows:
            return cls(_NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, _NO_FLAGS, [], [], [], {}, [])
        for row in rows:
            if row.length != 1:
                raise ValueError(f"request {row.request.id}: a decode row computes 1 token, not {row.length}")
            if not row.samples or row.restore is not None:
                raise ValueError(f"request {row.request.id}: a decode row samples, and restores nothing")
        return cls(
            slots=np.array([row.slot for row in rows], dtype=np.int64),
            starts=np.array([row.start for row in rows], dtype=np.int64),
            output_indices=np.array([row.output_index for row in rows], dtype=np.int64),
            pending=np.array([row.pending for row in rows], dtype=bool),
            requests=[row.request for row in rows],
            outputs=[row.request.output for row in rows],
            blocks=[row.blocks for row in rows],
            checkpoints={index: row.checkpoints for index, row in enumerate(rows) if row.checkpoints},
            changed=list(range(len(rows))),
        )

    def row(self, index: int) -> Row:
        """One row as an object."""
        return Row(
            request=self.requests[index],
            slot=int(self.slots[index]),
            blocks=self.blocks[index],
            start=int(self.starts[index]),
            length=1,
            is_decode=True,
            samples=True,
            output_index=int(self.output_indices[index]),
            pending=bool(self.pending[index]),
            checkpoints=self.checkpoints.get(index, ()),
        )

    def rows(self) -> list[Row]:
        """All of them as objects."""
        columns = zip(
            self.requests, self.slots.tolist(), self.blocks, self.starts.tolist(), self.output_indices.tolist(),
            self.pending.tolist(), strict=True,
        )  # fmt: skip
        made = [
            Row(request, slot, blocks, start, 1, True, True, index, pending)
            for request, slot, blocks, start, index, pending in columns
        ]
        for number, checkpoints in self.checkpoints.items():
            made[number].checkpoints = checkpoints
        return made


class StepPlan:
    """One forward pass: the decode rows (`decode`, by slot), then those that verify drafts (`verify`), then the prompt
    chunks (`prefill`), these two oldest first.

    `moves` happen before the pass, in order. Rows of one plan never share a slot.
    """

    __slots__ = ("_rows", "decode", "moves", "prefill", "step_id", "verify")

    def __init__(self, step_id: int, rows: Iterable[Row] = (), moves: Iterable[BlockMove] = ()) -> None:
        """A plan of given rows; a scheduler fills an empty one. Raises ValueError for rows out of order."""
        rows = list(rows)
        kinds = [(not row.is_decode, row.num_drafts > 0) for row in rows]
        if kinds != sorted(kinds):
            raise ValueError(f"step {step_id}: decode rows, rows with drafts and prompt rows must come in this order")
        self.step_id = step_id
        self.decode = DecodeRows.of(row for row in rows if row.is_decode and not row.num_drafts)
        self.verify = [row for row in rows if row.is_decode and row.num_drafts]
        self.prefill = [row for row in rows if not row.is_decode]
        self.moves = list(moves)
        self._rows: list[Row] | None = None

    @property
    def rows(self) -> list[Row]:
        """All rows as objects, decode rows first. They are made when asked for, and then kept."""
        if self._rows is None:
            self._rows = self.decode.rows() + self.verify + self.prefill
        return self._rows

    @property
    def num_rows(self) -> int:
        """Rows of all kinds."""
        return len(self.decode) + len(self.verify) + len(self.prefill)

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the pass."""
        return len(self.decode) + sum(row.length for row in self.verify) + sum(row.length for row in self.prefill)

    @property
    def num_decode(self) -> int:
        """Rows that decode, with drafts or without."""
        return len(self.decode) + len(self.verify)

    @property
    def num_sampled(self) -> int:
        """Rows that yield one token: all that sample but those that verify drafts."""
        return len(self.decode) + sum(row.samples for row in self.prefill)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at temperature 1 before any filter: the sampled token's, and the top ones'."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class StepResult:
    """What a step produced: one entry per row with `samples` and without drafts, in row order.

    `verified` has an entry per row of `StepPlan.verify`: the accepted drafts and the token after them, 1 to
    `1 + num_drafts` tokens.
    """

    step_id: int
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    verified: list[list[int]] = field(default_factory=list)


class TokenUpdate(msgspec.Struct, eq=False, gc=False):
    """A committed token of a request, or its end without one (`token` None)."""

    request: Request
    token: int | None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None


class TokenUpdates(Sequence[TokenUpdate]):
    """What a step has yielded, in order, as columns: see the module.

    As a sequence it makes its objects when asked for; `columns` is for who looks at each of a thousand.
    """

    __slots__ = ("finish_reasons", "logprobs", "requests", "tokens")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.tokens: list[int | None] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.finish_reasons: list[FinishReason | None] = []

    def add(
        self, request: Request, token: int, logprobs: TokenLogprobs | None, finish_reason: FinishReason | None
    ) -> None:
        """One more token."""
        self.requests.append(request)
        self.tokens.append(token)
        self.logprobs.append(logprobs)
        self.finish_reasons.append(finish_reason)

    def extend(
        self,
        requests: list[Request],
        tokens: list[int],
        logprobs: list[TokenLogprobs | None],
        finish_reasons: list[FinishReason | None],
    ) -> None:
        """More tokens, by column."""
        self.requests += requests
        self.tokens += tokens
        self.logprobs += logprobs
        self.finish_reasons += finish_reasons

    def columns(self) -> Iterable[tuple[Request, int | None, TokenLogprobs | None, FinishReason | None]]:
        """The fields of each update."""
        return zip(self.requests, self.tokens, self.logprobs, self.finish_reasons, strict=True)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[TokenUpdate]:
        return map(TokenUpdate, self.requests, self.tokens, self.logprobs, self.finish_reasons)

    @overload
    def __getitem__(self, index: int) -> TokenUpdate: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenUpdate]: ...
    def __getitem__(self, index: int | slice) -> TokenUpdate | list[TokenUpdate]:
        return list(self)[index]


class EngineStats(msgspec.Struct, array_like=True, frozen=True):
    """Gauges and counters since start; the server turns them into /metrics and /v1/info."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    slots_used: int = 0
    slots_total: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    prefix_bytes: int = 0
    prefix_evictions: int = 0
    snapshots_used: int = 0
    snapshots_total: int = 0
    draft_tokens: int = 0
    """Drafts verified."""
    accepted_tokens: int = 0
    """Of these, accepted."""
    host_blocks_used: int = 0
    host_blocks_total: int = 0
    moves_to_host: int = 0
    moves_to_device: int = 0
