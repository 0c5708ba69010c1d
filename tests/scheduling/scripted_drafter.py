"""A drafter that follows a script: it knows what the fake model will say, and is right as often as it is told to be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sparkinfer.scheduling.types import Row
from tests.scheduling.fake_model import VOCAB, reference


class ScriptedDrafter:
    """`script`: how many leading drafts of each next row are right, over and over; the ones behind are wrong."""

    def __init__(self, script: Sequence[int], max_model_len: int) -> None:
        self.follow(script)
        self._max_model_len = max_model_len
        self.proposed = 0
        self.right = 0

    def follow(self, script: Sequence[int]) -> None:
        """Go on with another script."""
        self._script = itertools.cycle(script)

    def propose(self, row: Row) -> list[int]:
        """`row.num_drafts` tokens to follow the row's input token."""
        request = row.request
        count = min(request.sampling.max_tokens, self._max_model_len - len(request.prompt))
        outputs = reference(tuple(request.prompt), request.sampling.seed, count)
        coming = outputs[row.output_index : row.output_index + row.num_drafts]
        assert len(coming) == row.num_drafts, "more drafts than the request may have outputs"
        right = min(next(self._script), row.num_drafts)
        self.proposed += row.num_drafts
        self.right += right
        return [token if index < right else (token + 1) % VOCAB for index, token in enumerate(coming)]
