"""Speculation as the scheduler sees it: how many drafts a step verifies for whom, and what of it remains.

Which tokens are drafted is the runner's affair: a plan only says how many positions a row has for them. The drafts lie
behind the row's input token, each position samples its own token with the noise of its output index, and a draft counts
when it is the token so sampled; a stream is therefore the one of plain decoding. Until such a row commits, nobody knows
where its request goes on, so the request has no other row in flight behind it.
"""

from __future__ import annotations

from sparkinfer.scheduling.blocks import blocks_for
from sparkinfer.scheduling.checkpoints import next_decode_position
from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.planner import InFlight
from sparkinfer.scheduling.resources import Resources
from sparkinfer.scheduling.roster import Roster
from sparkinfer.scheduling.sequence import NEVER, Phase, Sequence
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, Checkpoint, Request, Row, TokenUpdates


def may_speculate(request: Request) -> bool:
    """Requests that ask for log-probabilities take plain rows, whose distributions are reported one by one."""
    return request.sampling.logprobs is None


class Speculation:
    """Plans and commits rows with drafts. `passes.speculation_applies` says in which steps there are any."""

    def __init__(self, config: SchedulerConfig, resources: Resources, roster: Roster) -> None:
        self.config = config
        self.resources = resources
        self.roster = roster
        self.num_drafts = 0
        """Drafts verified since start, those of requests that had ended aside."""
        self.num_accepted = 0

    def add_rows(self, flight: InFlight) -> None:
        """A row with drafts for every decoding request that may have one, oldest first; the others stay for plain rows.

        These are requests that ask for log-probabilities, are at their last token, or have no block for a draft.
        """
        table = self.resources.table
        for sequence in sorted(table.rows.sequences, key=lambda s: s.key):
            if sequence.phase is not Phase.DECODE or sequence.preempting:
                continue  # A victim of one before it.
            if may_speculate(sequence.request):
                self._add_row(flight, sequence)

    def _add_row(self, flight: InFlight, sequence: Sequence) -> None:
        request, table = sequence.request, self.resources.table
        start, own = request.num_computed, request.blocks
        wanted = min(self.config.draft_tokens, sequence.end_computed - start - 1)
        if wanted < 1 or (start >= len(own) * KV_BLOCK_TOKENS and not self.roster.grow(sequence)):
            return
        # Drafts take blocks that are free or cached, nobody is preempted for them.
        more = min(blocks_for(start + 1 + wanted) - len(own), self.resources.available)
        if more > 0:
            own.extend(self.resources.allocate(more))
            table.changed[request.slot] = True
        drafts = min(wanted, len(own) * KV_BLOCK_TOKENS - start - 1)
        if drafts < 1:
            return
        row = Row(
            request=request,
            slot=request.slot,
            blocks=own,
            start=start,
            length=1 + drafts,
            is_decode=True,
            samples=True,
            output_index=start + 1 - sequence.prompt_len,
            pending=request.num_in_flight_outputs > 0,
            checkpoints=self._checkpoints(sequence, start + 1 + drafts),
            num_drafts=drafts,
        )
        flight.plan.verify.append(row)
        flight.verifying.append(sequence)
        table.hold(sequence)

    def _checkpoints(self, sequence: Sequence, stop: int) -> tuple[Checkpoint, ...]:
        """Snapshots for the positions up to `stop` that are due if the drafts before them are accepted."""
        found = []
        position = sequence.next_checkpoint
        while position <= stop:
            snapshot = self.resources.cache.reserve_snapshot(sequence, position)
            if snapshot is not None:
                found.append(Checkpoint(position, snapshot))
            position = next_decode_position(position, sequence.end_computed, self.config)
        return tuple(found)

    def commit(self, row: Row, sequence: Sequence, tokens: list[int], updates: TokenUpdates) -> int:
        """Take in the accepted drafts and the token after them; returns how many tokens the request has gained."""
        request = sequence.request
        request.num_in_flight_outputs -= 1
        sequence.verifying = False
        kept = 0
        if sequence.phase is Phase.DONE:
            self.resources.publish(sequence, row.checkpoints, decode=True)
        else:
            self.num_drafts += row.num_drafts
            self.num_accepted += len(tokens) - 1
            kept = self._take(row, sequence, tokens, updates)
        self.roster.settle(sequence)
        return kept

    def _take(self, row: Row, sequence: Sequence, tokens: list[int], updates: TokenUpdates) -> int:
        request, finish, kept = sequence.request, None, 0
        for kept, token in enumerate(tokens, 1):
            request.output.append(token)
            finish = sequence.ends_with(token, row.output_index + kept - 1, row.start + kept)
            updates.add(request, token, None, finish)
            if finish is not None:
                break
        computed = row.start + kept
        self.resources.table.resume(sequence, computed)
        # A state beyond the accepted tokens is one of tokens that do not exist.
        for checkpoint in row.checkpoints:
            if checkpoint.position > computed:
                self.resources.cache.drop_snapshot(checkpoint.snapshot)
        self.resources.publish(sequence, (c for c in row.checkpoints if c.position <= computed), decode=True)
        if sequence.next_checkpoint != NEVER:
            sequence.next_checkpoint = next_decode_position(computed, sequence.end_computed, self.config)
        if finish is not None:
            self.roster.finish(sequence, finish)
        return kept
