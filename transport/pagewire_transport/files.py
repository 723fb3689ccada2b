"""Files that a door serves in pieces: the tokenizer's, so that a client can make text of token ids itself."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from pagewire_transport.errors import InvalidRequest
from pagewire_transport.limits import MAX_FILE_PIECE, FileInfo
from pagewire_transport.messages import FilePiece, GetFile

MAX_FILES: Final = 16


class Files:
    """Held in memory: a tokenizer has some MiB, and a read from a disk has no place on a loop.

    Args:
        contents: each file's bytes by its name.
    """

    def __init__(self, contents: Mapping[str, bytes] | None = None) -> None:
        self._contents = dict(contents or {})
        assert len(self._contents) <= MAX_FILES, "a welcome lists them all"
        self.infos = tuple(
            FileInfo(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
            for name, data in self._contents.items()
        )

    def piece(self, asked: GetFile) -> FilePiece:
        """What was asked for; no bytes at the end of the file.

        Raises:
            InvalidRequest: there is no such file, or the offset is beyond its end.
        """
        data = self._contents.get(asked.name)
        if data is None:
            names = ", ".join(self._contents) or "none"
            raise InvalidRequest(f"no such file; there are: {names}", field="name")
        if asked.offset > len(data):
            raise InvalidRequest(f"is beyond the end of the file, {len(data)}", field="offset")
        piece = data[asked.offset : asked.offset + MAX_FILE_PIECE]
        return FilePiece(name=asked.name, offset=asked.offset, data=piece, size=len(data))
