"""The tree of cached prefixes: one node per full KV block, found by a hash chained over everything before it.

A node's hash covers the salt and all tokens up to its end, so equal hashes mean equal prefixes of equal salt. Nodes
know nothing of pools or eviction: `prefix_cache` owns those.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator

import msgspec

from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, Request

HASH_BYTES = 16


def root_hash(salt: str) -> bytes:
    """Start of the chain for a salt."""
    return hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"sparkinfer.kv").digest()


def extend_hashes(hashes: list[bytes], request: Request, num_blocks: int) -> None:
    """Append to `hashes` until it covers the first `num_blocks` blocks, whose tokens must be known.

    A block's hash is blake2b over the hash before it and its 16 token ids as 4-byte integers.
    """
    start = len(hashes)
    if start >= num_blocks:
        return
    parent = hashes[-1] if hashes else root_hash(request.cache_salt)
    tokens = request.tokens(start * KV_BLOCK_TOKENS, num_blocks * KV_BLOCK_TOKENS)
    data = array("I", tokens).tobytes()
    blake2b, step = hashlib.blake2b, len(data) // (num_blocks - start)
    for offset in range(0, len(data), step):
        parent = blake2b(parent + data[offset : offset + step], digest_size=HASH_BYTES).digest()
        hashes.append(parent)


class PrefixNode(msgspec.Struct, eq=False):
    """One cached block. `depth` counts blocks from the start: the node ends at position 16 * depth."""

    hash: bytes
    parent: PrefixNode | None
    depth: int
    block: int
    """Device block, -1 while only the host copy exists."""
    host_block: int = -1
    children: set[PrefixNode] = msgspec.field(default_factory=set)
    device_children: int = 0
    """Children with a device block: such a node stays on the device."""
    refs: int = 0
    """Running requests whose leading blocks include this one; never more than the parent's."""
    snapshot: int = -1
    """Snapshot of the recurrent state at the node's end, or -1."""
    pins: int = 0
    """Rows in flight that restore from the snapshot."""
    hits: int = 0
    touched: float = 0.0
    """The eviction clock at the last use."""
    inherited: float = 0.0
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

    def insert_chain(self, parent: PrefixNode | None, digests: list[bytes], blocks: list[int]) -> list[PrefixNode]:
        """New nodes, one below the other under `parent`, with one reference each. Raises ValueError on a known hash."""
        nodes = self._nodes
        depth = parent.depth if parent is not None else 0
        chain: list[PrefixNode] = []
        for digest, block in zip(digests, blocks, strict=True):
            depth += 1
            node = PrefixNode(digest, parent, depth, block, -1, set(), 0, 1)
            if nodes.setdefault(digest, node) is not node:
                raise ValueError("this prefix is in the index already")
            if parent is not None:
                parent.children.add(node)
                parent.device_children += 1
            chain.append(node)
            parent = node
        self.version += 1
        return chain

    def set_block(self, node: PrefixNode, block: int) -> None:
        """Change the node's device block; -1 takes it away."""
        if node.parent is not None:
            node.parent.device_children += (block >= 0) - (node.block >= 0)
        node.block = block

    def remove(self, node: PrefixNode) -> None:
        """Take out a node without children. Raises ValueError when it has some."""
        if node.children:
            raise ValueError("a node with children cannot be removed")
        del self._nodes[node.hash]
        parent = node.parent
        if parent is not None:
            parent.children.remove(node)
            if node.block >= 0:
                parent.device_children -= 1
        node.block = -1
        self.version += 1

    def holds(self, node: PrefixNode) -> bool:
        """Whether the node is (still) in the index."""
        return self._nodes.get(node.hash) is node
