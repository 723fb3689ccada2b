"""What a welcome tells of a server's limits and files."""

from __future__ import annotations

import msgspec

from pagewire_transport.params import (
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
)

MAX_MESSAGES = 16_384
MAX_TEMPLATE_KWARGS = 64
MAX_FILE_PIECE = 64 * 2**10
"""Bytes of a file in one `file_piece`."""


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A file that `get_file` serves."""

    name: str
    size: int
    sha256: str
    """64 hexadecimal digits in lower case."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a request may have; beyond it the answer is `invalid_request`."""

    max_n: int = MAX_N
    max_stop_strings: int = MAX_STOP_STRINGS
    max_stop_chars: int = MAX_STOP_BYTES
    max_stop_token_ids: int = MAX_STOP_TOKEN_IDS
    max_logit_bias: int = MAX_LOGIT_BIAS
    max_top_logprobs: int = MAX_TOP_LOGPROBS
    max_messages: int = MAX_MESSAGES
    max_template_kwargs: int = MAX_TEMPLATE_KWARGS
    max_file_piece: int = MAX_FILE_PIECE
    max_offences: int = 8
    """Frames that are no messages, after which a peer is dropped and ignored for a minute."""
