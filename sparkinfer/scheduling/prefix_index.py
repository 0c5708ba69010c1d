"""The tree of cached prefixes: a radix tree whose nodes are runs of full KV blocks.

A block's hash covers the salt and all tokens up to its end, so equal hashes mean equal prefixes of equal salt. A node
ends where prefixes part or where a state is saved; it is split when a new one of these falls inside it, and never
merged. What a request computes between two checkpoints is thus one node, not one for each block, which is what keeps a
thousand long requests cheap. Nodes know nothing of pools or eviction: `prefix_cache` owns those.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator

import msgspec

from sparkinfer.errors import RequestError
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, Request

HASH_BYTES = 16


def root_hash(salt: str) -> bytes:
    """Start of the chain for a salt."""
    return hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"sparkinfer.kv").digest()


def extend_hashes(hashes: list[bytes], request: Request, num_blocks: int) -> None:
    """Append to `hashes` until it covers the first `num_blocks` blocks. Raises ValueError when not all of their tokens
    are known."""
    start = len(hashes)
    if start >= num_blocks:
        return
    parent = hashes[-1] if hashes else root_hash(request.cache_salt)
    tokens = request.tokens(start * KV_BLOCK_TOKENS, num_blocks * KV_BLOCK_TOKENS)
    if len(tokens) != (num_blocks - start) * KV_BLOCK_TOKENS:
        raise ValueError(f"request {request.id}: {num_blocks} blocks to be hashed of {request.num_tokens} tokens")
    hashes += _chain(parent, tokens)


def prompt_hashes(prompt: list[int], salt: str) -> bytes:
    """The hashes of a prompt's full blocks, joined: for a server to compute beside the process that schedules."""
    return b"".join(_chain(root_hash(salt), prompt[: len(prompt) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS]))


