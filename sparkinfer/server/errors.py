"""HTTP errors in OpenAI's form."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from sparkinfer.errors import SparkinferError
from sparkinfer.server.wire import to_json

ERROR_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""By status; else `invalid_request_error` below 500 and `server_error` from there on."""


class HttpError(SparkinferError):
    """An answer with a status of 400 or above."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON object; also the payload of an error event in a stream."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code or self.status}}

    def response(self) -> Response:
        headers = {"retry-after": "1"} if self.status in (429, 503) else None
        return Response(to_json(self.body()), self.status, headers, "application/json")

    def event(self) -> bytes:
        """The error as a server-sent event, for a stream that has begun."""
        return b"data: " + to_json(self.body()) + b"\n\n"
