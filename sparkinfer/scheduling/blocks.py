"""The pool of KV blocks: allocation, sharing by reference count, release."""

from __future__ import annotations

from collections.abc import Iterable

from sparkinfer.scheduling.types import KV_BLOCK_TOKENS


def blocks_for(num_tokens: int) -> int:
    """KV blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // KV_BLOCK_TOKENS)


class BlockPool:
    """Blocks 0 to `total` - 1. A block's reference count is the number of its owners: a cache entry, or requests.

    Requests own what is not in the cache (any more): several own a prefix that they shared when the cache was reset.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.refs = [0] * total
        # A stack: blocks freed last are used first, their memory is warm.
        self._free = list(range(total - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.total - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Raises ValueError when fewer are free: callers check first."""
        refs, free = self.refs, self._free
        if count > len(free):
            raise ValueError(f"{count} KV blocks asked for, {len(free)} free")
        if count == 0:
            return []
        taken = free[-count:]
        del free[-count:]
        taken.reverse()
        for block in taken:
            refs[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder of each. Raises ValueError on a free block."""
        refs = self.refs
        for block in blocks:
            holders = refs[block]
            if holders < 1:
                raise ValueError(f"KV block {block} is free and cannot be shared")
            refs[block] = holders + 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less of each; those without a holder become free. Raises ValueError on a free block."""
        refs, free = self.refs, self._free
        for block in blocks:
            left = refs[block] - 1
            if left > 0:
                refs[block] = left
            elif left == 0:
                refs[block] = 0
                free.append(block)
            else:
                raise ValueError(f"KV block {block} is released twice")

    def free_ids(self) -> list[int]:
        """Ids of the free blocks, for integrity checks."""
        return list(self._free)
