"""The Merkle tree of RFC 6962: root hash, inclusion proof and consistency proof.

Written for logs of test size: every call walks the leaves (n hashes), nothing is cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def leaf_hash(entry: bytes) -> bytes:
    """sha256 over 0x00 and the entry (RFC 6962, 2.1)."""
    return hashlib.sha256(b"\x00" + entry).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def _split(size: int) -> int:
    """Largest power of two smaller than `size` (size >= 2)."""
    return 1 << ((size - 1).bit_length() - 1)


def root(leaves: Sequence[bytes]) -> bytes:
    """Root hash over leaf hashes; the hash of nothing for an empty tree."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    level = list(leaves)
    while len(level) > 1:
        paired = [_node(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        if len(level) % 2:
            paired.append(level[-1])
        level = paired
    return level[0]


def inclusion(index: int, leaves: Sequence[bytes]) -> list[bytes]:
    """Audit path of leaf `index`, lowest level first (RFC 6962, 2.1.1)."""
    if not 0 <= index < len(leaves):
        raise IndexError(f"leaf {index} is not in a tree of {len(leaves)}")
    if len(leaves) == 1:
        return []
    middle = _split(len(leaves))
    if index < middle:
        return [*inclusion(index, leaves[:middle]), root(leaves[middle:])]
    return [*inclusion(index - middle, leaves[middle:]), root(leaves[:middle])]


def consistency(first: int, leaves: Sequence[bytes]) -> list[bytes]:
    """Proof that the tree of the first `first` leaves is a prefix of this one (RFC 6962, 2.1.2)."""
    if not 0 < first <= len(leaves):
        raise IndexError(f"no tree of {first} leaves precedes one of {len(leaves)}")
    return _subproof(first, leaves, whole=True)


def _subproof(first: int, leaves: Sequence[bytes], whole: bool) -> list[bytes]:
    if first == len(leaves):
        return [] if whole else [root(leaves)]
    middle = _split(len(leaves))
    if first <= middle:
        return [*_subproof(first, leaves[:middle], whole), root(leaves[middle:])]
    return [*_subproof(first - middle, leaves[middle:], False), root(leaves[:middle])]
