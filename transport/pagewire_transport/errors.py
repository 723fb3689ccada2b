"""The error tree. Every refusal is one of these, and travels to the peer as a code, a message and a field.

PagewireError                    base: `code`, `message`, `field`, `retry_after_ms`, `predicted_ttft_ms`
├── InvalidRequest               "invalid_request"     a field is missing, of the wrong type or out of range
│   ├── UnsupportedFeature       "unsupported"         a known field that this door or model cannot honour
│   ├── PromptTooLong            "prompt_too_long"     can never fit: the model's context or the whole KV pool
│   └── UnknownStream            "unknown_stream"      names a stream that this peer does not own
├── ProtocolError                "protocol"            a frame that is no message, or one that is out of order
│   └── VersionMismatch          "version"             no protocol version in common
├── Overloaded                   "overloaded"          a queue or a limit is full; try again after `retry_after_ms`
│   └── SlowReader               "slow_reader"         tokens were not read in time (`on_lag` cancel); `resume` fetches them
├── Draining                     "draining"            the server is shutting down
├── Unauthorized                 "unauthorized"        key or capability refused
├── Cancelled                    "cancelled"           ended by its owner
├── ConnectionLost               "connection_lost"     the peer stopped answering
│   └── TakenOver                "taken_over"          the stream was resumed over another connection
├── DeadlineExceeded             "deadline"            not done within the time asked for
├── ModelError                   "model"               a model folder or file that cannot be served
├── ConfigError                  "config"              an unknown key or a bad value in the configuration
├── NumericError                 "numeric"             NaN or infinity in this request's logits
└── InternalError                "internal"            a fault of ours, of this request only
    └── EngineFailed             "engine_failed"       the engine stopped or stalls
        ├── EngineLost           "engine_lost"         the engine's process ended or fell silent under an open stream
        └── Unavailable          "unavailable"         no engine serves now; try again after `retry_after_ms`

>>> InvalidRequest("must be at least 1", field="max_tokens").code
'invalid_request'
"""

# ruff: noqa: N818  (named by what happened, as they read in a log: `except Overloaded`)

from __future__ import annotations

from typing import ClassVar


class PagewireError(Exception):
    """Base of all errors that a user of Pagewire can meet.

    Args:
        message: one sentence that says what is wrong and, where possible, what to do.
        field: the offending field, dotted (`params.temperature`), or None.
        retry_after_ms: when to try again, or None where trying again cannot help.
        predicted_ttft_ms: of a request that was refused since it would have waited too long: how long.
    """

    code: ClassVar[str] = "error"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        retry_after_ms: int | None = None,
        predicted_ttft_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms
        self.predicted_ttft_ms = predicted_ttft_ms

    def __str__(self) -> str:
        """The message, led by the field where there is one."""
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidRequest(PagewireError):
    code = "invalid_request"


class UnsupportedFeature(InvalidRequest):
    code = "unsupported"


class PromptTooLong(InvalidRequest):
    code = "prompt_too_long"


class UnknownStream(InvalidRequest):
    code = "unknown_stream"


class ProtocolError(PagewireError):
    code = "protocol"


class VersionMismatch(ProtocolError):
    code = "version"


class Overloaded(PagewireError):
    code = "overloaded"


class SlowReader(Overloaded):
    code = "slow_reader"


class Draining(PagewireError):
    code = "draining"


class Unauthorized(PagewireError):
    code = "unauthorized"


class Cancelled(PagewireError):
    code = "cancelled"


class ConnectionLost(PagewireError):
    code = "connection_lost"


class TakenOver(ConnectionLost):
    code = "taken_over"


class DeadlineExceeded(PagewireError):
    code = "deadline"


class ModelError(PagewireError):
    code = "model"


class ConfigError(PagewireError):
    code = "config"


class NumericError(PagewireError):
    code = "numeric"


class InternalError(PagewireError):
    code = "internal"


class EngineFailed(InternalError):
    code = "engine_failed"


class EngineLost(EngineFailed):
    code = "engine_lost"


class Unavailable(EngineFailed):
    code = "unavailable"


def _tree(cls: type[PagewireError]) -> dict[str, type[PagewireError]]:
    out = {cls.code: cls}
    for child in cls.__subclasses__():
        out.update(_tree(child))
    return out


BY_CODE: dict[str, type[PagewireError]] = _tree(PagewireError)


def from_code(
    code: str,
    message: str,
    *,
    field: str | None = None,
    retry_after_ms: int | None = None,
    predicted_ttft_ms: int | None = None,
) -> PagewireError:
    """The error that `code` names; an unknown code (a newer peer) becomes the base class."""
    kind = BY_CODE.get(code, PagewireError)
    return kind(message, field=field, retry_after_ms=retry_after_ms, predicted_ttft_ms=predicted_ttft_ms)
