"""Questions beside streams (load, stats, pieces of files). The server answers them in the order in which they were asked."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable

from pagewire_transport.errors import ConnectionLost, InvalidRequest, PagewireError, ProtocolError
from pagewire_transport.limits import FileInfo
from pagewire_transport.messages import Error, FilePiece, FromClient, GetFile, GetLoad, GetStats, Load, Stats

Question = GetStats | GetLoad | GetFile
Answer = Stats | Load | FilePiece

_OUR_FIELDS = ("name", "offset")


class Questions:
    """What was asked over the present connection and is not answered."""

    def __init__(self, send: Callable[[FromClient], None]) -> None:
        self._send = send
        self._asked: deque[asyncio.Future[Answer]] = deque()

    async def ask(self, question: Question, timeout_s: float) -> Answer:
        """Ask, and wait for the answer.

        Raises:
            ConnectionLost: none came in time.
            PagewireError: it was refused.
        """
        asked: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._send(question)
        self._asked.append(asked)
        try:
            return await asyncio.wait_for(asked, timeout_s)
        except TimeoutError:
            raise ConnectionLost(f"no answer after {timeout_s:g} s") from None

    def take(self, answer: Answer) -> None:
        """An answer came."""
        if self._asked:
            asked = self._asked.popleft()
            if not asked.done():
                asked.set_result(answer)

    def take_refusal(self, message: Error, error: PagewireError) -> bool:
        """Whether an error that names no stream was one of a question."""
        is_ours = message.field in _OUR_FIELDS or (message.code == "overloaded" and message.field is None)
        if not self._asked or not is_ours:
            return False
        asked = self._asked.popleft()
        if not asked.done():
            asked.set_exception(error)
        return True

    def fail_all(self, error: PagewireError) -> None:
        """The connection is lost."""
        while self._asked:
            asked = self._asked.popleft()
            if not asked.done():
                asked.set_exception(error)

    async def file(self, info: FileInfo, timeout_s: float) -> bytes:
        """A whole file, piece by piece; `timeout_s` for each.

        Raises:
            ConnectionLost, PagewireError: see `ask`.
            ProtocolError: what came is not the file that was listed.
        """
        data = bytearray()
        while len(data) < info.size:
            piece = await self.ask(GetFile(name=info.name, offset=len(data)), timeout_s)
            if not isinstance(piece, FilePiece) or piece.offset != len(data) or not piece.data:
                raise ProtocolError("the server sent another piece than was asked for")
            data += piece.data
        if hashlib.sha256(data).hexdigest() != info.sha256:
            raise ProtocolError(f"the file {info.name} is not the one that was listed")
        return bytes(data)


def listed(files: tuple[FileInfo, ...], name: str) -> FileInfo:
    """The entry of a file.

    Raises:
        InvalidRequest: the server has no such file.
    """
    for info in files:
        if info.name == name:
            return info
    names = ", ".join(info.name for info in files) or "none"
    raise InvalidRequest(f"the server has no file {name!r}; it has: {names}", field="name")
