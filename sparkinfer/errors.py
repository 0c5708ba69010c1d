"""Errors that a user can act on.

Every message says what was wrong and what to do about it. `exit_code` is what a command-line program
returns for it: 2 for bad input, 3 for an environment that cannot do the work.
"""


class SparkinferError(Exception):
    """Base of all errors raised on purpose; its text is shown to the user without a traceback."""

    exit_code = 1


class ConfigError(SparkinferError):
    """A setting, flag or request is invalid or contradicts another one."""

    exit_code = 2


class CheckpointError(SparkinferError):
    """A model folder is missing, incomplete or malformed; the message names the file or tensor."""

    exit_code = 2


class EnvironmentProblem(SparkinferError):
    """The machine lacks something: a port, a device, memory, a program."""

    exit_code = 3


class RequestError(SparkinferError):
    """A request cannot be served as asked; becomes an HTTP 4xx answer. `param` names the field, if one."""

    exit_code = 2

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