def given_hashes(request: Request) -> list[bytes]:
    """What `prompt_hashes` has joined for a request, or nothing. Raises RequestError for one of another length."""
    joined = request.prompt_hashes
    if joined and len(joined) != len(request.prompt) // KV_BLOCK_TOKENS * HASH_BYTES:
        raise RequestError(
            f"request {request.id}: {len(joined)} bytes of hashes for a prompt of {len(request.prompt)} tokens: "
            f"{HASH_BYTES} bytes are due for each {KV_BLOCK_TOKENS} of them"
        )
    # One call for all pieces; `struct` keeps the last hundred formats.
    return list(struct.unpack(f"{HASH_BYTES}s" * (len(joined) // HASH_BYTES), joined))


def _chain(parent: bytes, tokens: list[int]) -> list[bytes]:
    """The hashes of the blocks that `tokens` fill, behind the hash of all before.

    A block's hash is blake2b, cut to 16 bytes, over the hash before it and its 16 token ids as 4-byte integers.
    """
    data, blake2b = array("I", tokens), hashlib.blake2b
    pieces = struct.iter_unpack(f"{KV_BLOCK_TOKENS * data.itemsize}s", data.tobytes())
    return [parent := blake2b(parent + block).digest()[:HASH_BYTES] for (block,) in pieces]


class PrefixNode(msgspec.Struct, eq=False):
    """A run of cached blocks. `depth` counts the blocks from the prefix's start to the node's end.

    The first `len(blocks)` blocks are on the device, the others on the host.
    """

    hashes: list[bytes]
    parent: PrefixNode | None
    depth: int
    blocks: list[int]
    """Device blocks of the leading part."""
    host: list[int] = msgspec.field(default_factory=list)
    """Host blocks of the rest."""
    children: set[PrefixNode] = msgspec.field(default_factory=set)
    device_children: int = 0
    """Children that begin on the device: such a node stays there."""
    refs: int = 0
    """Running requests whose leading blocks include this node; never more than the parent's."""
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
    def hash(self) -> bytes:
        """Hash of everything up to the node's end."""
        return self.hashes[-1]

    @property
    def start(self) -> int:
        """Blocks before the node."""
        return self.depth - len(self.hashes)

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

    def next_snapshots(self) -> Iterator[PrefixNode]:
        """The nearest nodes below with a snapshot, one on each way down that has any."""
        open_ways = list(self.children)
        while open_ways:
            node = open_ways.pop()
            if node.snapshot >= 0:
                yield node
            else:
                open_ways += node.children

    def common(self, hashes: list[bytes], limit: int) -> int:
        """How many of the node's blocks are those of `hashes`, a chain of which `limit` blocks count."""
        start, length = self.start, min(len(self.hashes), limit - self.start)
        if self.hashes[length - 1] == hashes[start + length - 1]:
            return length  # Hashes are chained: equal here means equal before.
        low, high = 0, length - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.hashes[middle - 1] == hashes[start + middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low


class PrefixIndex:
    """All nodes by their first and by their last hash. `version` changes when a lookup could answer differently."""

    def __init__(self) -> None:
        self._first: dict[bytes, PrefixNode] = {}
        self._last: dict[bytes, PrefixNode] = {}
        self.num_blocks = 0
        """Blocks of all nodes."""
        self.version = 0

    def __len__(self) -> int:
        return len(self._last)

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self._last.values())

    def ending(self, digest: bytes) -> PrefixNode | None:
        """The node that ends with a hash."""
        return self._last.get(digest)

    def beginning(self, digest: bytes) -> PrefixNode | None:
        """The node that begins with a hash."""
        return self._first.get(digest)

    def match(self, hashes: list[bytes], limit: int) -> tuple[PrefixNode | None, int]:
        """Among the first `limit` blocks: the deepest node with a snapshot, and how many blocks are known at all."""
        best: PrefixNode | None = None
        depth = 0
        while depth < limit and (node := self._first.get(hashes[depth])) is not None:
            common = node.common(hashes, limit)
            depth += common
            if common < len(node.hashes):
                break
            if node.snapshot >= 0:
                best = node
        return best, depth

    def insert(self, parent: PrefixNode | None, hashes: list[bytes], blocks: list[int]) -> PrefixNode:
        """A new node with one reference under `parent`. Raises ValueError on a known hash."""
        if hashes[0] in self._first or hashes[-1] in self._last:
            raise ValueError("this prefix is in the index already")
        depth = parent.depth if parent is not None else 0
        node = PrefixNode(hashes, parent, depth + len(hashes), blocks, refs=1)
        self._first[hashes[0]] = self._last[hashes[-1]] = node
        if parent is not None:
            parent.children.add(node)
            parent.device_children += 1
        self.num_blocks += len(hashes)
        self.version += 1
        return node

    def split(self, node: PrefixNode, length: int) -> PrefixNode:
        """Cut off the node's first `length` blocks as a node of their own, without snapshot, and return that.

        The given object remains the lower part, with snapshot and children. Raises ValueError for an empty part.
        """
        if not 0 < length < len(node.hashes):
            raise ValueError(f"a node of {len(node.hashes)} blocks cannot be split after {length}")
        on_device = len(node.blocks)
        upper = PrefixNode(
            node.hashes[:length], node.parent, node.start + length, node.blocks[:length],
            node.host[: max(0, length - on_device)], {node}, int(on_device > length), node.refs, touched=node.touched,
        )  # fmt: skip
        if node.parent is not None:
            node.parent.children.remove(node)
            node.parent.children.add(upper)
        node.parent = upper
        node.hashes, node.blocks = node.hashes[length:], node.blocks[length:]
        node.host = node.host[len(upper.host) :]
        self._first[upper.hashes[0]], self._last[upper.hashes[-1]] = upper, upper
        self._first[node.hashes[0]] = node
        return upper

    def remove(self, node: PrefixNode) -> None:
        """Take out a node without children. Raises ValueError when it has some."""
        if node.children:
            raise ValueError("a node with children cannot be removed")
        del self._first[node.hashes[0]], self._last[node.hashes[-1]]
        parent = node.parent
        if parent is not None:
            parent.children.remove(node)
            parent.device_children -= bool(node.blocks)
        self.num_blocks -= len(node.hashes)
        self.version += 1

    def holds(self, node: PrefixNode) -> bool:
        """Whether the node is (still) in the index."""
        return self._last.get(node.hashes[-1]) is node
