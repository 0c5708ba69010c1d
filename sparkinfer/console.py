"""How a command line ends on Ctrl-C, or when nobody reads its output any more (`... | head -1`): no traceback."""

from __future__ import annotations

import functools
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TextIO

READER_GONE = 128 + signal.SIGPIPE
INTERRUPTED = 128 + signal.SIGINT
"""What a shell shows for a program that this signal ended."""

_P = ParamSpec("_P")


def command_line(main: Callable[_P, int]) -> Callable[_P, int]:
    """`main`, an entry point that returns its exit code, which is READER_GONE where its output was not read to the end
    and INTERRUPTED after Ctrl-C.

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
        except KeyboardInterrupt:
            print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
            return INTERRUPTED

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
