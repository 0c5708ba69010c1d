"""Bytes of a checkpoint into tensors: mapped into memory on a CPU, streamed by several threads to a device."""

from __future__ import annotations

import mmap
import os
import queue
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from sparkinfer.errors import CheckpointError
from sparkinfer.models.safetensors_file import DTYPES, Entry

PIECE = 16 << 20
"""Bytes that one thread reads at once."""
READERS = 8
GAP = 1 << 16
"""Bytes between tensors that are read along rather than starting a new read."""
SMALL = 32 << 10
"""Smaller tensors are copied out of the buffer they were read into, so that a norm does not keep a layer alive."""
ALIGNMENT = 16
"""Bytes at whose multiples kernels of a GPU want a tensor to begin."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")


class Reader(Protocol):
    """Gives the tensor of an entry."""

    def read(self, entry: Entry) -> torch.Tensor:
        """The tensor on the reader's device. Raises CheckpointError naming it."""

    def close(self) -> None:
        """Let go of files and buffers; tensors stay valid."""


def make_reader(entries: Iterable[Entry], device: torch.device) -> Reader:
    """The reader for a device; `entries` are the tensors that will be asked for, in about that order."""
    return MappedReader() if device.type == "cpu" else StreamingReader(entries, device)


class MappedReader:
    """Maps files privately: tensors are pages of the file, loaded when touched and shared with other processes."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def read(self, entry: Entry) -> torch.Tensor:
        """See `Reader`."""
        count = entry.end - entry.start
        if count == 0:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        mapped = self._maps.get(entry.path)
        if mapped is None:
            try:
                with entry.path.open("rb") as handle:
                    # A private mapping may be written to, as torch wants it, without touching the file.
                    mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise CheckpointError(f"{entry.path}: tensor {entry.name} cannot be read: {error}") from error
            self._maps[entry.path] = mapped
        if entry.end > len(mapped):
            raise CheckpointError(f"{entry.path} is truncated: tensor {entry.name} is incomplete")
        page = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
        # The kernel starts reading the whole tensor, in parallel, while its first pages are used.
        mapped.madvise(mmap.MADV_WILLNEED, page, entry.end - page)
        flat = torch.frombuffer(mapped, dtype=torch.uint8, count=count, offset=entry.start)
        return _typed(flat, entry)

    def close(self) -> None:
        """See `Reader`."""
        self._maps.clear()


class CopyingReader:
    """Reads tensors into memory of their own: what is let go of is free again, whatever the kernel caches."""

    def read(self, entry: Entry) -> torch.Tensor:
        """See `Reader`."""
        return _typed(read_bytes(entry, 0, entry.end - entry.start), entry)

    def close(self) -> None:
        """See `Reader`."""


def read_bytes(entry: Entry, offset: int, count: int) -> torch.Tensor:
    """[count] uint8: bytes of a tensor, `offset` bytes into it. Raises CheckpointError naming it."""
    out = torch.empty(count, dtype=torch.uint8)
    try:
        file = os.open(entry.path, os.O_RDONLY)
        try:
            _read_exactly(file, memoryview(out.numpy()), entry.start + offset)  # type: ignore[arg-type]
        finally:
            os.close(file)
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{entry.path}: tensor {entry.name} cannot be read: {error}") from error
    return out


@dataclass(slots=True)
class _Range:
    """A stretch of a file in a buffer on the device."""

    path: Path
    start: int
    end: int
    buffer: torch.Tensor


class StreamingReader:
    """Reads a layer's tensors at once, and the next layer's meanwhile, through a ring of pinned host buffers.

    Host memory: `READERS` pieces, whatever the size of the checkpoint. Device memory: two layers beside what is kept.
    """

    def __init__(
        self, entries: Iterable[Entry], device: torch.device, piece: int = PIECE, readers: int = READERS
    ) -> None:
        self._device, self._piece = device, piece
        self._units: dict[str, list[Entry]] = {}
        for entry in entries:
            self._units.setdefault(unit_of(entry.name), []).append(entry)
        self._order = list(self._units)
        self._loading: dict[str, tuple[list[_Range], list[Future[None]]]] = {}
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="weights")
        self._slots: queue.Queue[torch.Tensor] = queue.Queue()
        pinned = device.type == "cuda"
        for _ in range(readers):
            self._slots.put(torch.empty(piece, dtype=torch.uint8, pin_memory=pinned))
        self._stream = torch.cuda.Stream(device) if pinned else None
        self._files: dict[Path, int] = {}

    def read(self, entry: Entry) -> torch.Tensor:
        """See `Reader`."""
        unit = unit_of(entry.name)
        if unit not in self._loading:
            self._start(unit)
        ranges, futures = self._loading[unit]
        for future in futures:
            future.result()
        futures.clear()
        self._keep(unit)
        for part in ranges:
            if part.path == entry.path and part.start <= entry.start and entry.end <= part.end:
                tensor = _typed(part.buffer[entry.start - part.start : entry.end - part.start], entry)
                alone = entry.end - entry.start < SMALL or tensor.data_ptr() % ALIGNMENT
                return tensor.clone() if alone else tensor
        raise CheckpointError(f"{entry.path}: tensor {entry.name} was not announced to the reader")

    def _keep(self, unit: str) -> None:
        """Start the unit that follows, and forget those that are neither in use nor to come."""
        place = self._order.index(unit)
        following = self._order[place + 1] if place + 1 < len(self._order) else None
        if following is not None and following.isdigit() and following not in self._loading:
            self._start(following)
        for other in list(self._loading):
            if other not in (unit, following) and not self._loading[other][1]:
                del self._loading[other]

    def _start(self, unit: str) -> None:
        ranges = []
        for path, start, end in _stretches(self._units[unit]):
            ranges.append(_Range(path, start, end, torch.empty(end - start, dtype=torch.uint8, device=self._device)))
        # The buffers' memory may still be read by kernels under way.
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None
        futures = [
            self._pool.submit(self._fill, part, offset, ready, self._units[unit][0].name)
            for part in ranges
            for offset in range(0, part.end - part.start, self._piece)
        ]
        self._loading[unit] = ranges, futures

    def _fill(self, part: _Range, offset: int, ready: torch.cuda.Event | None, name: str) -> None:
        count = min(self._piece, part.end - part.start - offset)
        slot = self._slots.get()
        try:
            _read_exactly(self._file(part.path), memoryview(slot.numpy())[:count], part.start + offset)  # type: ignore[arg-type]
            target = part.buffer[offset : offset + count]
            if self._stream is None or ready is None:
                target.copy_(slot[:count])
                return
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                target.copy_(slot[:count], non_blocking=True)
                self._stream.record_event().synchronize()
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{part.path}: tensor {name} or one near it cannot be read: {error}") from error
        finally:
            self._slots.put(slot)

    def _file(self, path: Path) -> int:
        if path not in self._files:
            # Two threads may open a file at once; one of the two stays until `close`.
            opened = os.open(path, os.O_RDONLY)
            if self._files.setdefault(path, opened) != opened:
                os.close(opened)
        return self._files[path]

    def close(self) -> None:
        """See `Reader`."""
        self._pool.shutdown(cancel_futures=True)
        self._loading.clear()
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def load_order(entry: Entry) -> tuple[int, str]:
    """Sorts tensors by layer, those outside of the layers first."""
    found = _LAYER.search(entry.name)
    return int(found[1]) if found else -1, entry.name


def unit_of(name: str) -> str:
    """What is read together: a layer by its number, every other tensor by itself."""
    found = _LAYER.search(name)
    return found[1] if found else name


def _stretches(entries: Sequence[Entry]) -> list[tuple[Path, int, int]]:
    """(path, start, end) of what must be read, neighbours joined."""
    found: list[tuple[Path, int, int]] = []
    for entry in sorted(entries, key=lambda one: (one.path, one.start)):
        if found and found[-1][0] == entry.path and entry.start - found[-1][2] <= GAP:
            found[-1] = (entry.path, found[-1][1], max(entry.end, found[-1][2]))
        else:
            found.append((entry.path, entry.start, entry.end))
    return found


def _typed(flat: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Bytes as the entry's dtype and shape; copied where the file's writer did not align them."""
    dtype = DTYPES[entry.dtype]
    if flat.data_ptr() % dtype.itemsize or flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(entry.shape)


def _read_exactly(file: int, view: memoryview, position: int) -> None:
    while len(view):
        done = os.preadv(file, [view], position)
        if done == 0:
            raise EOFError("the file ends early")
        view, position = view[done:], position + done
