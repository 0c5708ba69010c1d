"""Who gives way when running requests need more KV blocks than there are."""

from __future__ import annotations

from collections.abc import Iterable

from sparkinfer.scheduling.sequence import Phase, Sequence


def latest(*groups: Iterable[Sequence]) -> Sequence:
    """The running sequence that comes last in the order of keys: lowest priority, then newest.

    Raises ValueError when none runs.
    """
    running = (s for group in groups for s in group if s.phase in (Phase.PREFILL, Phase.DECODE))
    return max(running, key=lambda s: s.key)
