"""The scheduler's own record of a request."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparkinfer.scheduling.prefix_index import given_hashes
from sparkinfer.scheduling.types import FinishReason, Request

if TYPE_CHECKING:
    from sparkinfer.scheduling.prefix_cache import Match
    from sparkinfer.scheduling.prefix_index import PrefixNode

NEVER = 1 << 62
"""A position no sequence reaches."""


class Phase(enum.IntEnum):
    """Where a sequence stands. DONE ones may still hold resources that a step in flight uses."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    DONE = 3


@dataclass(slots=True, eq=False)
class Sequence:
    """A request with what the scheduler keeps about it. `key` orders all requests: lower runs earlier."""

    request: Request
    key: tuple[int, int]
    prompt_len: int
    end_computed: int
    """Tokens computed when the last allowed output has been sampled: nothing is scheduled beyond."""
    stop_ids: frozenset[int]
    min_tokens: int
    phase: Phase = Phase.WAITING
    chunks_in_flight: int = 0
    """Prompt chunks without an output in plans that are not committed."""
    preempting: bool = False
    """Chosen as a victim; gives its resources back when its last row in flight commits."""
    admitted_before: bool = False
    verifying: bool = False
    """A row with drafts is in flight: where the sequence goes on is known when it commits."""

    hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of the tokens known so far, as far as they were needed."""
    node: PrefixNode | None = None
    """Cache entry of the leading blocks; it and all before it hold one reference for this sequence."""
    match: Match | None = None
    match_version: int = -1
    """The last lookup in the prefix cache and the index version it belongs to."""
    restore_node: PrefixNode | None = None
    """Where the next row's state comes from; consumed by that row."""
    checkpoints: list[int] = field(default_factory=list)
    """Positions of the prompt whose state is to be saved, ascending."""
    next_checkpoint: int = NEVER
    """The same for the next position while generating."""
    publishes: bool = True
    """False after a reset of the cache while it ran: what it computed before must not come back."""
    last_decode_node: PrefixNode | None = None
    """The latest checkpoint saved while generating: a newer one replaces it."""

    @property
    def in_flight(self) -> int:
        """Rows in plans that are not committed."""
        return self.chunks_in_flight + self.request.num_in_flight_outputs

    @property
    def tokens_left(self) -> int:
        """Tokens known and not computed yet."""
        request = self.request
        return self.prompt_len + len(request.output) - request.num_computed

    def ends_with(self, token: int, output_index: int, computed: int) -> FinishReason | None:
        """Why output `output_index` is the last one, if it is; `computed` tokens led to it."""
        if token in self.stop_ids and output_index >= self.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if computed >= self.end_computed else None


def make_sequence(request: Request, key: tuple[int, int], max_model_len: int) -> Sequence:
    """The record of a fresh request. Raises RequestError when its hashes are those of another prompt's length."""
    sampling = request.sampling
    prompt_len = len(request.prompt)
    max_outputs = min(sampling.max_tokens, max_model_len - prompt_len)
    return Sequence(
        request=request,
        key=key,
        prompt_len=prompt_len,
        end_computed=prompt_len + max_outputs - 1,
        stop_ids=request.end_token_ids,
        min_tokens=sampling.min_tokens,
        hashes=given_hashes(request),
    )
