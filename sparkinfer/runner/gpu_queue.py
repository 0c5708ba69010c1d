"""Streams and events of the GPU runner; on a CPU, where its logic is tested, everything happens in order."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

Stream = torch.cuda.Stream | None
Event = torch.cuda.Event | None


class Queue:
    """The streams of one runner: passes on `main`, checkpoints to the host on `save`, from the host on `load`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.main: Stream = torch.cuda.Stream(device) if self.cuda else None
        self.save: Stream = torch.cuda.Stream(device) if self.cuda else None
        self.load: Stream = torch.cuda.Stream(device) if self.cuda else None

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Work queued inside goes to `stream`."""
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def mark(self, stream: Stream) -> Event:
        """An event that passes when all that `stream` has been given so far is done."""
        return None if stream is None else stream.record_event()

    def wait(self, stream: Stream, event: Event) -> None:
        """Let `stream` wait for an event; the host goes on."""
        if stream is not None and event is not None:
            stream.wait_event(event)

    def host_wait(self, event: Event) -> None:
        """Wait on the host."""
        if event is not None:
            event.synchronize()

    def drain(self) -> None:
        """Wait on the host for all streams."""
        for stream in (self.main, self.save, self.load):
            if stream is not None:
                stream.synchronize()

    def pinned(self, *size: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that copies can use in the background; not initialised."""
        return torch.empty(*size, dtype=dtype, pin_memory=self.cuda)
