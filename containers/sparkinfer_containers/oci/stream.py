"""Blobs read once: hashed in a second thread while their bytes are looked at, and never written to disk for that."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from sparkinfer_containers.errors import DigestProblem
from sparkinfer_containers.oci.model import Descriptor

PIECE = 1 << 20
AHEAD = 8
"""Pieces that may wait to be hashed."""
KEPT = 1 << 10
"""Bytes before the current piece that `Forward` still has: tarfile goes back by one block at most."""


def file_pieces(path: Path) -> Iterator[bytes]:
    """A file's bytes in pieces of 1 MiB."""
    with path.open("rb") as handle:
        while piece := handle.read(PIECE):
            yield piece


def gathered(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of about 1 MiB: small ones cost more to hand over than to hash."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= PIECE:
            yield held[0] if len(held) == 1 else b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def checked(
    pieces: Iterable[bytes], wanted: Descriptor, refuse: Callable[[int, str], DigestProblem]
) -> Iterator[bytes]:
    """`pieces` handed through while another thread hashes them; after the last one digest and size must be `wanted`'s.

    `refuse` makes the error from the count of bytes and their hexadecimal sha256. Only who reads to the end knows that
    the bytes were right. Raises DigestProblem.
    """
    digest, count = hashlib.sha256(), 0
    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1) as pool:
        for piece in pieces:
            count += len(piece)
            if count > wanted.size:
                raise DigestProblem(f"blob {wanted.digest}: more than the {wanted.size} bytes announced")
            waiting.append(pool.submit(digest.update, piece))
            if len(waiting) > AHEAD:
                waiting.popleft().result()
            yield piece
    if count != wanted.size or "sha256:" + digest.hexdigest() != wanted.digest:
        raise refuse(count, digest.hexdigest())


class Forward:
    """What tarfile needs of a file (`read`, `seek`, `tell`) over pieces of bytes that come once, in order.

    Going back reaches KEPT bytes before the current piece.
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._piece, self._at, self._base = b"", 0, 0
        self._tail = b""  # what came right before the piece

    def tell(self) -> int:
        """Bytes from the start."""
        return self._base + self._at

    def read(self, size: int) -> bytes:
        """The next `size` bytes, fewer at the end."""
        made = self._piece[self._at : self._at + size]
        self._at += len(made)
        while len(made) < size and self._advance():
            more = self._piece[self._at : self._at + size - len(made)]
            self._at += len(more)
            made += more
        return made

    def seek(self, position: int) -> int:
        """Go to `position`: a later one, at most the end, or a little back. Raises ValueError for one too far back."""
        if position < self._base:
            self._piece, self._base, self._tail = self._tail + self._piece, self._base - len(self._tail), b""
        if position < self._base:
            raise ValueError(f"cannot go back to byte {position}")
        while position > self._base + len(self._piece) and self._advance():
            pass
        self._at = min(position - self._base, len(self._piece))
        return self.tell()

    def _advance(self) -> bool:
        """Take the next piece; false when there is none."""
        piece = next(self._pieces, None)
        if piece is None:
            self._at = len(self._piece)
            return False
        self._base += len(self._piece)
        before = self._piece if len(self._piece) >= KEPT else self._tail + self._piece
        self._tail, self._piece, self._at = before[-KEPT:], piece, 0
        return True

    def drain(self) -> None:
        """Read what is left, for the sake of a digest over all bytes."""
        for _ in self._pieces:
            pass
