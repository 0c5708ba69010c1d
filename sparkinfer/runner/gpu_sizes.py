"""Padded shapes of a pass on the GPU: each is captured once as a CUDA graph, so there are few. No torch here."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

DECODE_STEP = 8
"""Beyond 8 requests, decode sizes are the multiples of this."""
PREFILL_SIZES = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Padded prompt tokens of a pass; beyond the last one, its multiples."""
MIXED_DECODE_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Padded decode rows of a pass that carries prompt tokens too: their padding costs little there."""


@dataclass(frozen=True, slots=True, order=True)
class PassShape:
    """What a captured pass has room for."""

    decode: int
    """Decode rows, one token each."""
    tokens: int
    """Prompt tokens."""
    sequences: int
    """Prompts."""

    @property
    def rows(self) -> int:
        """Tokens of the pass."""
        return self.decode + self.tokens

    @property
    def outputs(self) -> int:
        """Rows whose logits can be asked for: one for each request."""
        return self.decode + self.sequences

    def __str__(self) -> str:
        return f"{self.decode} decode rows + {self.tokens} tokens of {self.sequences} prompts"


@dataclass(frozen=True, slots=True)
class PassLimits:
    """The most that the scheduler puts into a pass."""

    max_num_seqs: int
    prefill_chunk: int
    """Prompt tokens without decode rows."""
    mixed_chunk: int
    """Prompt tokens beside decode rows."""
    mixed_max_prompts: int
    pack_max_prompts: int
    deterministic: bool = False
    """One padded number of decode rows, whatever their number: kernels then never change with it."""
    one_prompt_size: bool = False
    """The same for prompt tokens: what checks compare then differs by nothing but what else is in a pass."""

    @property
    def max_rows(self) -> int:
        """Tokens of the largest pass."""
        return max(shape.rows for shape in self.shapes())

    def decode_sizes(self) -> list[int]:
        """Padded decode rows of a pass without prompts: 1, 2, 4, 8, then multiples of 8, the last one the maximum."""
        if self.deterministic:
            return [self.max_num_seqs]
        sizes = [1, 2, 4, *range(DECODE_STEP, self.max_num_seqs, DECODE_STEP)]
        return [*(size for size in sizes if size < self.max_num_seqs), self.max_num_seqs]

    def mixed_decode_sizes(self) -> list[int]:
        """Padded decode rows of a pass with prompts."""
        if self.deterministic:
            return [self.max_num_seqs]
        return [*(size for size in MIXED_DECODE_SIZES if size < self.max_num_seqs), self.max_num_seqs]

    def shapes(self) -> list[PassShape]:
        """Every padded shape, largest first: what is captured first leaves room for all that follow."""
        packed, beside = self._sequences()
        found = [PassShape(size, 0, 0) for size in self.decode_sizes()]
        found += [PassShape(0, size, packed) for size in self._prompt_sizes(self.prefill_chunk)]
        if self.mixed_chunk:
            tokens = self._prompt_sizes(self.mixed_chunk)
            found += [PassShape(rows, size, beside) for rows in self.mixed_decode_sizes() for size in tokens]
        return sorted(found, key=lambda shape: (-shape.rows, shape))

    def shape_for(self, decode: int, tokens: int, sequences: int) -> PassShape:
        """The smallest shape that holds a pass.

        Raises:
            ValueError: the pass exceeds the limits; the message holds both.
        """
        packed, beside = self._sequences()
        most = self.mixed_chunk if decode else self.prefill_chunk
        room = beside if decode else packed
        if decode > self.max_num_seqs or tokens > most or sequences > room:
            raise ValueError(
                f"a pass of {decode} decode rows and {tokens} tokens of {sequences} prompts exceeds this runner's "
                f"limits: {self.max_num_seqs} decode rows, {most} tokens, {room} prompts"
            )
        if not tokens:
            return PassShape(_round_up(self.decode_sizes(), decode), 0, 0)
        rows = _round_up(self.mixed_decode_sizes(), decode) if decode else 0
        return PassShape(rows, _round_up(self._prompt_sizes(most), tokens), room)

    def _prompt_sizes(self, most: int) -> list[int]:
        return [most] if self.one_prompt_size else up_to(most)

    def _sequences(self) -> tuple[int, int]:
        """Prompts of a pass without decode rows, and beside some."""
        most = min(self.pack_max_prompts, self.max_num_seqs)
        # A pack's limit is none of mixed steps, which the scheduler fills up to their own.
        return most, min(self.mixed_max_prompts, self.max_num_seqs)


def up_to(most: int) -> list[int]:
    """Padded token counts that cover 1 to `most`."""
    last = PREFILL_SIZES[-1]
    sizes = [*PREFILL_SIZES, *range(2 * last, most + last, last)]
    return [*(size for size in sizes if size < most), most]


def _round_up(sizes: list[int], count: int) -> int:
    return sizes[bisect_left(sizes, count)]
