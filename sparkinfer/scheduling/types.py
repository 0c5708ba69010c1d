"""What the scheduler, the engine loop and the model runner say to each other.

The scheduler turns waiting and running requests into a `StepPlan`; the model runner executes it and
answers with a `StepResult`; the scheduler commits the result. All counts are tokens, all positions are
zero-based token positions in a request's sequence (prompt followed by generated tokens).

`Row` and `TokenUpdate` are msgspec structs: at a thousand running requests their construction is most of a step's
bookkeeping, and a struct is made several times faster than a dataclass. Change one with `msgspec.structs.replace`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec

KV_BLOCK_TOKENS = 16
"""Tokens per KV block, the unit of KV allocation and of prefix sharing."""


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

    # progress
    state: RequestState = RequestState.WAITING
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose KV and recurrent state exist, in-flight steps included."""
    num_in_flight_outputs: int = 0
    """Tokens being sampled by steps that are not committed yet."""
    num_cached: int = 0
    """Prompt tokens that the first admission took from the prefix cache."""
    blocks: list[int] = field(default_factory=list)
    slot: int = -1
    """Recurrent-state slot, -1 while none is held. The runner keeps the last sampled token by slot too."""
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """By prompt position, as far as computed; written by the runner where `sampling.prompt_logprobs` asks for them."""

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


@dataclass(slots=True)
class StepPlan:
    """One forward pass: decode rows first, then prefill rows, oldest first.

    `moves` happen before the pass, in order. Rows of one plan never share a slot.
    """

    step_id: int
    rows: list[Row]
    moves: list[BlockMove] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the pass."""
        return sum(row.length for row in self.rows)

    @property
    def num_decode(self) -> int:
        """Rows that decode."""
        return sum(row.is_decode for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at temperature 1 before any filter: the sampled token's, and the top ones'."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class StepResult:
    """What a step produced: one entry per row with `samples`, in row order."""

    step_id: int
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


class TokenUpdate(msgspec.Struct, eq=False, gc=False):
    """A committed token of a request, or its end without one (`token` None)."""

    request: Request
    token: int | None
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
