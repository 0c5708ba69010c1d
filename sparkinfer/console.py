"""How a command line ends when the reader of its output goes away (`... | head -1`): no traceback, and no success."""

from __future__ import annotations

import functools
import os
import select
import sys
from collections.abc import Callable
from typing import ParamSpec, TextIO

READER_GONE = 141
"""128 + SIGPIPE: what a shell shows for a program that this signal ended."""

_P = ParamSpec("_P")


def ends_with_its_reader(main: Callable[_P, int]) -> Callable[_P, int]:
    """`main`, an entry point that returns its exit code, which is READER_GONE where its output was not read to the end.

    A broken pipe elsewhere (a socket's) stays an error.
    """

    @functools.wraps(main)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> int:
        try:
            try:
                return main(*args, **kwargs)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()  # left to the interpreter's end, it would fail there, with code 120
        except BrokenPipeError:
            if not drop_unread():
                raise
            return READER_GONE

    return wrapped


def drop_unread() -> bool:
    """Point stdout and stderr nowhere where nobody reads them any more; whether there was such a one."""
    gone = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and _unread(stream)]
    for stream in gone:
        discard(stream)
    return bool(gone)


def discard(stream: TextIO) -> None:
    """Point a stream nowhere: what its buffer still holds would fail once more when the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _unread(stream: TextIO) -> bool:
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # replaced by an object without a file
        return False
    poll = select.poll()
    poll.register(number, 0)  # errors are reported unasked
    return any(event & select.POLLERR for _, event in poll.poll(0))
