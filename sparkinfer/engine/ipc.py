"""The local socket pair between server and engine process, and what the engine is started with."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import zmq

from sparkinfer.engine.messages import FromEngine, ToEngine
from sparkinfer.errors import EnvironmentProblem
from sparkinfer.settings import Settings

SERVERS_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""The server's to answer, also where they are sent to the whole process group: the engine ends when it is told to."""

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


class EngineOptions(msgspec.Struct, frozen=True):
    """What the engine process needs to start; travels as one JSON line on its standard input."""

    model: str
    settings: Settings
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    load_format: str = "auto"


class Launch(msgspec.Struct, frozen=True):
    """The line itself: options, where to connect, and whose child the process is."""

    options: EngineOptions
    to_engine: str
    from_engine: str
    parent_pid: int


def socket_of(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket that neither drops messages nor waits for unsent ones when it closes."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


def _socket_folder() -> Path:
    """A new folder for sockets. Raises EnvironmentProblem when its name is longer than a socket's may be."""
    folder = Path(tempfile.mkdtemp(prefix="sparkinfer-"))
    length = len(os.fsencode(folder / "from-engine"))
    if length > zmq.IPC_PATH_MAX_LEN:
        folder.rmdir()
        raise EnvironmentProblem(
            f"sockets in {tempfile.gettempdir()} would have names of {length} bytes, the system takes"
            f" {zmq.IPC_PATH_MAX_LEN}: set TMPDIR to a folder with a shorter name"
        )
    return folder


class ServerEnd:
    """The server's two bound sockets, in a directory only this user can enter."""

    def __init__(self) -> None:
        self._folder: Path | None = _socket_folder()
        self.to_engine = f"ipc://{self._folder}/to-engine"
        self.from_engine = f"ipc://{self._folder}/from-engine"
        self._context: Any = zmq.Context()
        self.push = socket_of(self._context, zmq.PUSH)
        self.pull = socket_of(self._context, zmq.PULL)
        self.push.bind(self.to_engine)
        self.pull.bind(self.from_engine)

    @property
    def descriptor(self) -> int:
        """File descriptor that becomes readable, once, when messages arrive."""
        return int(self.pull.getsockopt(zmq.FD))

    def remove_folder(self) -> None:
        """Remove the socket files; an established connection goes on without them, so nothing stays behind a crash."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def close(self) -> None:
        self.push.close()
        self.pull.close()
        self._context.term()
        self.remove_folder()


class EngineEnd:
    """The engine's two connected sockets."""

    def __init__(self, launch: Launch) -> None:
        self._context: Any = zmq.Context()
        self.pull = socket_of(self._context, zmq.PULL)
        self.push = socket_of(self._context, zmq.PUSH)
        # The last message (why the engine failed) must get out before the process ends.
        self.push.setsockopt(zmq.LINGER, 2000)
        self.pull.connect(launch.to_engine)
        self.push.connect(launch.from_engine)

    def send(self, message: FromEngine) -> None:
        self.push.send(encode(message))

    def receive(self) -> ToEngine | None:
        """The next message, or None when there is none now."""
        try:
            return decode_to_engine(self.pull.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def wait(self) -> None:
        """Sleep until a message is there."""
        self.pull.poll()

    def close(self) -> None:
        self.pull.close()
        self.push.close()
        self._context.term()
