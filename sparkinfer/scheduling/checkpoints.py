"""Where to save the recurrent state: positions of checkpoints, all at KV-block boundaries."""

from __future__ import annotations

from sparkinfer.scheduling.config import SchedulerConfig
from sparkinfer.scheduling.sequence import NEVER
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS


def end_position(num_tokens: int) -> int:
    """The checkpoint near a prompt's end; 0 when the prompt is too short for one.

    The last block boundary lies in the prompt's last 16 tokens, so it moves back one block: the prompt keeps at least
    16 tokens behind its checkpoint, and a next turn whose template changes the last few tokens still hits.
    """
    position = num_tokens // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    if num_tokens - position < KV_BLOCK_TOKENS:
        position -= KV_BLOCK_TOKENS
    return max(0, position)


def prompt_positions(num_tokens: int, start: int, branch: int, config: SchedulerConfig) -> list[int]:
    """Checkpoints of a prefill of `num_tokens` tokens that begins at `start`, ascending.

    Near the end; at multiples of `checkpoint_interval`; and at `branch`, the end of the prefix that cached KV blocks
    share with this prompt, when no state was saved there: the next prompt with that prefix then hits. Those two
    must lie `branch_min_tokens` away from their neighbours, or they would save too little.
    """
    last = end_position(num_tokens)
    if last <= start:
        return []
    gap = config.branch_min_tokens
    wanted = {branch} if branch else set()
    if config.checkpoint_interval:
        wanted.update(range(config.checkpoint_interval, last, config.checkpoint_interval))
    positions: list[int] = []
    before = start
    for position in sorted(wanted):
        if position - before >= gap and last - position >= gap and before < position < last:
            positions.append(position)
            before = position
    return [*positions, last]


def thinned(positions: list[int], most: int) -> list[int]:
    """At most `most` of these positions: the last one, worth most, and others at even distances before it."""
    count = len(positions)
    if count <= most:
        return positions
    return [positions[count * (place + 1) // most - 1] for place in range(most)]


def next_decode_position(computed: int, end_computed: int, config: SchedulerConfig) -> int:
    """The next checkpoint while generating: a multiple of the interval, or the last boundary before the known end."""
    interval = config.decode_checkpoint_interval
    if interval == 0 or config.num_snapshots == 0:
        return NEVER
    final = end_computed // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    following = (computed // interval + 1) * interval
    if following <= final:
        return following
    return final if final > computed else NEVER
