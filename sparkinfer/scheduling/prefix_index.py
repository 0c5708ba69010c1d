"""The tree of cached prefixes: one node per full KV block, found by a hash chained over everything before it.

A node's hash covers the salt and all tokens up to its end, so equal hashes mean equal prefixes of equal salt. Nodes
know nothing of pools or eviction: `prefix_cache` owns those.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator

from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, Request

HASH_BYTES = 16


def root_hash(salt: str) -> bytes:
    """Start of the chain for a salt."""
    return hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"sparkinfer.kv").digest()


def block_hash(parent: bytes, tokens: list[int]) -> bytes:
    """Hash of one block of 16 token ids after the prefix `parent`."""
    return hashlib.blake2b(parent + array("Q", tokens).tobytes(), digest_size=HASH_BYTES).digest()


def extend_hashes(hashes: list[bytes], request: Request, num_blocks: int) -> None:
    """Append to `hashes` until it covers the first `num_blocks` blocks, whose tokens must be known."""
    start = len(hashes)
    if start >= num_blocks:
        return
    parent = hashes[-1] if hashes else root_hash(request.cache_salt)
    tokens = request.tokens(start * KV_BLOCK_TOKENS, num_blocks * KV_BLOCK_TOKENS)
    for offset in range(0, len(tokens), KV_BLOCK_TOKENS):
        parent = block_hash(parent, tokens[offset : offset + KV_BLOCK_TOKENS])
        hashes.append(parent)


class PrefixNode:
    """One cached block. `depth` counts blocks from the start: the node ends at position 16 * depth."""

    __slots__ = (
        "block", "children", "depth", "device_children", "hash", "hits", "host_block", "inherited", "parent", "pins",
        "refs", "snapshot", "touched",
    )  # fmt: skip

    def __init__(self, digest: bytes, parent: PrefixNode | None, block: int) -> None:
        self.hash = digest
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 1
        self.block = block
        """Device block, -1 while only the host copy exists."""
        self.host_block = -1
        self.children: set[PrefixNode] = set()
        self.device_children = 0
        """Children with a device block: such a node stays on the device."""
        self.refs = 0
        """Running requests whose leading blocks include this one; never more than the parent's."""
        self.snapshot = -1
        """Snapshot of the recurrent state at the node's end, or -1."""
        self.pins = 0
        """Rows in flight that restore from the snapshot."""
        self.hits = 0
        self.touched = 0.0
        """The eviction clock at the last use."""
        self.inherited = 0.0
        """The best score of a child that has moved to the host."""

    @property
    def position(self) -> int:
        """Tokens up to the node's end."""
        return self.depth * KV_BLOCK_TOKENS

    def path(self) -> list[PrefixNode]:
        """The nodes from the first block to this one."""
        nodes: list[PrefixNode] = []
        node: PrefixNode | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class PrefixIndex:
    """All nodes by hash. `version` changes whenever a lookup could answer differently."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, PrefixNode] = {}
        self.version = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self._nodes.values())

    def get(self, digest: bytes) -> PrefixNode | None:
        """The node of a hash."""
        return self._nodes.get(digest)

    def match(self, hashes: list[bytes], limit: int) -> tuple[PrefixNode | None, int]:
        """Among the first `limit` blocks: the deepest node with a snapshot, and how many blocks are known at all."""
        best: PrefixNode | None = None
        depth = 0
        nodes = self._nodes
        for digest in hashes[:limit]:
            node = nodes.get(digest)
            if node is None:
                break
            depth += 1
            if node.snapshot >= 0:
                best = node
        return best, depth

    def insert(self, digest: bytes, parent: PrefixNode | None, block: int) -> PrefixNode:
        """A new node holding device block `block`. Raises ValueError when the hash exists."""
        if digest in self._nodes:
            raise ValueError("this prefix is in the index already")
        node = PrefixNode(digest, parent, block)
        self._nodes[digest] = node
        if parent is not None:
            parent.children.add(node)
            parent.device_children += 1
        self.version += 1
        return node

    def set_block(self, node: PrefixNode, block: int) -> None:
        """Change the node's device block; -1 takes it away."""
        if node.parent is not None:
            node.parent.device_children += (block >= 0) - (node.block >= 0)
        node.block = block

    def remove(self, node: PrefixNode) -> None:
        """Take out a node without children. Raises ValueError when it has some."""
        if node.children:
            raise ValueError("a node with children cannot be removed")
        self.set_block(node, -1)
        del self._nodes[node.hash]
        if node.parent is not None:
            node.parent.children.remove(node)
        self.version += 1

    def holds(self, node: PrefixNode) -> bool:
        """Whether the node is (still) in the index."""
        return self._nodes.get(node.hash) is node
