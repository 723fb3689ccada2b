"""Errors as OpenAI's API tells them: `{"error": {"message", "type", "param", "code"}}` and a status."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
from aiohttp import web

from pagewire.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    InvalidRequest,
    ModelError,
    Overloaded,
    PagewireError,
    PromptTooLong,
    Unauthorized,
)

_RETRY_AFTER_MS: Final = 1000
"""Where trying again can help and the error does not say when."""

_STATUS: Final[tuple[tuple[type[PagewireError], int, str], ...]] = (
    (InvalidRequest, 400, "invalid_request_error"),
    (ModelError, 400, "invalid_request_error"),  # what this model cannot do, a chat without a working template mostly
    (Unauthorized, 401, "authentication_error"),
    (Overloaded, 429, "rate_limit_error"),
    (Draining, 503, "service_unavailable_error"),
    (EngineFailed, 503, "service_unavailable_error"),
    (DeadlineExceeded, 503, "service_unavailable_error"),
    (ConnectionLost, 503, "service_unavailable_error"),
    (Cancelled, 503, "service_unavailable_error"),
)
"""The first that fits counts; anything else is a fault of ours, 500."""

_PARAMS: Final = {"prompt_ids": "prompt", "template_kwargs": "chat_template_kwargs"}
"""Fields of the protocol that a body calls something else."""
_CONTEXT: Final = "context_length_exceeded"


class HttpRefusal(Exception):  # noqa: N818  (named by what happened, as the error tree is)
    """A refusal that exists in HTTP only: no such path, method, model or media type."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}


def status_of(error: PagewireError) -> tuple[int, str]:
    """Status and OpenAI's `type` of an error."""
    for kind, status, name in _STATUS:
        if isinstance(error, kind):
            return status, name
    return 500, "internal_server_error"


def param_of(field: str | None) -> str | None:
    """What the field is called in the body of an HTTP request."""
    if field is None:
        return None
    field = field.removeprefix("params.")
    for inner, outer in _PARAMS.items():
        if field.startswith(inner):
            return outer + field.removeprefix(inner)
    return field or None


def error_body(error: PagewireError | HttpRefusal) -> bytes:
    """The JSON of an error."""
    if isinstance(error, HttpRefusal):
        kind = "authentication_error" if error.status == 401 else "invalid_request_error"
        return _body(error.message, kind, error.param, error.code)
    _, kind = status_of(error)
    code = _CONTEXT if isinstance(error, PromptTooLong) else error.code
    return _body(error.message, kind, param_of(error.field), code, _hints(error))


def error_response(error: PagewireError | HttpRefusal) -> web.Response:
    """The answer that tells an error, with `Retry-After` where trying again can help."""
    headers: dict[str, str] = {}
    if isinstance(error, HttpRefusal):
        status, headers = error.status, error.headers
    else:
        status, _ = status_of(error)
        if status in (429, 503):
            headers["Retry-After"] = str(max(1, math.ceil((error.retry_after_ms or _RETRY_AFTER_MS) / 1000)))
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
    return web.Response(status=status, body=error_body(error), content_type="application/json", headers=headers)


def _hints(error: PagewireError) -> dict[str, int]:
    """Extensions: when to try again, and what a refused request would have waited; only where they are known."""
    if error.predicted_ttft_ms is None:
        return {}
    hints = {"predicted_ttft_ms": error.predicted_ttft_ms}
    return hints if error.retry_after_ms is None else hints | {"retry_after_ms": error.retry_after_ms}


def _body(message: str, kind: str, param: str | None, code: str, hints: Mapping[str, int] | None = None) -> bytes:
    error = {"message": message, "type": kind, "param": param, "code": code, **(hints or {})}
    return msgspec.json.encode({"error": error})
